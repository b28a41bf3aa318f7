"""How much larger a batch fits in the memory that plain PyTorch takes, at which time for an image?

    python benchmarks/memory.py [--batch N] [--side N] [--pairs N] [--time-batch N] [--cases NAME ...] [--no-peers]

VGG-16 (no BatchNorm) and ResNet-50 at 224 pixels, 1000 classes, SGD with momentum, channels_last. Each figure comes
from a fresh process (memory_step.py): the peak of plain PyTorch at --batch is the limit; the planner foresees the
largest batch that fits in it at no more than the case's time; a step at that batch is measured. Should it take more
than the limit, the batch is lowered by a part in 32 and measured again. Bytes are live at malloc (malloc_live.c, built
with cc) at most over a step, less the interpreter and its libraries before the network is made; on CUDA they are
max_memory_allocated. Time ratios: medians of interleaved steps of --time-batch images, ours run as planned for the
large batch. bf16 is held against plain PyTorch in bf16.

Peers: torch.utils.checkpoint around every block (stages of VGG-16), and torch.compile's activation_memory_budget at
BUDGET; their batch follows from the peaks at --batch and at half of it, as a straight line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common import finish

HERE = Path(__file__).parent
MARGIN = 16 * 2**20  # bytes that libraries take at the first large step, in plain PyTorch too
BUDGET = 0.5
PEERS = ("checkpoint", "budget")


@dataclass(frozen=True)
class Case:
    """A network and what is asked of it: time at most (as foreseen), and the bounds of ratios."""

    name: str
    network: str
    time: float
    batch_bound: float
    time_bound: float
    half: bool = False
    settings: dict[str, object] = field(default_factory=dict)


CASES = (
    Case("vgg16", "vgg16", 0.04, 3.5, 1.05),
    Case("vgg16_bitequal", "vgg16", 0.04, 2.2, 1.05, settings={"lossless": True}),
    Case("vgg16_bf16", "vgg16", 0.08, 4.0, 1.10, half=True),
    Case("resnet50", "resnet50", 0.10, 2.1, 1.15),
    Case("resnet50_bf16", "resnet50", 0.12, 2.1, 1.20, half=True),
    Case("resnet50_recompute", "resnet50", 0.45, 4.0, 1.50),
)


class Asker:
    """Starts a process for each question."""

    def __init__(self, arguments: argparse.Namespace, counter: Path) -> None:
        self.arguments, self.counter = arguments, counter
        self.limits: dict[tuple[str, bool], float] = {}

    def ask(self, **question: object) -> dict:
        """The answer to one."""
        question.setdefault("side", self.arguments.side)
        environment = os.environ | ({"LD_PRELOAD": str(self.counter)} if not torch.cuda.is_available() else {})
        command = [sys.executable, str(HERE / "memory_step.py"), json.dumps(question)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
        print(question, done.stdout.splitlines()[-1], flush=True)
        return json.loads(done.stdout.splitlines()[-1])

    def limit(self, network: str, half: bool) -> float:
        """The peak of plain PyTorch."""
        key = (network, half)
        if key not in self.limits:
            told = self.ask(ask="peak", network=network, half=half, batch=self.arguments.batch)
            self.limits[key] = told["peak"]
        return self.limits[key]

    def seconds(self, **question: object) -> float:
        """Times plain PyTorch's, median of pairs."""
        told = self.ask(ask="time", batch=self.arguments.time_batch, pairs=self.arguments.pairs, **question)
        pairs = zip(told["seconds"]["other"], told["seconds"]["plain"], strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    def case(self, case: Case) -> dict[str, object]:
        """Ours."""
        about = {"network": case.network, "half": case.half, "settings": case.settings}
        limit = self.limit(case.network, case.half)
        start = self.arguments.batch
        planned = self.ask(ask="plan", batch=start, limit=limit - MARGIN, time=case.time, **about)
        batch, over = planned["batch"], True
        while over:
            settings = case.settings | {"budget": str(int(limit - MARGIN))}
            told = self.ask(ask="peak", way="saved", batch=batch, **(about | {"settings": settings}))
            over = told["peak"] > limit and batch > start
            batch -= (batch // 32 + 1) if over else 0
        time_ratio = self.seconds(way="saved", planned=batch, **(about | {"settings": settings}))
        return {
            f"{case.name}_batch_ratio": round(batch / start, 3),
            f"{case.name}_batch_bound": case.batch_bound,
            f"{case.name}_time_ratio": round(time_ratio, 4),
            f"{case.name}_time_bound": case.time_bound,
            f"{case.name}_predicted_over_measured_peak": round(told["foreseen"] / told["peak"], 4),
            f"{case.name}_time_foreseen": round(1 + told["time_foreseen"], 4),
            f"{case.name}_peak_bytes": [limit, told["peak"]],
            f"{case.name}_activation_bytes_per_image": told["activation_bytes_per_image"],
        }

    def peer(self, network: str, way: str) -> dict[str, object]:
        """The same limit, of what torch has."""
        about, full = {"network": network, "way": way, "budget": BUDGET}, self.arguments.batch
        peaks = [self.ask(ask="peak", batch=batch, **about)["peak"] for batch in (full // 2, full)]
        an_image = (peaks[1] - peaks[0]) / (full - full // 2)
        batch = full + (self.limit(network, False) - peaks[1]) / an_image
        return {
            f"peer_{way}_{network}_batch_ratio": round(batch / full, 3),
            f"peer_{way}_{network}_time_ratio": round(self.seconds(**about), 4),
        }


def counter(folder: Path) -> Path:
    """The counting malloc, built."""
    made = folder / "malloc_live.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(HERE / "malloc_live.c"), "-o", str(made)], check=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=256 if torch.cuda.is_available() else 16, help="of plain PyTorch")
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--time-batch", type=int, default=64 if torch.cuda.is_available() else 8)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="(default: all)")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, object] = {}
    chosen = [case for case in CASES if case.name in (arguments.cases or case.name)]
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(arguments, counter(Path(folder)))
        for case in chosen:
            figures |= asker.case(case)
        for network in () if arguments.no_peers else dict.fromkeys(case.network for case in chosen):
            for way in PEERS:
                figures |= asker.peer(network, way)
    ratios = [value for key, value in figures.items() if key.endswith("predicted_over_measured_peak")]
    figures["predicted_over_measured_peak"] = [min(ratios), max(ratios)]
    finish("memory", {**vars(arguments), "margin": MARGIN, "budget": BUDGET}, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
