"""How much larger a batch fits in the memory that plain PyTorch takes, at which time for an image?

    python benchmarks/memory.py [--batch N] [--side N] [--pairs N] [--seconds S] [--cases NAME ...] [--no-peers]

VGG-16 (no BatchNorm) and ResNet-50 at 224 pixels, 1000 classes, SGD with momentum, channels_last. Each figure comes
from a fresh process (memory_step.py): the peak of plain PyTorch at --batch is the limit and the budget; the planner
foresees the largest batch that fits in it at no more than the case's time; a step at that batch is measured. Should it
take more than the limit, batch and budget are lowered by as much and measured again. Bytes are live at malloc
(malloc_live.c, built with cc) at most over a step, less the interpreter and its libraries before the network is made;
on CUDA they are max_memory_allocated. Time ratios are of seconds per image: our step at its large batch over that of
plain PyTorch at --batch, in pairs that follow one another in one process (median, least and most of the pairs): --pairs
of them, or fewer where the whole would last longer than --seconds. ..._peak_ratio: the peak of our step at --batch, by
the plan of the large batch, over that of plain PyTorch. bf16 is held against plain PyTorch in bf16. A case that cannot
be measured is null, with the reason in `failed`; the others go on.

Peers: torch.utils.checkpoint around every block (stages of VGG-16), and torch.compile's activation_memory_budget at
BUDGET; their batch follows from the peaks at --batch and at half of it, as a straight line; their time is that at
--batch.
The compiler's backend is an eager one, so that peer's time is that of eager kernels, and not of compiled ones.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common import finish, parse, spread
from kasoku.core.hardware import computes_bf16

HERE = Path(__file__).parent
TRIES = 4  # batches measured for a case
BUDGET = 0.5
PEERS = ("checkpoint", "budget")
FORESEEN = {"memory/foreseen_over_measured": "predicted_over_measured_peak_min"}


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

    @property
    def claims(self) -> dict[str, tuple[str, ...]]:
        """Keys of the figures of its two claims."""
        peers = [f"peer_{way}_{self.network}_{ratio}_ratio" for way in PEERS for ratio in ("batch", "time")]
        beside = (f"{self.name}_activation_bytes_per_image", *(peers if self.name == self.network else ()))
        batch = (f"{self.name}_batch_ratio", *beside)
        time_ = (f"{self.name}_time_ratio", f"{self.name}_time_foreseen")
        return {f"memory/{self.name}/batch": batch, f"memory/{self.name}/time": time_}


CASES = (
    Case("vgg16", "vgg16", 0.04, 3.5, 1.05),
    Case("vgg16_bitequal", "vgg16", 0.04, 2.2, 1.05, settings={"lossless": True}),
    Case("vgg16_bf16", "vgg16", 0.08, 4.0, 1.10, half=True),
    Case("resnet50", "resnet50", 0.08, 2.1, 1.15),
    Case("resnet50_bf16", "resnet50", 0.08, 2.1, 1.20, half=True),
    Case("resnet50_recompute", "resnet50", 0.45, 4.0, 1.50),
)


class UnansweredError(Exception):
    """Why there is no figure."""


class Asker:
    """Starts a process for each question."""

    def __init__(self, arguments: argparse.Namespace, counter: Path) -> None:
        self.arguments, self.counter = arguments, counter
        self.limits: dict[tuple[str, bool], float] = {}
        self.until, self.left = time.perf_counter() + arguments.seconds, 0

    def ask(self, **question: object) -> dict:
        """The answer to one. Raises UnansweredError."""
        question.setdefault("side", self.arguments.side)
        environment = os.environ | ({"LD_PRELOAD": str(self.counter)} if not torch.cuda.is_available() else {})
        command = [sys.executable, str(HERE / "memory_step.py"), json.dumps(question)]
        begin = time.perf_counter()
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
        except subprocess.TimeoutExpired as error:
            raise UnansweredError(f"{question['ask']}: no answer in {error.timeout:.0f} s") from error
        if done.returncode or not done.stdout:
            raise UnansweredError(f"{question['ask']}: its process ended with status {done.returncode}")
        answer = done.stdout.splitlines()[-1]
        print(f"{time.perf_counter() - begin:.0f} s", question, answer, flush=True)
        return json.loads(answer)

    def limit(self, network: str, half: bool) -> float:
        """The peak of plain PyTorch."""
        key = (network, half)
        if key not in self.limits:
            told = self.ask(ask="peak", network=network, half=half, batch=self.arguments.batch)
            self.limits[key] = told["peak"]
        return self.limits[key]

    def pairs(self, limit: float, **question: object) -> dict:
        """A way at its batch, lowered until it is within the limit, beside plain PyTorch. Raises UnansweredError."""
        start = self.arguments.batch
        question["seconds"] = (self.until - time.perf_counter()) / max(1, self.left)
        batch = int(question.pop("batch"))
        for _ in range(TRIES):
            about = {**question, "batch": batch, "plain": start, "limit": limit, "pairs": self.arguments.pairs}
            told = self.ask(ask="pairs", **about) | {"batch": batch}
            if "seconds_per_image" in told:
                seconds = told["seconds_per_image"]
                ratios = [a / b for a, b in zip(seconds["other"], seconds["plain"], strict=True)]
                return told | {"ratios": {k: round(v, 4) for k, v in spread(ratios).items()}}
            batch = min(batch - 1, int(batch * limit / told["peak"]))
            settings = question.get("settings")
            if isinstance(settings, dict):  # or a smaller batch would fill the same budget
                question["settings"] = settings | {"budget": str(int(int(settings["budget"]) * limit / told["peak"]))}
            if batch < start:
                break
        raise UnansweredError(f"no batch was found within {limit:.0f} bytes: {told['batch']} took {told['peak']}")

    def case(self, case: Case) -> dict[str, object]:
        """Ours."""
        about = {"network": case.network, "half": case.half, "way": "saved"}
        if case.half and not computes_bf16(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
            raise UnansweredError("this hardware does not compute bf16")
        limit, start = self.limit(case.network, case.half), self.arguments.batch
        planned = self.ask(ask="plan", batch=start, limit=limit, time=case.time, settings=case.settings, **about)
        if not planned["fits"]:
            raise UnansweredError(f"no plan for a batch of {start} is foreseen within {limit:.0f} bytes at that time")
        settings = case.settings | {"budget": str(int(limit))}
        told = self.pairs(limit, batch=planned["batch"], settings=settings, **about)
        return {
            f"{case.name}_batch_ratio": round(told["batch"] / start, 3),
            f"{case.name}_batch_bound": case.batch_bound,
            f"{case.name}_peak_ratio": round(told["peak_at_plain"] / limit, 4),
            f"{case.name}_time_ratio": told["ratios"]["median"],
            f"{case.name}_time_ratio_spread": told["ratios"],
            f"{case.name}_time_bound": case.time_bound,
            f"{case.name}_predicted_over_measured_peak": round(told["foreseen"] / told["peak"], 4),
            f"{case.name}_time_foreseen": round(1 + told["time_foreseen"], 4),
            f"{case.name}_peak_bytes": [limit, told["peak"]],
            f"{case.name}_activation_bytes_per_image": told["activation_bytes_per_image"],
        }

    def peer(self, network: str, way: str) -> dict[str, object]:
        """The same limit, of what torch has."""
        about, full = {"network": network, "way": way, "budget": BUDGET}, self.arguments.batch
        limit = self.limit(network, False)
        half = self.ask(ask="peak", batch=full // 2, **about)["peak"]
        told = self.pairs(float("inf"), batch=full, **about)
        an_image = (told["peak"] - half) / (full - full // 2)
        return {
            f"peer_{way}_{network}_batch_ratio": round(int(full + (limit - told["peak"]) / an_image) / full, 3),
            f"peer_{way}_{network}_time_ratio": told["ratios"]["median"],
            f"peer_{way}_{network}_time_ratios": told["ratios"],
            f"peer_{way}_{network}_peak_bytes": [limit, told["peak"]],
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
    parser.add_argument("--seconds", type=float, default=800.0, help="of the whole, about")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="(default: all)")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parse(parser)
    chosen = [case for case in CASES if case.name in (arguments.cases or [case.name])]
    networks = () if arguments.no_peers else dict.fromkeys(case.network for case in chosen)
    figures: dict[str, object] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(arguments, counter(Path(folder)))
        questions = {case.name: functools.partial(asker.case, case) for case in chosen}
        for network in networks:
            questions |= {f"peer_{way}_{network}": functools.partial(asker.peer, network, way) for way in PEERS}
        for number, (name, question) in enumerate(questions.items()):
            asker.left = len(questions) - number
            try:
                found = question()
            except UnansweredError as error:
                failed[name] = str(error)
                found = {f"{name}_{ratio}_ratio": None for ratio in ("batch", "time", "peak")}
            figures |= found
            print(json.dumps(found), flush=True)
    ratios = [value for key, value in figures.items() if key.endswith("predicted_over_measured_peak")]
    figures |= {"predicted_over_measured_peak": [min(ratios), max(ratios)] if ratios else None, "failed": failed}
    figures |= {"predicted_over_measured_peak_min": min(ratios, default=None), "n": len(ratios)}
    claims = {claim: keys for case in chosen for claim, keys in case.claims.items()} | FORESEEN
    finish("memory", {**vars(arguments), "budget": BUDGET}, figures, claims)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
