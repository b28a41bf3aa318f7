"""What do ranks that do not wait cost in accuracy, at equal samples?

    KASOKU_DATA=/data python benchmarks/asynchronous_accuracy.py [--full] [--workers 1 4 8] [--sides SIDE ...]

CIFAR-10 (all 50,000 training images, top-1 of all test images), a small cifarnet or cnn11, 8 workers (--workers) of one
process that take turns in an uneven order (each lets others go first at random), so that updates are as stale as those
of 8 machines. One worker trains alone, whatever the side.
sync: Overlap. async_plain: Asynchronous without prediction. async_default: with it (--predict and the other
options: others), a synchronous epoch at first and a synchronous finish. async_bf16, async_int8: that with fewer bytes
on the wire. async_every8: with an exchange after every eighth step only. sync_bf16, sync_lowrank: Overlap with the
reducers Wire and LowRank.
async_gap: sync - async_default, in points. async_fraction: of its steps, those that were asynchronous.
megabytes_a_step: sent by a rank, mean over the training: updates and, as an owner of weights, replies; or the
collectives of a ring, in which an all-reduce of n bytes sends 2 n (ranks - 1) / ranks.
With several numbers of workers every side is named SIDE_WORKERS, and by_workers has its top-1 over their number.
Each side of a seed is a process of its own with one thread.
Result: records/. Why it matters: nobody is told a speed without the accuracy.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common import finish, parse
from kasoku.core import Comm, Job, Technique, Threads
from kasoku.core.schedule import Linear
from kasoku.data import Augment, Dataset, LowResolution, cifar10, loader, sample
from kasoku.data.datasets.base import Memory, in_memory
from kasoku.device import Device, choose
from kasoku.distributed import Asynchronous, LowRank, Overlap, Wire
from kasoku.distributed.async_sgd.transport import InProcess
from kasoku.distributed.async_sgd.worker import CODECS
from kasoku.models import cifarnet, cnn11
from kasoku.optim import Rate, cross_entropy, sgd
from kasoku.training.evaluation import evaluate

TEST_BATCH = 1000
SIDES = ("sync", "async_plain", "async_default")  # unless --sides names others
BESIDE = ("gap_without_remedies", "sync", "async_default", "async_plain", "async_fraction", "mean_staleness")
CLAIMS = {6: {"async/accuracy/gap": ("async_gap", *BESIDE)}, 8: {"async/accuracy/gap_8_epochs": ("async_gap", *BESIDE)}}
UNEVEN = 0.3  # how often a worker lets the others go first, again and again


def techniques(asked: argparse.Namespace) -> dict[str, Technique]:
    """The sides, by name."""
    chosen = Asynchronous(
        predict=asked.predict,
        warmup=asked.warmup,
        finish=asked.finish,
        hidden=asked.hidden,
        wire=asked.wire,
        every=asked.every,
    )
    plain = Asynchronous(predict=0.0, every=asked.every)
    return {
        "sync": Overlap(),
        "async_plain": plain,
        "async_default": chosen,
        "async_bf16": replace(chosen, wire="bf16"),
        "async_int8": replace(chosen, wire="int8"),
        "async_every8": replace(chosen, every=8),
        "sync_bf16": Overlap(reducer=Wire("bf16")),
        "sync_lowrank": Overlap(reducer=LowRank()),
    }


class Sent(threading.local):
    """The bytes that the rank of this thread has sent."""

    rank, bytes = 0, 0.0


_sent = Sent()


def count_bytes(kind: Any) -> None:
    """Counts from now on what ranks of this process send by a Comm of this class, and by asynchronous exchanges."""
    plain, ask = {name: getattr(kind, name) for name in ("all_reduce", "all_to_all", "all_gather")}, InProcess.ask

    def counting(name: str) -> Any:
        def collective(comm: Comm, *tensors: Any, **options: Any) -> Any:
            times = 2 if name == "all_reduce" else 1  # the larger tensor of a collective counts
            _sent.bytes += times * max(x.nbytes for x in tensors) * (comm.size - 1) / comm.size
            return plain[name](comm, *tensors, **options)

        return collective

    def asking(transport: InProcess, to: int, head: Any, body: Any) -> Any:
        if to != _sent.rank:
            _sent.bytes += 2 * body.nbytes  # the reply is as long
        return ask(transport, to, head, body)

    for name in plain:
        setattr(kind, name, counting(name))
    InProcess.ask = asking  # type: ignore[method-assign]


def network(asked: argparse.Namespace, dataset: Any) -> torch.nn.Module:
    """The network of --model, for images of 32 pixels."""
    if asked.model == "cnn11":
        return cnn11(10, stem="cifar", widths=tuple(asked.widths))
    model = cifarnet(widths=tuple(asked.widths), norm_momentum=0.2)
    model.prepare(sample(dataset, 2000))
    return model


def train(comm: Comm, dataset: Any, asked: argparse.Namespace, side: str, seed: int) -> dict[str, Any]:
    """One worker's training; on the first one the accuracy at its end."""
    torch.manual_seed(seed)
    _sent.rank = comm.rank
    if comm.rank == 0:
        count_bytes(type(comm))
    comm.gather_objects(None)
    batches = loader(dataset, "train", asked.batch, seed=seed, comm=comm)
    model = network(asked, dataset)
    optimizer = sgd(model, lr=asked.lr, momentum=0.9, weight_decay=5e-4)
    loss = functools.partial(cross_entropy, smoothing=0.2)
    job = Job(model, optimizer, loader=batches, loss=loss, comm=comm)
    course = Rate(Linear(epochs=asked.epochs))
    varied = Augment(flip="random", translate=2), LowResolution(side=24, until=0.75, epochs=asked.epochs)
    job.apply(*choose(Device(threads=1)).techniques, course, *varied, techniques(asked)[side])
    draw, alone, steps = random.Random(1000 * seed + comm.rank), 0, 0
    asynchronous = side.startswith("async") and comm.size > 1
    for _ in range(asked.epochs):
        for x_NCHW, y_N in job.loader:
            while asynchronous and draw.random() < UNEVEN:
                comm.block("its turn", lambda: True)  # type: ignore[attr-defined]
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            steps += 1
            alone += asynchronous and not job.kept("asynchronous").sync_phases.active
            if asked.steps and steps >= asked.steps:
                break
    job.drain()
    found: dict[str, Any] = {"fraction": alone / steps, "samples": steps * asked.batch}
    found["megabytes_a_step"] = _sent.bytes / 1e6 / steps
    with job.evaluation() as judged:
        if comm.rank == 0:
            found["top1"] = 100 * evaluate(judged, loader(dataset, "test", TEST_BATCH)).top1
    found["staleness"] = dict(job.kept("asynchronous").staleness) if asynchronous else {}
    job.close()
    return found


