"""What do 64 virtual ranks on one device cost?

    python benchmarks/virtual_ranks.py

virtual_over_plain: time per image of a batch of 64 ranks x 32 images with VirtualRanks, over plain accumulation of the
same 64 parts (torch's BatchNorm, the same update). virtual_over_small: over ordinary training at batch 32, an update
for each part. memory_64_over_2: what training takes beyond the start (weights, gradients, activations, images) with 64
ranks over that with 2, each in a process of its own. The bound is 1 for all: nothing but BatchNorm's sums is added.
Result: records/. Why it matters: a batch of thousands of devices is tried out on one.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys

import torch

from common import finish, parse, seconds_per_call, spread
from kasoku.core import Job, Technique
from kasoku.data import Dataset, Memory, loader
from kasoku.device import Device, choose
from kasoku.distributed import VirtualRanks
from kasoku.models import cifarnet
from kasoku.optim import sgd

NORM_BATCH, SIDE = 32, 32
CLAIMS = {
    "virtual_ranks/over_plain": ("virtual_over_plain", "virtual_over_small", "images_per_s"),
    "virtual_ranks/memory": ("memory_64_over_2", "memory_mb"),
}


def images(n: int) -> Dataset:
    """Noise: only time and memory are asked for."""
    x = torch.randint(0, 256, (n, SIDE, SIDE, 3), dtype=torch.uint8)
    split = Memory(x, torch.randint(10, (n,)))
    return Dataset("noise", tuple("0123456789"), split, split, 3, (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)


def job_on(ranks: int, *more: Technique) -> Job:
    """A training of batches of `ranks` parts."""
    chosen = choose(Device())
    batches = loader(images(NORM_BATCH * ranks), "train", NORM_BATCH * ranks, device=chosen.device, parts=ranks)
    job = Job(cifarnet().to(chosen.device), sgd, loader=batches, accumulate=ranks)
    return job.apply(*chosen.techniques, *more)


def epoch(job: Job, updates: int = 1) -> None:
    """All parts of one batch, with so many updates in it."""
    for i, (x_NCHW, y_N) in enumerate(job.loader):
        (job.loss(job.model(x_NCHW), y_N) / job.accumulate).backward()
        if (i + 1) % (job.accumulate // updates) == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()


def memory_bytes() -> int:
    """The most this process has had."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def training_bytes(ranks: int) -> int:
    """What three updates take beyond the start."""
    torch.zeros(1)
    job = job_on(ranks, VirtualRanks(NORM_BATCH))
    start = memory_bytes()
    for _ in range(3):
        epoch(job)
    return memory_bytes() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--memory", type=int, metavar="RANKS", help="only print the bytes of so many ranks")
    arguments = parse(parser)
    if arguments.memory:
        print(json.dumps(training_bytes(arguments.memory)))
        return
    memory = {}
    for ranks in (2, arguments.ranks):
        command = [sys.executable, __file__, "--memory", str(ranks)]
        memory[ranks] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    n = arguments.ranks
    virtual, plain = job_on(n, VirtualRanks(NORM_BATCH)), job_on(n)
    sides = {"virtual": lambda: epoch(virtual), "plain": lambda: epoch(plain), "small": lambda: epoch(plain, updates=n)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(arguments.pairs + 1):
        for name, side in sides.items():
            took = seconds_per_call(side, calls=1, warm=0)
            if i:  # the first round warms up
                seconds[name] += took
    ratios = {
        name: [v / p for v, p in zip(seconds["virtual"], seconds[name], strict=True)] for name in ("plain", "small")
    }
    figures = {
        "virtual_over_plain": round(statistics.median(ratios["plain"]), 4),
        "virtual_over_plain_spread": spread(ratios["plain"]),
        "virtual_over_small": round(statistics.median(ratios["small"]), 4),
        "memory_64_over_2": round(memory[n] / memory[2], 4),
        "memory_mb": {str(ranks): round(b / 1e6, 1) for ranks, b in memory.items()},
        "images_per_s": {name: round(n * NORM_BATCH / statistics.median(s), 1) for name, s in seconds.items()},
        "bound": 1.0,
    }
    finish("virtual_ranks", {"ranks": n, "norm_batch": NORM_BATCH, "network": "cifarnet", "side": SIDE,
                             "pairs": arguments.pairs}, figures, CLAIMS)  # fmt: skip


if __name__ == "__main__":
    main()
