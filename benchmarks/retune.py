"""Does a training that retunes itself keep up with one that was tuned for the state of the machine?

    python benchmarks/retune.py [--cases link processor] [--ranks N] [--noise SECONDS]

As root: hosts are network namespaces behind shaped links (cluster.py), each with SHARE of a core, or of its part of one
where they outnumber cores. In mid-run a resource is halved, and given back later: all links, or the processor of
the last host. Three trainings take turns, a window of 15 steps each:
- retuned: Overlap(retune=True) and Shares(follow=True), begun in the first state.
- fixed: the same without retuning.
- tuned: begun in the state that it is timed in, with shares by the ranks' speeds in it.
retuned_over_tuned: of each state after a change, the median over the windows from 105 to 165 steps after it; the worst
one (at most 1.08 is wanted). fixed_over_tuned: the same of the training that does not retune; where it keeps up too, as
behind a link that was halved, the case says only that retuning does no harm.
--noise: so many seconds without a change on purpose; changes_made and changes_taken_back of the retuned training.
Why it matters: links and processors change during a training of hours, and what was chosen in its first steps stays.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from asynchronous_accuracy import images
from asynchronous_hosts import PERIOD_US, freed, job_of, limited, trained
from cluster import Transfer, agreed, balance, connected, on_hosts, shape
from common import finish, parse
from kasoku.core import Comm, Job
from kasoku.data import Shares, by_speed
from kasoku.distributed import Overlap

SHARE, WINDOW = 0.8, 15  # of a core; steps
FIRST, LATER, JUDGED = 6, 11, 4  # windows in the first state, in each later one; the last of these are compared
CLAIMS = {
    f"retune/{n}_ranks/over_tuned": ("retuned_over_tuned", "fixed_over_tuned", "link", "processor") for n in (2, 4)
}
STATES = ("whole", "halved", "given_back")


def rank_main(asked: argparse.Namespace) -> None:
    """Each host's part."""
    comm = connected()
    share = SHARE * min(1.0, (os.cpu_count() or 1) / asked.ranks)
    folder = limited(share, comm.rank)
    try:
        figures = {case: case_of(case, comm, asked, Limits(comm, asked, folder, share)) for case in asked.cases}
        noise = noise_of(comm, asked) if asked.noise else {}
    finally:
        freed(folder)
    if comm.rank == 0:
        worst = {
            f"{side}_over_tuned": max(figures[case][state][side] for case in asked.cases for state in STATES[1:])
            for side in ("retuned", "fixed")
        }
        claims = {name: keys for name, keys in CLAIMS.items() if f"/{asked.ranks}_" in name}
        finish("retune", vars(asked), {**worst, **noise, "n": JUDGED, **figures}, claims)


class Limits:
    """The link and the processor that a host may use."""

    def __init__(self, comm: Comm, asked: argparse.Namespace, folder: Any, share: float) -> None:
        self.comm, self.folder, self.share = comm, folder, share
        alone = job_of(comm, images(), asked, ())
        trained(alone, steps=3)
        transfer = Transfer(comm.channel(), alone.model)
        self.mbit = balance(comm, lambda: trained(alone, steps=8)[1] / 8, transfer.once, asked.ratio)
        alone.close()

    def set(self, case: str, *, halved: bool) -> None:
        """Halves the links, or the last host's processor; or gives all back."""
        self.comm.gather_objects(None)
        shape(self.mbit / (2 if halved and case == "link" else 1))
        slow = halved and case == "processor" and self.comm.rank == self.comm.size - 1
        (self.folder / "cpu.cfs_quota_us").write_text(str(round(self.share * PERIOD_US / (2 if slow else 1))))
        self.comm.gather_objects(None)


def tuned(comm: Comm, asked: argparse.Namespace) -> Job:
    """A training that is planned, and whose shares are chosen, in the present state."""
    alone = job_of(comm, images(), asked, ())
    trained(alone, steps=2)
    done, took_s = trained(alone, steps=6)
    alone.close()
    shares = by_speed(asked.batch * comm.size, comm.gather_objects(done / took_s))
    job = job_of(comm, images(), asked, (Shares(shares), Overlap()))
    trained(job, steps=20)
    job.drain()
    return job


def case_of(case: str, comm: Comm, asked: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """Seconds of a step of each side in each state, over those of the one tuned for it."""
    tuned_for = {}
    for halved in (True, False):
        limits.set(case, halved=halved)
        tuned_for[halved] = tuned(comm, asked)
    retuned = job_of(comm, images(), asked, (Shares(follow=True), Overlap(retune=True)))
    fixed = job_of(comm, images(), asked, (Overlap(),))
    figures: dict[str, Any] = {}
    for state in STATES:
        halved = state == "halved"
        limits.set(case, halved=halved)
        sides = {"retuned": retuned, "fixed": fixed, "tuned": tuned_for[halved]}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(FIRST if state == "whole" else LATER):
            for side in [*sides][:: 1 if number % 2 == 0 else -1]:
                seconds[side].append(windowed(comm, sides[side]))
        judged = {side: values[-JUDGED:] for side, values in seconds.items()}
        figures[state] = {
            side: round(statistics.median(a / b for a, b in zip(judged[side], judged["tuned"], strict=True)), 4)
            for side in ("retuned", "fixed")
        } | {"seconds": {side: [round(s, 4) for s in values] for side, values in seconds.items()}}
        if comm.rank == 0:
            print(f"{case}, {state}: {figures[state]}", flush=True)
    figures |= {"mbit": round(limits.mbit, 1), "changes": changes(retuned)}
    for job in (retuned, fixed, *tuned_for.values()):
        job.close()
    return figures


def windowed(comm: Comm, job: Job) -> float:
    """Seconds a step, over a window."""
    comm.gather_objects(None)
    _, took_s = trained(job, steps=WINDOW)
    begun = time.perf_counter()
    job.drain()
    return agreed(comm, (took_s + time.perf_counter() - begun) / WINDOW)


def changes(job: Job) -> list[dict[str, Any]]:
    """The changes that the training made, with a step's time before and after each."""
    return [*job.kept("shares").changes, *job.kept("overlap").replanning.changes]


def noise_of(comm: Comm, asked: argparse.Namespace) -> dict[str, int]:
    """Trains in one state for so long."""
    job = job_of(comm, images(), asked, (Shares(follow=True), Overlap(retune=True)))
    begun = time.perf_counter()
    while comm.broadcast_object(time.perf_counter() - begun) < asked.noise:
        trained(job, steps=WINDOW)
    made = changes(job)
    job.close()
    return {"changes_made": len(made), "changes_taken_back": sum(change["kept"] is False for change in made)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("link", "processor"), default=["link", "processor"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="images a rank (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=1.0, help="of sending to computing (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SECONDS")
    parser.set_defaults(steps=0, lr=0.01, widths=[64, 128, 256])
    arguments = parse(parser)
    if "RANK" not in os.environ:
        return on_hosts(__file__, sys.argv[1:], arguments.ranks, limit_s=3600 + 2 * arguments.noise)
    rank_main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
