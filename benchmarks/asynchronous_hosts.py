"""The cases of asynchronous.py that have hosts of their own: a slow one among four, and two with a slow link.

Of the two with a slow link each has one rank, or two that step together (nodes).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asynchronous_accuracy import images
from cluster import connected, ratio, shape
from common import finish
from kasoku.core import Comm, Job, Technique
from kasoku.core.schedule import Linear
from kasoku.data import Augment, Dataset, Shares, by_speed, loader, sample
from kasoku.device import Device, choose
from kasoku.distributed import Asynchronous, Graded, Hierarchical, Overlap, Wire
from kasoku.models import cifarnet
from kasoku.optim import Rate, cross_entropy, sgd
from kasoku.report.significance import interval
from kasoku.training.evaluation import evaluate

HOSTS = {"straggler": 4, "slow_link": 2, "nodes": 2}
NODE, ROUNDS = 2, 8  # of nodes: ranks of a host; turns of each side
CLAIMS = {
    "straggler": {
        "async/straggler/over_sync": ("async_over_sync", "async_over_sync_shares", "images_per_s", "mean_staleness"),
        "async/straggler/over_ideal": "async_over_ideal",
    },
    "slow_link": {
        "async/slow_link/over_sync": ("async_over_sync", "images_per_s"),
        "async/slow_link/gap": ("accuracy_gap", "top1"),
    },
    "nodes": {
        "async/nodes/over_sync": ("async_over_sync", "images_per_s", "mean_staleness"),
        "async/nodes/gap": ("accuracy_gap", "top1"),
    },
}
SHARES = (0.4, 0.4, 0.4, 0.08)  # of a core, by rank
PERIOD_US, MBIT, WARM = 100_000, 200.0, 2
GROUPS = Graded()


def sides(asked: argparse.Namespace) -> dict[str, tuple[Technique, ...]]:
    """The same groups on both sides, and over the slow link bf16."""
    own_pace = Asynchronous(buckets=GROUPS, every=asked.every)
    if asked.case == "straggler":
        return {"sync": (Overlap(GROUPS),), "async": (own_pace,)}
    own_pace = replace(own_pace, wire="bf16")
    if asked.case == "slow_link":
        return {"sync": (Overlap(GROUPS, reducer=Wire("bf16")),), "async": (own_pace,)}
    two_levels = Overlap(GROUPS, reducer=Hierarchical(node=NODE, across=Wire("bf16")))
    return {"sync": (two_levels,), "async": (replace(own_pace, node=NODE), Overlap(GROUPS))}


def limited(share: float, rank: int) -> Path:
    """Puts this process under a quota of so much of a core (cgroup v1); the group's folder."""
    top = Path(tempfile.mkdtemp())  # a host sees a /sys of its own
    subprocess.run(["mount", "-t", "cgroup", "-o", "cpu", "none", str(top)], check=True)
    folder = top / f"kasoku-{os.getppid()}-{rank}"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (folder / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    return folder


def freed(folder: Path) -> None:
    """Takes this process out of it again, and removes it."""
    (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
    folder.rmdir()
    subprocess.run(["umount", str(folder.parent)], check=False)
    folder.parent.rmdir()


def job_of(
    comm: Comm, dataset: Dataset, asked: argparse.Namespace, techniques: Sequence[Technique], seed: int = 0
) -> Job:
    """The same network and data on all sides; rates that fall to 0 over `--steps`."""
    torch.manual_seed(seed)
    batches = loader(dataset, "train", asked.batch * comm.size, comm=comm, seed=seed)
    model = cifarnet(widths=tuple(asked.widths), norm_momentum=0.2)
    model.prepare(sample(dataset, 2000))
    optimizer = sgd(model, lr=asked.lr, momentum=0.9, weight_decay=5e-4)
    loss = functools.partial(cross_entropy, smoothing=0.2)
    job = Job(model, optimizer, loader=batches, loss=loss, comm=comm)
    course = [Rate(Linear(epochs=asked.steps / len(batches)))] if asked.steps else []
    varied = Augment(flip="random", translate=2)
    return job.apply(*choose(Device(threads=1)).techniques, *course, varied, *techniques)


def trained(job: Job, *, steps: int = 10**9, seconds: float = 1e9) -> tuple[int, float]:
    """So many steps, or for so long: how many, and how long they took."""
    start, done = time.perf_counter(), 0
    while True:
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            done += 1
            if done >= steps or time.perf_counter() - start > seconds:
                return done, time.perf_counter() - start


def rate(comm: Comm, images: int, seconds: float) -> float:
    """Images a second of all ranks."""
    return float(sum(n / s for n, s in comm.gather_objects((images, seconds))))


def straggler(comm: Comm, asked: argparse.Namespace) -> dict[str, Any]:
    """Four hosts, one of them with a fifth of the others' processor."""
    dataset = images()
    folder = limited(SHARES[comm.rank], comm.rank)
    pace, stale = {}, 0.0
    try:
        job = job_of(comm, dataset, asked, ())
        trained(job, steps=2)
        comm.gather_objects(None)
        done, took = trained(job, seconds=asked.seconds)
        pace["ideal"] = rate(comm, done * asked.batch, took)
        equal = (asked.batch,) * comm.size
        by_pace = by_speed(asked.batch * comm.size, comm.gather_objects(done / took))
        both = sides(asked)
        shared = (*both["sync"], Shares(by_pace))
        for name, techniques, shares in [
            ("sync", both["sync"], equal),
            ("sync_shares", shared, by_pace),
            ("async", both["async"], equal),
        ]:
            job = job_of(comm, dataset, asked, techniques)
            _, took = trained(job, steps=2)
            slowest = max(comm.gather_objects(took / 2))
            job.drain()
            waits = name != "async"
            much = {"steps": max(3, round(asked.seconds / slowest))} if waits else {"seconds": asked.seconds}
            done, took = trained(job, **much)
            start = time.perf_counter()
            job.drain()
            pace[name] = rate(comm, done * shares[comm.rank], took + time.perf_counter() - start)
            stale = stale if waits else mean_staleness(job)
            job.close()
    finally:
        freed(folder)
    return {
        "images_per_s": {name: round(x, 1) for name, x in pace.items()},
        "async_over_sync": round(pace["async"] / pace["sync"], 3),
        "async_over_sync_shares": round(pace["async"] / pace["sync_shares"], 3),
        "async_over_ideal": round(pace["async"] / pace["ideal"], 3),
        "mean_staleness": stale,
        "shares": by_pace,
        "n": 1,
    }


def slow_link(comm: Comm, asked: argparse.Namespace) -> dict[str, Any]:
    """Two hosts at 200 Mbit/s, equal samples on both sides."""
    dataset = images()
    shape(MBIT)
    pace, top1 = {}, {}
    for name, techniques in sides(asked).items():
        job = job_of(comm, dataset, asked, techniques)
        trained(job, steps=WARM)
        job.drain()
        start = time.perf_counter()
        done, _ = trained(job, steps=asked.steps - WARM)
        job.drain()
        pace[name] = rate(comm, done * asked.batch, time.perf_counter() - start)
        top1[name] = accuracy(comm, job, dataset)
        job.close()
    shape(0)
    return {
        "async_over_sync": round(pace["async"] / pace["sync"], 3),
        "n": 1,
        "accuracy_gap": round(top1["sync"] - top1["async"], 2),
        "images_per_s": {name: round(x, 1) for name, x in pace.items()},
        "top1": {name: round(x, 2) for name, x in top1.items()},
    }


def accuracy(comm: Comm, job: Job, dataset: Dataset) -> float:
    """Percent of the test images, which rank 0 evaluates for all."""
    with job.evaluation() as judged:
        score = 100 * evaluate(judged, loader(dataset, "test", 1000)).top1 if comm.rank == 0 else 0.0
    return comm.broadcast_object(score)


def mean_staleness(job: Job) -> float:
    """Of the updates up to the last sync point."""
    found = job.kept("asynchronous").staleness
    return round(sum(s * n for s, n in found.items()) / max(1, sum(found.values())), 2)


def nodes(comm: Comm, asked: argparse.Namespace) -> dict[str, Any]:
    """Two hosts of two ranks at 200 Mbit/s, equal samples on both sides, which take turns; as many seeds as asked."""
    dataset = images()
    if comm.rank % NODE == 0:  # ranks of a host share its link
        shape(MBIT)
    seconds: dict[str, list[float]] = {name: [] for name in sides(asked)}
    top1: dict[str, list[float]] = {name: [] for name in sides(asked)}
    turn, stale = (asked.steps - WARM) // ROUNDS, []
    for seed in range(asked.seeds):
        jobs = {name: job_of(comm, dataset, asked, techniques, seed) for name, techniques in sides(asked).items()}
        for job in jobs.values():
            trained(job, steps=WARM)
            job.drain()
        for number in range(ROUNDS):
            for name in list(jobs) if number % 2 == 0 else reversed(list(jobs)):
                comm.gather_objects(None)
                start = time.perf_counter()
                trained(jobs[name], steps=turn)
                jobs[name].drain()
                seconds[name].append(max(comm.gather_objects(time.perf_counter() - start)))
        stale.append(mean_staleness(jobs["async"]))
        for name, job in jobs.items():
            top1[name].append(accuracy(comm, job, dataset))
            job.close()
        if comm.rank == 0:
            print(f"seed {seed}: top-1 {[(name, round(values[-1], 2)) for name, values in top1.items()]}", flush=True)
    if comm.rank % NODE == 0:
        shape(0)
    pace = {name: asked.batch * comm.size * turn / statistics.median(took) for name, took in seconds.items()}
    gaps = [one - other for one, other in zip(top1["sync"], top1["async"], strict=True)]
    gap, *ends = interval(gaps) if len(gaps) > 1 else gaps
    return {
        "async_over_sync": round(pace["async"] / pace["sync"], 3),
        "spread": ratio(seconds["sync"], seconds["async"]),
        "n": ROUNDS * asked.seeds,
        "accuracy_gap": round(gap, 2),
        "accuracy_gap_interval": [round(end, 2) for end in ends],
        "images_per_s": {name: round(x, 1) for name, x in pace.items()},
        "top1": {name: [round(x, 2) for x in values] for name, values in top1.items()},
        "samples": asked.batch * comm.size * (WARM + turn * ROUNDS),
        "mean_staleness": stale,
    }


def rank_main(asked: argparse.Namespace) -> None:
    """What each host does."""
    comm = connected()
    figures = {"straggler": straggler, "slow_link": slow_link, "nodes": nodes}[asked.case](comm, asked)
    if comm.rank == 0:
        finish(f"asynchronous_{asked.case}", {**vars(asked), "hosts": HOSTS[asked.case]}, figures, CLAIMS[asked.case])
