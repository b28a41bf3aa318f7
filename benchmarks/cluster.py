"""What the benchmarks of ranks share: two hosts on this machine with a shaped link between them, and rounds of steps.

A benchmark calls `on_hosts(__file__, arguments)` as root: each rank is a process in a network namespace, with
one thread on a core of its own, or with a share of one; a bridge joins the namespaces, and `shape` limits what each may
send. In the ranks `connected()` gives the Comm.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common import spread
from kasoku.core import InputError, Job
from kasoku.core.hardware import computes_bf16
from kasoku.device import tune_malloc
from kasoku.distributed import Overlap, Policy, TorchComm
from kasoku.distributed.ddp.cost_model import BucketPlan
from kasoku.models import alexnet, cifar_resnet18, cifar_vgg16_bn
from kasoku.optim import sgd

PORT, PLANNING = 29511, 16  # PLANNING: steps until Planned has measured
LIMIT_S = 1700  # a case of overlap.py takes 920 s on a slow machine
PERIOD_US, _CGROUPS = 5000, Path("/sys/fs/cgroup/cpu")  # a quota of less than 1 ms a period is not allowed
MODES = {"balanced": 1.0, "comm_bound": 2.5, "compute_bound": 0.0}  # the all-reduce alone over computing alone
MODELS: dict[str, Callable[..., nn.Module]] = {"resnet18": cifar_resnet18, "alexnet": alexnet, "vgg16": cifar_vgg16_bn}
SIDE = {"resnet18": 32, "alexnet": 64, "vgg16": 32}  # pixels: small, so that ranks without a GPU compute them


def on_hosts(  # noqa: PLR0913 - each is an option of its own
    script: str,
    arguments: Sequence[str],
    hosts: int = 2,
    *,
    each: int = 1,
    share: float = 0.0,
    limit_s: float = LIMIT_S,
    loopback: bool = False,
) -> int:
    """Runs script with RANK set on each host until all have ended; returns the worst exit code.

    `each`: the ranks of a host. `share`: of a core, that each host may use (0: a whole one). `limit_s`: all are ended
    after so many seconds. `loopback`: no hosts of their own, which needs no root.
    """
    if os.geteuid() != 0 and not loopback:
        raise InputError("network namespaces: only as root, on Linux; run it as root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed then too
    places = contextlib.nullcontext([""] * hosts) if loopback else namespaces(hosts)
    with places as names, _quotas(names if share else [], share) as groups:
        ranks = []
        for rank, name in enumerate(name for name in names for _ in range(each)):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(hosts * each),
                "MASTER_ADDR": "127.0.0.1" if loopback else "10.99.0.1",
                "MASTER_PORT": str(PORT),
            }
            env |= {"GLOO_SOCKET_IFNAME": "lo" if loopback else "ve0", "OMP_NUM_THREADS": "1"}
            core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
            command = ["taskset", "-c", str(core), sys.executable, script, *arguments]
            command = command if loopback else ["ip", "netns", "exec", name, *command]
            ranks.append(subprocess.Popen(command, env=os.environ | env))
            if groups:
                (groups[rank // each] / "cgroup.procs").write_text(str(ranks[-1].pid))
        end = time.monotonic() + limit_s
        try:
            while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < end:
                time.sleep(0.2)
            if time.monotonic() >= end:
                print(f"{Path(script).name}: {hosts} hosts had not ended after {limit_s:.0f} s", file=sys.stderr)
        finally:
            for p in ranks:
                p.kill()
                p.wait()
        return max(abs(p.returncode) for p in ranks)


@contextlib.contextmanager
def namespaces(hosts: int) -> Iterator[list[str]]:
    """One namespace a host and one with the bridge that joins them; removed at the end."""
    switch, names = f"ks{os.getpid()}", [f"kh{os.getpid()}-{i}" for i in range(hosts)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            ip("link", "add", "ve0", "netns", name, "type", "veth", "peer", "name", f"p{i}", "netns", switch)
            ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "ve0")
            ip("-n", name, "link", "set", "ve0", "up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def _quotas(names: Sequence[str], share: float) -> Iterator[list[Path]]:
    """A control group (v1) a name, whose processes together get a share of a core, evenly; removed at the end."""
    groups = [_CGROUPS / name for name in names]
    try:
        for group in groups:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
        yield groups
    except OSError as error:
        raise InputError(f"{_CGROUPS}: {error}: control groups v1 with a cpu controller are wanted") from error
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                for process in (group / "cgroup.procs").read_text().split():  # a rank's own, left behind
                    os.kill(int(process), signal.SIGKILL)
                time.sleep(0.1)
                group.rmdir()


def shape(mbit: float) -> None:
    """Limits what this host may send, in Mbit/s; 0: no limit."""
    if mbit:
        rule = ["rate", f"{round(1000 * mbit)}kbit", "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", "ve0", "root", "tbf", *rule], check=True)
    else:
        subprocess.run(["tc", "qdisc", "del", "dev", "ve0", "root"], stderr=subprocess.DEVNULL, check=False)


@dataclass(frozen=True)
class Workload:
    """What each rank trains: network, images a rank and step, bf16 where the hardware computes it."""

    model: str = "resnet18"
    batch: int = 64

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products compute in."""
        return torch.bfloat16 if computes_bf16(torch.device("cpu")) else torch.float32

    def computing(self, *, cached: bool = True) -> torch.autocast:
        """The context of a forward in that type."""
        half = self.dtype is torch.bfloat16
        return torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=cached)

    def network(self) -> nn.Module:
        """The network with ten classes, in channels_last, the same on all ranks."""
        torch.manual_seed(0)
        return MODELS[self.model](num_classes=10).to(memory_format=torch.channels_last)

    def data(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch."""
        random = torch.Generator().manual_seed(rank)
        side = SIDE[self.model]
        x_NCHW = torch.randn(self.batch, 3, side, side, generator=random).to(memory_format=torch.channels_last)
        return x_NCHW, torch.randint(10, (self.batch,), generator=random)


# What makes a model share its gradients.
Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Job | None]]


def ours(comm: TorchComm, policy: Policy | None = None, *, next_forward: bool = True, shard: bool = False) -> Wrap:
    """Wraps a model with Overlap."""

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Job]:
        more = {"buckets": policy} if policy else {}
        job = Job(model, optimizer, comm=comm).apply(Overlap(next_forward=next_forward, shard=shard, **more))
        return model, job

    return wrap


class Side:
    """One way to train, ready to be timed: to call it is a whole step. `job` is there where the house's Overlap is."""

    def __init__(self, work: Workload, comm: TorchComm, wrap: Wrap) -> None:
        model = work.network()
        self.optimizer = sgd(model, lr=0.001, momentum=0.9, weight_decay=5e-4)
        self.model, self.job = wrap(model, self.optimizer)
        self.x_NCHW, self.y_N = work.data(comm.rank)
        self.computing = work.computing()

    def once(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self()
        return time.perf_counter() - start

    def drain(self) -> None:
        """Waits for what the last step left under way."""
        if self.job:
            self.job.drain()

    def plan(self) -> None:
        """Goes on until the plan of groups is made."""
        for _ in range(PLANNING):
            self()
        self.drain()

    def __call__(self) -> None:
        """Forward, backward, update."""
        with self.computing:
            out = self.model(self.x_NCHW)
        nn.functional.cross_entropy(out.float(), self.y_N).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Way:
    """A plan of groups for a side, which goes over to it where it had another; so all plans have the same memory."""

    side: Side
    plan: BucketPlan
    late: bool

    def __call__(self) -> None:
        """A whole step."""
        engine = self.side.job.kept("overlap")
        if engine.layout.plan is not self.plan or engine.late != self.late:
            self.drain()
            engine.late = True
            engine.change_plan(self.plan, late=self.late)
        self.side()

    def drain(self) -> None:
        """Waits for what the last step left under way."""
        self.side.drain()


class Transfer:
    """An all-reduce of unrelated buffers as large as the gradients, in pieces of 2 MiB."""

    def __init__(self, comm: TorchComm, model: nn.Module) -> None:
        self.comm = comm
        self.flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def start(self) -> None:
        """Sends all pieces."""
        self.works = [self.comm.all_reduce(piece) for piece in self.flat.split(2**19)]

    def wait(self) -> None:
        """Waits for them."""
        for work in self.works:
            work.wait()

    def __call__(self) -> None:
        """Both."""
        self.start()
        self.wait()

    def once(self) -> float:
        """Seconds of both, from a common start."""
        self.comm.all_reduce(torch.zeros(1)).wait()
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


def connected() -> TorchComm:
    """This rank, in a group with the others; malloc keeps what is freed on all sides, as `kasoku train` has it do.

    Else which side's gradients fault their pages anew at each step depends on what others left in the heap.
    """
    tune_malloc()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    atexit.register(dist.destroy_process_group)  # later, a thread of gloo that still runs would abort the process
    return TorchComm()


def agreed(comm: TorchComm, seconds: float) -> float:
    """The mean over ranks."""
    x = torch.tensor([seconds], dtype=torch.float64)
    comm.all_reduce(x, op="mean").wait()
    return float(x)


def timed(comm: TorchComm, step: Callable[[], object], *, steps: int, warm: int = 1) -> float:
    """Seconds a step in the steady state: after `warm` steps, without a wait at either end; the mean over ranks.

    Before and after it nothing is under way, so that no side pays for the transfers of another.
    """
    comm.all_reduce(torch.zeros(1)).wait()
    for _ in range(warm):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - start) / steps
    if isinstance(step, Side | Way):
        step.drain()
    return agreed(comm, seconds)


def rounds(
    comm: TorchComm, sides: Mapping[str, Callable[[], object]], *, steps: int, budget_s: float, least: int = 3
) -> dict[str, list[float]]:
    """Seconds a step of each side, interleaved, in as many rounds as the time allows; every second round backwards."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    start, done = time.perf_counter(), 0
    while done < least or agreed(comm, time.perf_counter() - start) * (done + 1) / done < budget_s:
        for name in list(sides) if done % 2 == 0 else reversed(list(sides)):
            found[name].append(timed(comm, sides[name], steps=steps))
        done += 1
    return found


def balance(comm: TorchComm, compute_s: Callable[[], float], send_s: Callable[[], float], ratio: float) -> float:
    """Shapes the link so that communicating alone takes `ratio` times computing alone, within 3 %; returns Mbit/s."""
    mbit = 1000.0
    for _ in range(10):
        shape(mbit)
        computing, sending = (agreed(comm, statistics.median(f() for _ in range(3))) for f in (compute_s, send_s))
        if abs(sending / (ratio * computing) - 1) < 0.03:
            return mbit
        mbit *= sending / (ratio * computing)
    took = f"sending {sending:.3f} s, computing {computing:.3f} s"
    raise RuntimeError(f"not balanced within 3 % in 10 tries: {took}; if sending stays too long, give a larger --batch")


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios of the rounds."""
    return {k: round(v, 4) for k, v in spread([a / b for a, b in zip(ours, theirs, strict=True)]).items()}
