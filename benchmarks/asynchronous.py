"""Is nobody slowed by others, at 48 workers, beside a slow one, over a slow link?

    python benchmarks/asynchronous.py --case emulated48 | straggler | slow_link | nodes | deaths

emulated48: 48 processes with cnn11, as wide as --cnn11 says (5.0 M parameters). A step computes by sleeping 1.0 s, with
10 % log-normal jitter; all else is real: every worker pushes its update to the owners of the weights, which are all
workers, pulls all parameters each step, and waits for that, by gloo through sockets of the loopback device. speedup_48:
exchanges a second of 48 workers over the steps of one, which exchanges with nobody, in the same run; the first steps do
not count. speedups: the same for each number of workers.
sum_error: how far the weights moved in all, against the sum of what was pushed, relative.
sync_speedup_48: the same of an all-reduce by Overlap; sleep_at_40: seconds of computing below which the speed-up of 48
falls under 40, from what the 48 exchange at most (without any sleep).
straggler (root): four hosts, three with 40 % of a core and one with 8 %, cifarnet on CIFAR-10, in images/s.
async_over_sync: over Overlap with equal shares of the batch; async_over_sync_shares: over Overlap with shares by speed
(Shares); async_over_ideal: over what the four do alone. The last sync point, which waits for a step of the slow one
(8 s), counts.
slow_link (root): two hosts at 200 Mbit/s, bf16 on the wire on both sides, equal samples.
nodes (root): the same with two ranks a host: synchronous inside and asynchronous between the hosts, beside Overlap of
all ranks in two levels; the sides take turns, with equal samples. accuracy_gap: points of top-1 that asynchronous
loses, the mean over --seeds, with its paired 95 % interval. On two cores a seed takes about four minutes.
deaths (root): four workers of `kasoku train` on Fashion-MNIST, each with 45 % of a core; every --kill-every seconds one
of them, rank 0 too, is killed and started again. goodput: images a second over those of the same workers undisturbed,
over the share of the time that the workers were alive; until a killed one has started again it is not alive, and in
goodput_with_starts it is. over_alone: over the images a second of as many workers that train alone while alive.
sync_goodput: of synchronous ranks, over theirs undisturbed. A short form: --case deaths --seconds 60.
Result: records/. Why it matters: [001], 48 GPUs asynchronously.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import finish, parse
from kasoku.core import Comm, Job
from kasoku.distributed import Asynchronous, Fixed, Overlap, TorchComm
from kasoku.distributed.async_sgd.worker import CODECS
from kasoku.models import cnn11

WARM, STEPS = 2, 12
JITTER = 0.1
BESIDE = ("speedup_48", "sync_speedup_48", "exchanges_per_s", "exchange_ms", "cpu_ms")
CLAIMS = {
    "emulated48": {"async/48_workers/gloo": BESIDE},
    "deaths": {
        "async/deaths/goodput": ("goodput", "goodput_with_starts", "over_alone", "images_per_s", "killed"),
        "async/deaths/sync": ("sync_goodput", "sync_goodput_with_starts", "sync_over_alone", "sync_images_per_s"),
    },
}
LOST = 1e-4  # of what was pushed, at most: float32 rounds
MIB = 2**20
DEFAULTS = {"steps": 0, "batch": 64, "widths": [64, 256, 256]}
OWN = {  # the link carries slow_link's parameters in about twice the time that computing takes
    "emulated48": {"steps": STEPS},
    "straggler": {},
    "deaths": {"widths": [32, 64, 128]},
    "slow_link": {"steps": 4000, "batch": 32, "widths": [16, 32, 256]},
    "nodes": {"steps": 2402, "batch": 16, "widths": [16, 32, 256]},  # three epochs, and two steps to warm up
}


def forked(size: int, f: Callable[[Comm], Any], *, limit_s: float) -> list[Any]:
    """f(comm) on so many processes forked from this one, which has started no thread; their results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(rank, size, Path(folder), f)
            children.append(pid)
        left, until = set(children), time.monotonic() + limit_s
        while left and time.monotonic() < until:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.discard(pid)
                    if status:
                        until = min(until, time.monotonic() + 5)
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = [Path(folder) / f"result-{rank}" for rank in range(size)]
        if not all(file.exists() for file in found):
            raise RuntimeError(f"{sum(not file.exists() for file in found)} of {size} processes gave no result")
        return [torch.load(file, weights_only=True) for file in found]