def images() -> Dataset:
    """CIFAR-10 from the mosaics of $KASOKU_DATA/cifar10: 50 x 20 tiles each, and a byte a label."""
    folder = Path(os.environ.get("KASOKU_DATA", "")) / "cifar10"
    if not (folder / "train_00.webp").exists():
        return cifar10()

    def part(split: str) -> Memory:
        tiles, labels = [], []
        for file in sorted(folder.glob(f"{split}_*.webp")):
            mosaic = np.asarray(Image.open(file).convert("RGB"))
            tiles.append(mosaic.reshape(-1, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3))
            labels.append(np.fromfile(file.with_suffix(".labels"), np.uint8))
        both = np.concatenate(tiles), np.concatenate(labels).astype(np.int64)
        return Memory(torch.from_numpy(both[0]), torch.from_numpy(both[1]))

    return in_memory("cifar10", [str(i) for i in range(10)], part("train"), part("test"))


def one(asked: argparse.Namespace, side: str, workers: int, seed: int) -> dict[str, Any]:
    """One side with one seed, in a process of its own."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    dataset = images()
    found = Threads(workers).run(lambda comm: train(comm, dataset, asked, side, seed))[0]
    updates = sum(found["staleness"].values())
    found["mean_staleness"] = sum(s * n for s, n in found.pop("staleness").items()) / max(1, updates)
    found["seconds"] = time.perf_counter() - start
    print(json.dumps({"side": side, "workers": workers, "seed": seed, **found}), flush=True)
    return found


def mean(some: list[dict[str, Any]], key: str) -> float:
    """Over seeds."""
    return statistics.mean(found[key] for found in some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="three seeds")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=512, help="images a step of all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--model", choices=("cifarnet", "cnn11"), default="cifarnet")
    parser.add_argument("--widths", type=int, nargs="+", help="(default: 32 64 128; cnn11: 16 32 64 96 128)")
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--finish", type=float, default=5.5)
    parser.add_argument("--predict", type=float, default=-1.0)
    parser.add_argument("--hidden", type=int, default=1)
    parser.add_argument("--wire", choices=sorted(CODECS), default="fp32")
    parser.add_argument("--every", type=int, default=1, help="steps between exchanges, which take no time here")
    parser.add_argument("--steps", type=int, default=0, help="end early, to try it; 0: all")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help="see above")
    asked = parse(parser)
    asked.hidden = bool(asked.hidden)
    asked.widths = asked.widths or ([16, 32, 64, 96, 128] if asked.model == "cnn11" else [32, 64, 128])
    seeds = range(3 if asked.full else 1)
    jobs = [(asked, side, workers, seed) for seed in seeds for workers in asked.workers for side in asked.sides]
    together = min(len(jobs), max(len(asked.sides), len(os.sched_getaffinity(0))))
    with multiprocessing.get_context("spawn").Pool(together, maxtasksperchild=1) as pool:
        results = pool.starmap(one, jobs, chunksize=1)
    by: dict[str, list[dict[str, Any]]] = {}
    for (_, side, workers, _), found in zip(jobs, results, strict=True):
        by.setdefault(side if len(asked.workers) == 1 else f"{side}_{workers}", []).append(found)
    means = {side: mean(some, "top1") for side, some in by.items()}
    figures: dict[str, object] = {side: round(top1, 2) for side, top1 in means.items()}
    if "sync" in by and "async_default" in by:
        figures["async_gap"] = round(means["sync"] - means["async_default"], 2)
        if "async_plain" in means:
            figures["gap_without_remedies"] = round(means["sync"] - means["async_plain"], 2)
    if len(asked.workers) > 1:
        figures["by_workers"] = {side: [[n, figures[f"{side}_{n}"]] for n in asked.workers] for side in asked.sides}
    figures["n"] = len(seeds)
    if "async_default" in by:
        figures["async_fraction"] = round(by["async_default"][0]["fraction"], 3)
    figures["mean_staleness"] = {side: round(some[0]["mean_staleness"], 2) for side, some in by.items()}
    figures["megabytes_a_step"] = {side: round(mean(some, "megabytes_a_step"), 3) for side, some in by.items()}
    figures["seconds"] = {side: round(sum(found["seconds"] for found in some), 1) for side, some in by.items()}
    figures["top1"] = {side: [round(found["top1"], 2) for found in some] for side, some in by.items()}
    recorded = asked.model == "cifarnet" and asked.workers == [8]
    parameters = {**vars(asked), "samples": results[0]["samples"]}
    finish("asynchronous_accuracy", parameters, figures, CLAIMS.get(asked.epochs) if recorded else None)


if __name__ == "__main__":
    main()
