"""Does `kasoku profile -- torchrun train.py` name what holds up a plain DDP script, and what does it cost the script?

    python benchmarks/any_script.py [--steps 40] [--rounds 3] [--pairs 200]

The script is this file under torchrun: two gloo ranks of one thread each, a small convolutional network under DDP, a
DataLoader; nothing of kasoku's. Profiled as it is, and with a fault planted that is to cost 15 % of a step: a rank that
sleeps, a loader that sleeps, and a large gradient that is ready last, so that its all-reduce is not hidden.
rightly: how many of the four have, in most of the rounds, the cause that was planted, alone, or none. (A core that is
slowed down from outside for a whole round makes a healthy rank a straggler.) planted: for each script and round, the
share of a step that the fault costs by the script's own clock (1 - healthy / planted: a lower bound on what there is to
find), the share that was found, and the causes. overhead: a step with the profiler's hooks over one without, of a
quarter of the batch, in pairs of 4 steps in turns within one process of each rank; without hooks it would be 1.
Result: records/.
Why it matters: a profiler that people will not change their script for, and that does not change what it measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SHARE, BATCH, PAIR_STEPS, TRIED_MB = 0.15, 64, 4, 8
CAUSES = {"healthy": "compute-bound", "rank": "straggler", "loader": "input-bound", "comm": "communication-bound"}
CLAIMS = {
    "any_script/rightly": "rightly",
    "any_script/overhead": ("overhead", "step_ms"),
}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images; a batch of them takes nap_s longer."""

    def __init__(self, nap_s: float) -> None:
        self.images, self.nap_s = torch.rand(4 * BATCH, 3, 32, 32), nap_s

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.nap_s and i % BATCH == 0:
            time.sleep(self.nap_s)
        return self.images[i], i % 10


class Net(nn.Module):
    """Few weights, much to compute; with `extra` weights at its input, whose gradient is ready last."""

    def __init__(self, extra: int, nap_s: float) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(extra)) if extra else None
        widths = (3, 32, 48, 64)
        layers = [
            part
            for a, b in itertools.pairwise(widths)
            for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        self.nap_s = nap_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        if self.nap_s:
            time.sleep(self.nap_s)
        if self.extra is not None:
            x = x + self.extra.sum()
        return self.layers(x)


def script(planted: str, amount: float, steps: int, pairs: int) -> None:
    """The training script; rank 0 writes the median step, and the seconds of an all-reduce of 1 MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    slow = planted == "rank" and dist.get_rank() == 1
    net = Net(int(amount * 2**18) if planted == "comm" else 0, amount if slow else 0.0)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not net.extra], lr=0.01)
    loader = DataLoader(Images(amount if planted == "loader" else 0.0), batch_size=BATCH // 4 if pairs else BATCH)
    seconds: list[float] = []

    def train(count: int) -> None:
        until = len(seconds) + count
        while len(seconds) < until:
            began = time.perf_counter()
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - began)
                began = time.perf_counter()
                if len(seconds) == until:
                    break

    train(5)
    del seconds[:]
    if pairs:
        ratios, step_s = overhead(model, optimizer, train, seconds, pairs)
        result: dict[str, Any] = {"ratios": ratios, "step_s": step_s}
    else:
        train(steps)
        result = {"step_s": statistics.median(seconds)}
        x, times_s = torch.zeros(TRIED_MB * 2**18), []
        for _ in range(7):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(x)
            times_s.append(time.perf_counter() - began)
        result["mb_s"] = statistics.median(times_s) / TRIED_MB
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def overhead(
    model: nn.Module, optimizer: Any, train: Any, seconds: list[float], pairs: int
) -> tuple[list[float], float]:
    """For each pair of stretches, a step with the hooks over one without; and a step without, in seconds."""
    from kasoku.report.script_timer import ScriptTimer

    ratios, plain_s = [], []
    for pair in range(pairs):
        medians = {}
        for hooked in (True, False) if pair % 2 else (False, True):
            with ExitStack() as stack:
                if hooked:
                    timer = ScriptTimer(warm=0)
                    stack.enter_context(timer.patches)
                    timer.attach(optimizer, [*model.modules()])
                    timer.begin(optimizer, model)
                dist.barrier()
                del seconds[:]
                train(PAIR_STEPS)
            medians[hooked] = statistics.median(seconds)
        ratios.append(medians[True] / medians[False])
        plain_s.append(medians[False])
    return ratios, statistics.median(plain_s)


def run(words: list[str], out: Path | None = None) -> dict[str, Any]:
    """Runs this file under torchrun, profiled into a folder or not; what it printed."""
    profile = ["-m", "kasoku", "profile", "--out", str(out), "--", sys.executable] if out else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, *words]
    done = subprocess.run([sys.executable, *profile, *torchrun], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of a profiled script")
    parser.add_argument("--rounds", type=int, default=3, help="in which each script is profiled")
    parser.add_argument("--pairs", type=int, default=200, help="of stretches with and without hooks")
    parser.add_argument("--plant", choices=CAUSES, default="healthy", help=argparse.SUPPRESS)
    parser.add_argument("--amount", type=float, default=0.0, help=argparse.SUPPRESS)
    if "RANK" in os.environ:
        arguments = parser.parse_args()
        script(arguments.plant, arguments.amount, arguments.steps, arguments.pairs)
        return 0
    from common import finish, parse, spread

    arguments = parse(parser)
    plain = run(["--steps", str(arguments.steps), "--pairs", "0"])
    nap_s = plain["step_s"] * SHARE / (1 - SHARE)
    found: dict[str, list[dict[str, Any]]] = {planted: [] for planted in CAUSES}
    for planted, cause in [*CAUSES.items()] * arguments.rounds:
        amount = {"healthy": 0.0, "comm": nap_s / plain["mb_s"]}.get(planted, nap_s)
        words = ["--steps", str(arguments.steps), "--pairs", "0", "--plant", planted, "--amount", str(amount)]
        with TemporaryDirectory() as folder:
            step_s = run(words, Path(folder))["step_s"]
            verdict = json.loads((Path(folder) / "ledger.json").read_text())["verdict"]
        healthy_s = found["healthy"][-1]["step_s"] if planted != "healthy" else step_s
        once: dict[str, Any] = {"step_s": round(step_s, 5), "costs": round(1 - healthy_s / step_s, 4)}
        once["found"] = verdict[0]["share"] if planted != "healthy" else None
        once["causes"] = [each["cause"] for each in verdict]
        found[planted].append(once | {"rightly": once["causes"] == [cause]})
    right = {planted: sum(once["rightly"] for once in rounds) for planted, rounds in found.items()}
    pairs = run(["--pairs", str(arguments.pairs)])
    ratios = pairs["ratios"]
    figures: dict[str, object] = {
        "rightly": sum(2 * times > arguments.rounds for times in right.values()),
        "rightly_in_rounds": right,
        "planted": found,
        "overhead": round(statistics.median(ratios), 4),
        "overhead_spread": {name: round(value, 4) for name, value in spread(ratios).items()},
        "lower_bound": 1.0,
        "step_ms": round(1e3 * pairs["step_s"], 2),
        "n": len(ratios),
    }
    finish("any_script", {"steps": arguments.steps, "batch": BATCH, "ranks": 2, "threads": 1}, figures, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
