"""The cases of asynchronous.py that have hosts of their own: a slow one among four, and two with a slow link."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asynchronous_accuracy import images
from cluster import connected, shape
from common import finish
from kasoku.core import Comm, Job, Technique
from kasoku.core.schedule import Linear
from kasoku.data import Augment, Dataset, loader, sample
from kasoku.device import Device, choose
from kasoku.distributed import Asynchronous, Graded, Overlap
from kasoku.distributed.ddp.compression import Wire
from kasoku.models import cifarnet
from kasoku.optim import Rate, cross_entropy, sgd
from kasoku.training.evaluation import evaluate

HOSTS = {"straggler": 4, "slow_link": 2}
CLAIMS = {
    "straggler": {
        "async/straggler/over_sync": ("async_over_sync", "images_per_s", "mean_staleness"),
        "async/straggler/over_ideal": "async_over_ideal",
    },
    "slow_link": {
        "async/slow_link/over_sync": ("async_over_sync", "images_per_s"),
        "async/slow_link/gap": ("accuracy_gap", "top1"),
    },
}
SHARES = (0.4, 0.4, 0.4, 0.08)  # of a core, by rank
PERIOD_US, MBIT, WARM = 100_000, 200.0, 2
GROUPS = Graded()


def sides(asked: argparse.Namespace) -> dict[str, Technique]:
    """The same groups on both sides, and over the slow link bf16."""
    own_pace = Asynchronous(buckets=GROUPS, every=asked.every)
    if asked.case == "straggler":
        return {"sync": Overlap(GROUPS), "async": own_pace}
    return {"sync": Overlap(GROUPS, reducer=Wire("bf16")), "async": replace(own_pace, wire="bf16")}


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


def job_of(comm: Comm, dataset: Dataset, asked: argparse.Namespace, technique: Technique | None) -> Job:
    """The same network and data on all sides; rates that fall to 0 over `--steps`."""
    torch.manual_seed(0)
    batches = loader(dataset, "train", asked.batch * comm.size, comm=comm)
    model = cifarnet(widths=tuple(asked.widths), norm_momentum=0.2)
    model.prepare(sample(dataset, 2000))
    optimizer = sgd(model, lr=asked.lr, momentum=0.9, weight_decay=5e-4)
    loss = functools.partial(cross_entropy, smoothing=0.2)
    job = Job(model, optimizer, loader=batches, loss=loss, comm=comm)
    course = [Rate(Linear(epochs=asked.steps / len(batches)))] if asked.steps else []
    varied = Augment(flip="random", translate=2)
    return job.apply(*choose(Device(threads=1)).techniques, *course, varied, *([technique] if technique else []))


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


def rates(comm: Comm, done: int, seconds: float) -> float:
    """Steps a second of all ranks."""
    return float(sum(n / s for n, s in comm.gather_objects((done, seconds))))


def straggler(comm: Comm, asked: argparse.Namespace) -> dict[str, Any]:
    """Four hosts, one of them with a fifth of the others' processor."""
    dataset = images()
    folder = limited(SHARES[comm.rank], comm.rank)
    figures: dict[str, Any] = {}
    try:
        job = job_of(comm, dataset, asked, None)
        trained(job, steps=2)
        comm.gather_objects(None)
        figures["ideal"] = rates(comm, *trained(job, seconds=asked.seconds))
        for name, technique in sides(asked).items():
            job = job_of(comm, dataset, asked, technique)
            _, took = trained(job, steps=2)
            slowest = max(comm.gather_objects(took / 2))
            job.drain()
            much = {"steps": max(3, round(asked.seconds / slowest))} if name == "sync" else {"seconds": asked.seconds}
            done, took = trained(job, **much)
            start = time.perf_counter()
            job.drain()
            figures[name] = rates(comm, done, took + time.perf_counter() - start)
            if name == "async":
                found = job.kept("asynchronous").staleness
                figures["mean_staleness"] = round(sum(s * n for s, n in found.items()) / max(1, sum(found.values())), 2)
            job.close()
    finally:
        freed(folder)
    pace = {name: figures.pop(name) for name in ("ideal", "sync", "async")}
    figures["images_per_s"] = {name: round(asked.batch * x, 1) for name, x in pace.items()}
    figures["async_over_sync"] = round(pace["async"] / pace["sync"], 3)
    figures["n"] = 1
    figures["async_over_ideal"] = round(pace["async"] / pace["ideal"], 3)
    return figures


def slow_link(comm: Comm, asked: argparse.Namespace) -> dict[str, Any]:
    """Two hosts at 200 Mbit/s, equal samples on both sides."""
    dataset = images()
    shape(MBIT)
    pace, top1 = {}, {}
    for name, technique in sides(asked).items():
        job = job_of(comm, dataset, asked, technique)
        trained(job, steps=WARM)
        job.drain()
        start = time.perf_counter()
        done, _ = trained(job, steps=asked.steps - WARM)
        job.drain()
        pace[name] = rates(comm, done, time.perf_counter() - start)
        with job.evaluation() as judged:
            score = 100 * evaluate(judged, loader(dataset, "test", 1000)).top1 if comm.rank == 0 else 0.0
        top1[name] = comm.broadcast_object(score)
        job.close()
    shape(0)
    return {
        "async_over_sync": round(pace["async"] / pace["sync"], 3),
        "n": 1,
        "accuracy_gap": round(top1["sync"] - top1["async"], 2),
        "images_per_s": {name: round(asked.batch * x, 1) for name, x in pace.items()},
        "top1": {name: round(x, 2) for name, x in top1.items()},
    }


def rank_main(asked: argparse.Namespace) -> None:
    """What each host does."""
    comm = connected()
    figures = {"straggler": straggler, "slow_link": slow_link}[asked.case](comm, asked)
    if comm.rank == 0:
        finish(f"asynchronous_{asked.case}", {**vars(asked), "hosts": comm.size}, figures, CLAIMS[asked.case])
