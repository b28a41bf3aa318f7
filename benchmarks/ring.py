"""Does a ring all-reduce take the time of its formula, 2(p-1)/p n/B + 2(p-1)a?

    python benchmarks/ring.py [--ranks 2 3 4] [--mbit 200] [--mb 8] [--repeats 3]

As root: each rank is a process in a network namespace of its own, which may send --mbit Mbit/s. gloo's ring adds up
n bytes, from 64 KiB to --mb MiB by factors of four. B and a are measured without an all-reduce: all ranks at once pass
a buffer on to the next (a: 8 bytes; B: what --mb MiB take more than an eighth of them), so nothing is fitted to it.
over_formula: measured over formula of the largest n. link_share: the bytes that a rank must send of it, 2(p-1)/p n, in
the measured time, over the rate of the link: TCP's and Ethernet's headers take 4 % to 6 % of that rate.
over_formula_by_mb: the same over n in MiB; seconds_by_mb and formula_by_mb: both times.
The shaper lets the first 256 KiB after a pause through unshaped, which small n profit from.
Result: records/documents/004.json. Why it matters: [004] has gradients added up by a ring because it fills the links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from cluster import agreed, connected, on_hosts, shape
from common import finish
from kasoku.distributed import TorchComm

SMALLEST, FACTOR, MIB, PIECE = 2**16, 4, 2**20, 2**16  # bytes; PIECE: numbers sent at once


def seconds(comm: TorchComm, work: Callable[[], object], repeats: int) -> float:
    """The median time of work that all ranks begin together; the mean over ranks."""
    found = []
    for _ in range(repeats + 1):
        comm.all_reduce(torch.zeros(1)).wait()
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return agreed(comm, statistics.median(found[1:]))


def hop(comm: TorchComm, size: int) -> Callable[[], None]:
    """All ranks at once pass so many bytes on to the next, in pieces, so that both directions of a link are in use."""
    sent, received = torch.zeros(size // 4).split(PIECE), torch.empty(size // 4).split(PIECE)

    def pass_on() -> None:
        works = [dist.isend(piece, (comm.rank + 1) % comm.size) for piece in sent]
        works += [dist.irecv(piece, (comm.rank - 1) % comm.size) for piece in received]
        for work in works:
            work.wait()

    return pass_on


def rank_main(arguments: argparse.Namespace) -> None:
    """What each rank does; the first writes the figures."""
    comm, largest = connected(), round(arguments.mb * MIB)
    shape(arguments.mbit)
    p, repeats = comm.size, arguments.repeats
    latency_s = seconds(comm, hop(comm, 8), 10 * repeats)
    part, whole = (seconds(comm, hop(comm, size), repeats) for size in (largest // 8, largest))
    bytes_per_s = (largest - largest // 8) / (whole - part)
    sizes = [largest]
    while sizes[-1] >= FACTOR * SMALLEST:
        sizes.append(sizes[-1] // FACTOR)
    measured, formula = {}, {}
    for size in sorted(sizes):
        flat = torch.zeros(size // 4)
        measured[size] = seconds(comm, lambda flat=flat: dist.all_reduce(flat), repeats)
        formula[size] = 2 * (p - 1) / p * size / bytes_per_s + 2 * (p - 1) * latency_s
    if comm.rank == 0:
        rate = arguments.mbit * 1e6 / 8
        figures = {
            "over_formula": round(measured[largest] / formula[largest], 4),
            "link_share": round(2 * (p - 1) / p * largest / measured[largest] / rate, 4),
            "seconds": round(measured[largest], 5),
            "latency_us": round(1e6 * latency_s, 1),
            "bytes_per_s": round(bytes_per_s),
            "over_formula_by_mb": [[n / MIB, round(s / formula[n], 4)] for n, s in measured.items()],
            "seconds_by_mb": [[n / MIB, round(s, 6)] for n, s in measured.items()],
            "formula_by_mb": [[n / MIB, round(s, 6)] for n, s in formula.items()],
        }
        Path(arguments.to).write_text(json.dumps(figures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--mbit", type=float, default=200.0, help="that a rank may send")
    parser.add_argument("--mb", type=float, default=8.0, help="the largest all-reduce, MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--to", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return 0
    options = {name: getattr(arguments, name) for name in ("mbit", "mb", "repeats")}
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for ranks in arguments.ranks:
            to = Path(home) / f"{ranks}.json"
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            if code := on_hosts(__file__, [*words, "--to", str(to)], hosts=ranks):
                return code
            found[str(ranks)] = json.loads(to.read_text())
            print(f"{ranks} ranks: {found[str(ranks)]}", flush=True)
    seconds_by_ranks = [[int(ranks), figures["seconds"]] for ranks, figures in found.items()]
    finish("ring", options, {"ranks": found, "seconds_by_ranks": seconds_by_ranks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
