"""How much larger a batch fits on two ranks in the memory that plain Overlap takes, at which time for an image?

    python benchmarks/memory_ranks.py [--batch N] [--side N] [--pairs N] [--seconds S] [--cases NAME ...]

As benchmarks/memory.py, but each question is answered by two gloo processes on this host, a core and one thread each.
Plain Overlap at --batch images a rank is the limit and the budget, by the rank that takes more. SavedMemory beside
Overlap frees each bucket in backward; its batch is the largest that is foreseen to fit, and its peak is measured on
both ranks. Time ratios are of seconds per image of rank 0: our step at its large batch over a step of plain Overlap at
--batch, in rounds that follow one another (median, least and most), where plain Overlap hides communication behind the
next forward as it does in training. vgg16_bitequal has lossless = true, and no gathered factors.
The whole takes at most about 12 minutes on 2 cores: --seconds bounds the rounds, of which there is at least one.
Result: records/memory.jsonl.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from common import finish, parse
from memory import CASES, HERE, Asker, Case, UnansweredError, counter

RANKS, LIMIT_S = 2, 600
BOUNDS = {"vgg16": (0.03, 5.0, 1.05), "vgg16_bitequal": (0.03, 2.2, 1.05), "resnet50": (0.08, 2.1, 1.20)}
CLAIMS: dict[str, tuple[str, ...]] = {
    f"memory_ranks/{name}/{ratio}": (f"{name}_{ratio}_ratio", f"{name}_{beside}")
    for name in ("vgg16", "resnet50")
    for ratio, beside in (("batch", "activation_bytes_per_image"), ("time", "time_foreseen"))
}
FORESEEN = {"memory_ranks/foreseen_over_measured": ("predicted_over_measured_peak_min", "predicted_over_measured_peak")}


def cases() -> list[Case]:
    """Those of memory.py, with the bounds of two ranks."""
    found = [case for case in CASES if case.name in BOUNDS]
    names = ("time", "batch_bound", "time_bound")
    return [replace(case, **dict(zip(names, BOUNDS[case.name], strict=True))) for case in found]


class RanksAsker(Asker):
    """Starts two processes for each question."""

    def __init__(self, arguments: argparse.Namespace, counter: Path) -> None:
        super().__init__(arguments, counter)
        self.ratios: list[float] = []  # of foreseen to measured peaks, on all ranks

    def ask(self, **question: object) -> dict:
        """The answer of rank 0, with the largest peak of all ranks. Raises UnansweredError."""
        question.setdefault("side", self.arguments.side)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"OMP_NUM_THREADS": "1"} | (
            {"LD_PRELOAD": str(self.counter)} if not torch.cuda.is_available() else {}
        )
        cores = sorted(os.sched_getaffinity(0))
        begin, command = time.perf_counter(), [sys.executable, str(HERE / "memory_step.py"), json.dumps(question)]
        ranks = []
        for rank in range(RANKS):
            bound = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            environment = os.environ | shared | {"RANK": str(rank)}
            ranks.append(subprocess.Popen(bound, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            lines = [rank.communicate(timeout=LIMIT_S)[0].splitlines() for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise UnansweredError(f"{question['ask']}: no answer in {LIMIT_S} s") from error
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise UnansweredError(f"{question['ask']}: its processes ended with {[r.returncode for r in ranks]}")
        print(f"{time.perf_counter() - begin:.0f} s", question, *(line[-1] for line in lines), flush=True)
        answers = [json.loads(line[-1]) for line in lines]
        if "seconds_per_image" in answers[0]:
            self.ratios += [round(answer["foreseen"] / answer["peak"], 4) for answer in answers]
        return answers[0] | {"peak": max(answer.get("peak", 0) for answer in answers)}


def main() -> int:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=256 if torch.cuda.is_available() else 16, help="of a rank, plain")
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the whole, about")
    parser.add_argument("--cases", nargs="+", choices=list(BOUNDS), default=["vgg16", "resnet50"])
    arguments = parse(parser)
    chosen = [case for case in known if case.name in arguments.cases]
    figures: dict[str, object] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        asker = RanksAsker(arguments, counter(Path(folder)))
        for number, case in enumerate(chosen):
            asker.left = len(chosen) - number
            try:
                found = asker.case(case)
            except UnansweredError as error:
                failed[case.name] = str(error)
                found = {f"{case.name}_batch_ratio": None, f"{case.name}_time_ratio": None}
            figures |= found
            print(json.dumps(found), flush=True)
    ratios = asker.ratios
    figures |= {"predicted_over_measured_peak": [min(ratios), max(ratios)] if ratios else None, "failed": failed}
    figures |= {"predicted_over_measured_peak_min": min(ratios, default=None), "n": len(ratios)}
    done = {claim: keys for claim, keys in CLAIMS.items() if claim.split("/")[1] in {case.name for case in chosen}}
    finish("memory_ranks", vars(arguments), figures, done | FORESEEN)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
