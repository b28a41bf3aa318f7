"""How accurately does the simulator predict the steps of several hosts from a profile of one?

    python benchmarks/simulate_local.py [--hosts 2 4 8] [--mbit 150 400]

As root: hosts are network namespaces behind shaped links, each with the same quota of a core (the cores of this machine
over 8 hosts, less a tenth for the kernel's part of the network). One host alone, under the same quota, is profiled:
kasoku's profiler times the blocks and the step; the update includes the copies of Overlap; two processes of that host
reduce over its loopback, which measures the latency of a message and the CPU time of a byte under the quota. From that
and the rate of the links the simulator predicts a step; then the real engine trains CIFAR ResNet-18, in
bf16 where the hardware computes it, on the hosts, in graded groups, with and without next-forward overlap, and steps
are timed.
The prediction assumes TCP's part of the rate (1,448 of 1,514 bytes of a frame) and no jitter: the hosts are equal.
Nothing is fitted to a run of several hosts. Nothing else may run at the same time: a quota is not a reservation.
no_communication_median_abs_error: computing alone in place of the simulation.
Result: records/. Why it matters: a plan for machines that are not rented
yet is only as good as its predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cluster import LIMIT_S, Side, Workload, agreed, connected, on_hosts, ours, shape, timed
from common import finish, parse, seconds_per_call, spread
from kasoku.core import Job
from kasoku.device import tune_malloc
from kasoku.distributed import Graded
from kasoku.optim import sgd
from kasoku.report import print_table
from kasoku.report.profiler import Profiler
from kasoku.simulate import Cluster, Sharing, Simulator, model_costs, profiled
from kasoku.simulate.cluster import ClusterNode, Gpu, Protocol

CORES = len(os.sched_getaffinity(0))
SHARE = 0.9 * CORES / 8  # of a core, of each host
PAYLOAD = 1448 / 1514  # of a frame's bytes, of TCP over Ethernet
WAYS = {"barrier": False, "next_forward": True}
STEPS, PROFILED = 3, 6
CLAIMS = {
    "simulate/local/median_error": ("median_abs_error", "no_communication_median_abs_error"),
    "simulate/local/max_error": "max_abs_error",
}
CASE_S = 200.0  # of timed rounds on one number of hosts: a round starts only if it should end within this time


@dataclass(frozen=True)
class Settings:
    """The settings of a rank: the workload, link rates, the largest number of rounds, the folder of results."""

    work: Workload
    mbit: list[float]
    rounds: int
    folder: Path


def profile(settings: Settings) -> None:
    """One host: its blocks, its update, what messages take of it. Writes profile.json, ledger.json and link.json."""
    tune_malloc()  # as on the hosts: else a step here faults its pages anew, and there not
    torch.set_num_threads(1)
    model = settings.work.network()
    job = Job(model, sgd(model, lr=0.001, momentum=0.9, weight_decay=5e-4), loader=[settings.work.data(0)])
    profiler = Profiler(job, settings.work.dtype)
    with settings.work.computing(cached=False):
        profiler.warm_up()
        plain = profiler.plain(PROFILED)
        profile = profiler.look(PROFILED, plain)
    grads = [p.detach().clone() for p in model.parameters()]
    homes = [torch.empty_like(p) for p in grads]

    def carry() -> None:
        for home, grad in zip(homes, grads, strict=True):
            home.copy_(grad).div_(2)

    carried_s = statistics.median(seconds_per_call(carry, calls=9))
    blocks_s = sum(block["forward_s"] + block["backward_s"] for block in profile.blocks)
    update_s = max(0.0, statistics.median(iteration.step_s for iteration in plain) - blocks_s) + carried_s
    put(settings.folder / "profile.json", asdict(profile))
    put(settings.folder / "ledger.json", {"facts": {"batch": settings.work.batch}, "step_s": {"update": update_s}})
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "LOOPBACK": "1"}
    pair = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | env | {"RANK": str(i)}) for i in (0, 1)]
    codes = [p.wait() for p in pair]
    if any(codes):  # of a killed process: below 0
        raise RuntimeError("the two processes of one host did not reduce")


def loopback(settings: Settings) -> None:
    """Measures the latency of a hop and the time of a byte between two processes that share a host's quota."""
    comm = connected()
    small, large = torch.zeros(1), torch.zeros(2**21)
    small_s, large_s = (
        statistics.median(seconds_per_call(lambda x=x: comm.all_reduce(x).wait(), calls=calls, warm=3))
        for x, calls in ((small, 61), (large, 15))
    )
    if comm.rank == 0:
        put(
            settings.folder / "link.json",
            {"hop_s": small_s / 2, "busy_s_a_byte": (large_s - small_s) / large.nbytes / 2},
        )


