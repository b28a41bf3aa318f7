"""How much time does the ledger, which is always on, add to a step?

Command: python benchmarks/ledger_cost.py [--rounds N] [--steps N]

The same training of the smallest network (one linear layer on the 8x8 digits, batch 64, all of the loop's hooks, plain
loop) with the technique Timed and without it, in rounds that alternate in one process; which side is first alternates
too. added_us_per_step: the median over rounds of the difference of the mean steps. Limit: 200.
Result: records/. Why it matters: it is always on, so it must not be noticed.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

from common import finish, parse, spread
from kasoku.core import Batch, Constant, Job
from kasoku.data import digits, loader
from kasoku.device import Seeded
from kasoku.optim import Rate, sgd
from kasoku.report import Timed

BATCH, WARM = 64, 100
CLAIMS = {"ledger/added": ("added_us_per_step", "bare_us_per_step")}


def job_of(*techniques: Timed) -> Job:
    """A new job on the digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    job = Job(model, lambda m: sgd(m, lr=0.01), loader=loader(digits(), "train", BATCH))
    return job.apply(Seeded(0), Rate(Constant()), *techniques)


def forever(job: Job) -> Iterator[Batch]:
    while True:
        yield from job.loader


def seconds(job: Job, batches: Iterator[Batch], steps: int) -> float:
    """Mean seconds of a step."""
    begin = time.perf_counter()
    for _ in range(steps):
        x_NCHW, y_N = next(batches)
        job.loss(job.model(x_NCHW), y_N).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parse(parser)
    torch.set_num_threads(1)
    jobs = {"bare": job_of(), "timed": job_of(Timed())}
    batches = {name: forever(job) for name, job in jobs.items()}
    for name, job in jobs.items():
        seconds(job, batches[name], WARM)
    took: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(arguments.rounds):
        for name in [*jobs][:: 1 if i % 2 else -1]:
            took[name].append(1e6 * seconds(jobs[name], batches[name], arguments.steps))
    added = [timed - bare for timed, bare in zip(took["timed"], took["bare"], strict=True)]
    figures: dict[str, object] = {
        "added_us_per_step": round(statistics.median(added), 2),
        "added_us_per_step_spread": spread([round(us, 2) for us in added]),
        "bare_us_per_step": round(statistics.median(took["bare"]), 1),
    }
    finish("ledger_cost", {"rounds": arguments.rounds, "steps": arguments.steps, "batch": BATCH}, figures, CLAIMS)


if __name__ == "__main__":
    main()