def _child(rank: int, size: int, folder: Path, f: Callable[[Comm], Any]) -> None:
    code = 1
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
        torch.save(f(TorchComm()), folder / f"part-{rank}")
        (folder / f"part-{rank}").rename(folder / f"result-{rank}")
        code = 0
    except BaseException as error:
        print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def paced(comm: Comm, model: torch.nn.Module, technique: Any, *, sleep_s: float, steps: int) -> dict[str, Any]:
    """The moments at which this rank's steps ended, and what was pushed and moved in all."""
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm).apply(technique)
    params = [p for p in model.parameters() if p.requires_grad]
    first = sum(p.detach().double().sum() for p in params)
    draw = random.Random(comm.rank)
    ends, seconds, busy = [], [], []
    value = torch.tensor(2.0**-12 * (1 + comm.rank % 7))
    gradient = [value.expand(p.shape) for p in params]  # computing it is what the sleep stands for
    for _ in range(steps):
        time.sleep(sleep_s * draw.lognormvariate(-(JITTER**2) / 2, JITTER))
        begin = time.monotonic()
        for p, g in zip(params, gradient, strict=True):
            p.grad = g.clone() if isinstance(technique, Overlap) else g
            if isinstance(technique, Overlap):
                for hook in job._hooks["gradient_ready"]:
                    hook(p)
        job.optimizer.step()
        ends.append(time.monotonic())
        busy.append(time.process_time())
        seconds.append(ends[-1] - begin)
    job.drain()
    moved = float(sum(p.detach().double().sum() for p in params) - first)
    pushed = -float(sum(g.double().sum() for g in gradient)) * len(ends) / comm.size
    stale = {} if isinstance(technique, Overlap) or comm.size == 1 else job.kept("asynchronous").staleness
    job.close()
    cpu_s = (busy[-1] - busy[WARM - 1]) / (len(busy) - WARM)
    told = {"ends": ends, "exchange_s": seconds, "moved": moved, "pushed": pushed, "staleness": dict(stale)}
    return told | {"cpu_s": cpu_s}  # of a step


def rate(found: list[dict[str, Any]]) -> float:
    """Steps a second of all workers, while all of them are at work and after the first ones."""
    ends = [one["ends"] for one in found]
    start, stop = max(e[WARM - 1] for e in ends), min(e[-1] for e in ends)
    return sum(start < moment <= stop for e in ends for moment in e) / (stop - start)


def emulated48(arguments: argparse.Namespace) -> None:
    """The case of [001]."""
    torch.manual_seed(0)
    model = cnn11(widths=tuple(arguments.cnn11))
    size = sum(p.numel() for p in model.parameters())
    technique = Asynchronous(hidden=False, wire=arguments.wire, buckets=Fixed(arguments.mib * MIB, MIB))
    figures: dict[str, Any] = {}
    rates, errors, exchange_ms, cpu_ms = {}, [], {}, {}
    for workers in arguments.workers:
        found = forked(
            workers,
            lambda comm: paced(comm, model, technique, sleep_s=arguments.sleep, steps=arguments.steps),
            limit_s=300,
        )
        rates[workers] = rate(found)
        pushed = sum(one["pushed"] for one in found)
        errors.append(abs(found[0]["moved"] - pushed) / abs(pushed))
        if errors[-1] > LOST:
            raise RuntimeError(f"{workers} workers moved the weights by {found[0]['moved']}, and pushed {pushed}")
        every = [s for one in found for s in one["exchange_s"][WARM:]]
        exchange_ms[workers] = round(1e3 * statistics.median(every), 1)
        cpu_ms[workers] = round(1e3 * statistics.mean(one["cpu_s"] for one in found), 1)
        print(f"{workers}: {rates[workers]:.2f} exchanges/s, {exchange_ms[workers]} ms each, error {errors[-1]:.1e}, "
              f"CPU of a worker's step {cpu_ms[workers]} ms", flush=True)  # fmt: skip
    figures["speedups"] = [[n, round(x / rates[1], 2)] for n, x in rates.items()]
    most = max(rates)
    width = CODECS[arguments.wire].dtype.itemsize
    figures |= {f"efficiency_{n}": round(x / rates[1] / n, 3) for n, x in rates.items() if 1 < n < most}
    figures |= {
        f"speedup_{most}": round(rates[most] / rates[1], 2),
        "exchanges_per_s": round(rates[most], 2),
        "gigabytes_per_s": round(rates[most] * 2 * width * size / 1e9, 3),
        "exchange_ms": exchange_ms,
        "cpu_ms": cpu_ms,
        "sum_error": max(errors),
        "n": arguments.steps,
    }
    figures |= limits(arguments, model, technique, rates[1])
    finish("asynchronous_emulated48", {**vars(arguments), "parameters": size}, figures, CLAIMS["emulated48"])