def hosts_main(settings: Settings) -> None:
    """Each of several hosts: the real engine's steps at every rate, both ways."""
    comm = connected()
    sides = {name: Side(settings.work, comm, ours(comm, Graded(), next_forward=late)) for name, late in WAYS.items()}
    for side in sides.values():
        timed(comm, side, steps=1)  # chooses kernels and takes memory, as the profiler's first steps did
    steps_s: dict[str, list[float]] = {}
    start, done = time.perf_counter(), 0
    while done == 0 or (
        done < settings.rounds and agreed(comm, time.perf_counter() - start) * (done + 1) / done < CASE_S
    ):
        for mbit in settings.mbit:
            shape(mbit)
            for name, side in sides.items():
                seconds = timed(comm, side, steps=STEPS)
                steps_s.setdefault(f"{mbit:g} {name}", []).append(seconds)
        done += 1
    if comm.rank == 0:
        put(settings.folder / f"steps_{comm.size}.json", steps_s)


def put(file: Path, document: Any) -> None:
    """Writes JSON."""
    file.write_text(json.dumps(document))


def here(hosts: int, mbit: float, hop_s: float, compute_share: float) -> Cluster:
    """This machine's hosts as a cluster; `compute_share`: the part of a quota that a transfer leaves to computing."""
    # speeds of the device only share a block's measured time among its layers
    device = Gpu("host", 0.0, 1.0, 1, 10**6, tflops=0.1, memory_gb_s=10.0, compute_share=compute_share)
    gloo = Protocol("gloo", 0.0, (0.0, 1e6 * hop_s), (0.0, 1e6 * hop_s), PAYLOAD)
    node = ClusterNode(1, 0.0, 1, mbit / 8e3)
    return Cluster("here", hosts, node, own_gpu=device, protocols=(), own_protocol=gloo)


def simulated(settings: Settings, hosts: int, mbit: float, *, late: bool) -> tuple[float, float]:
    """Seconds of a step, and of computing alone."""
    with torch.device("meta"):
        net = model_costs(settings.work.model, settings.work.network(), settings.work.data(0)[0].shape[1:])
    link = json.loads((settings.folder / "link.json").read_text())
    measured = profiled([str(settings.folder)], net)
    busy = link["busy_s_a_byte"] * mbit * 1e6 / 8  # of the quota's time, while a transfer is under way
    cluster = here(hosts, mbit, link["hop_s"], max(0.05, 1 - busy))
    step = Simulator(cluster, net, Sharing(Graded(), late), 0.0, profile=measured).step(
        hosts, hosts * settings.work.batch
    )
    return step.step_s, step.compute_s


def compared(settings: Settings, hosts: list[int]) -> dict[str, object]:
    """The figures, and a table of them."""
    rows, errors, alone = {}, {}, {}
    for n in hosts:
        for key, values in json.loads((settings.folder / f"steps_{n}.json").read_text()).items():
            mbit, name = key.split()
            took = statistics.median(values)
            expected, compute = simulated(settings, n, float(mbit), late=WAYS[name])
            case = f"{n} hosts, {mbit} Mbit/s, {name}"
            errors[case], alone[case] = expected / took - 1, compute / took - 1
            seen = spread(values)
            rows[case] = (
                f"{took:.3f} s ({seen['min']:.3f} to {seen['max']:.3f}, n {seen['n']}), foretold {expected:.3f} "
                f"({errors[case]:+.1%}); computing {compute:.3f}"
            )
    print_table("a step", rows)
    return {
        "median_abs_error": statistics.median(map(abs, errors.values())),
        "max_abs_error": max(map(abs, errors.values())),
        "n": len(errors),
        "no_communication_median_abs_error": statistics.median(map(abs, alone.values())),
        "errors": {case: round(error, 4) for case, error in errors.items()},
        "link": json.loads((settings.folder / "link.json").read_text()),
        "update_s": json.loads((settings.folder / "ledger.json").read_text())["step_s"]["update"],
        "steps": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mbit", type=float, nargs="+", default=[150.0, 400.0], help="rates of a host's link")
    parser.add_argument("--batch", type=int, default=16, help="images a host")
    parser.add_argument("--rounds", type=int, default=3, help=f"of {STEPS} timed steps a case, as time allows")
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if "RANK" not in os.environ:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for n in (1, *arguments.hosts):
                start = time.perf_counter()
                left_s = LIMIT_S - (start - begin)
                failed = on_hosts(__file__, [*sys.argv[1:], "--folder", folder], n, share=SHARE, limit_s=left_s)
                if failed:
                    return failed
                print(f"{n} hosts: {time.perf_counter() - start:.0f} s", flush=True)
            settings = Settings(Workload(batch=arguments.batch), arguments.mbit, arguments.rounds, Path(folder))
            figures = compared(settings, arguments.hosts)
        parameters = {"hosts": arguments.hosts, "mbit": arguments.mbit, "batch": arguments.batch, "steps": STEPS}
        finish("simulate_local", {**parameters, "rounds": arguments.rounds, "share": SHARE}, figures, CLAIMS)
        return 0
    settings = Settings(Workload(batch=arguments.batch), arguments.mbit, arguments.rounds, arguments.folder)
    if "LOOPBACK" in os.environ:
        loopback(settings)
    else:
        (profile if os.environ["WORLD_SIZE"] == "1" else hosts_main)(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