def limits(arguments: argparse.Namespace, model: torch.nn.Module, technique: Any, alone: float) -> dict[str, Any]:
    """What the synchronous engine gains with as many workers, and what the workers bear at most."""
    most, sync = max(arguments.workers), Overlap(technique.buckets, next_forward=False)
    found = forked(most, lambda comm: paced(comm, model, sync, sleep_s=arguments.sleep, steps=WARM + 4), limit_s=300)
    figures: dict[str, Any] = {f"sync_speedup_{most}": round(rate(found) / alone, 2)}
    if not arguments.brief:
        found = forked(
            most, lambda comm: paced(comm, model, technique, sleep_s=0.0, steps=arguments.steps), limit_s=300
        )
        bears = rate(found)  # exchanges a second when nobody computes
        figures |= {"exchanges_per_s_at_most": round(bears, 2), "sleep_at_40": round(40 / bears, 3)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=sorted(OWN), default="emulated48")
    parser.add_argument(
        "--brief", action="store_true", help="emulated48: without what the workers exchange at most, and sleep_at_40"
    )
    parser.add_argument("--wire", choices=sorted(CODECS), default="fp32", help="emulated48")
    parser.add_argument("--mib", type=int, default=32, help="emulated48: of a group")
    parser.add_argument(
        "--cnn11", type=int, nargs=5, default=[48, 96, 192, 288, 320], help="emulated48: channels of its stages"
    )
    parser.add_argument("--sleep", type=float, default=1.0, help="emulated48")
    parser.add_argument("--steps", type=int, help="a worker's (default: 12; slow_link: 4,000; nodes: 2,402)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 48], help="emulated48")
    parser.add_argument(
        "--batch", type=int, help="hosts: images a step and rank (default: 64; slow_link: 32; nodes: 16)"
    )
    parser.add_argument("--widths", type=int, nargs="+", help="hosts: of cifarnet")
    parser.add_argument("--lr", type=float, default=0.05, help="hosts")
    parser.add_argument("--every", type=int, default=0, help="hosts: steps between exchanges; 0: as the link allows")
    parser.add_argument("--seconds", type=float, default=180.0, help="straggler, deaths: of each side")
    parser.add_argument("--kill-every", type=float, default=20.0, help="deaths: seconds")
    parser.add_argument("--save-s", type=float, default=5.0, help="deaths: between checkpoints, seconds")
    parser.add_argument("--seeds", type=int, default=3, help="nodes: trainings of each side")
    arguments = parse(parser)
    torch.set_num_threads(1)
    for name, value in {**DEFAULTS, **OWN[arguments.case]}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.case == "emulated48":
        if arguments.steps <= WARM:
            parser.error(f"--steps {arguments.steps}: more than {WARM}, which do not count")
        emulated48(arguments)
        return 0
    if arguments.case == "deaths":
        from asynchronous_deaths import deaths

        finish("asynchronous_deaths", vars(arguments), deaths(arguments), CLAIMS["deaths"])
        return 0
    if "RANK" not in os.environ:
        from asynchronous_hosts import HOSTS, NODE
        from cluster import LIMIT_S, on_hosts

        each, many = (NODE, arguments.seeds) if arguments.case == "nodes" else (1, 1)
        return on_hosts(__file__, sys.argv[1:], HOSTS[arguments.case], each=each, limit_s=LIMIT_S * many)
    from asynchronous_hosts import rank_main

    rank_main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
