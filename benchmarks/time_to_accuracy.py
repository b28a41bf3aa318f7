"""How long does a recipe take to its accuracy, everything counted, and how often does it get there?

Command: python benchmarks/time_to_accuracy.py recipes/cifar10_cifarnet_94.toml --seeds 3 [--set data.root=DIR]
             [--rival FILE [--rival-options "--data DIR"]]

Each seed is a `kasoku train` process of its own; seconds_per_run is the wall clock of the whole process. With --rival a
script of somebody else runs beside it, a process for each seed, in turns: FILE takes `--seed N` and prints a JSON line
with `top1` (0 to 1) last. `ours_over_rival` is the median over seeds of our seconds over the rival's, with the 95 %
interval of a paired t test on its logarithms. If the line also has `seconds`, those of training and test alone,
`warm_over_rival` compares them with ours. Before each seed the machine's yardstick is measured in a process of its
own: a bare CIFAR ResNet-9, bf16, channels_last, batch 128.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, parse, resnet9_rate, spread
from kasoku.report.ledger import STEP
from kasoku.report.significance import interval

SUBJECTS = {  # of the claims about a recipe
    "cifar10_cifarnet_94": "cifar10",
    "fashion_cifarnet_93": "fashion_mnist",
    "imagenette_resnet18": "imagenette",
}
CLAIMS = {"seconds": ("seconds_per_run", "resnet9_images_per_s", "seconds_by"), "top1": ("top1_mean", "top1_min")}
RIVAL_CLAIMS = {
    "ours_over_rival": (
        "ours_over_rival",
        "low",
        "high",
        "seconds_per_run",
        "top1_mean",
        "rival_seconds",
        "rival_top1_mean",
    )
}


def claims(recipe: str, *, rival: bool) -> dict[str, tuple[str, ...]]:
    """The claims about a recipe; none about other recipes than those of SUBJECTS."""
    subject = SUBJECTS.get(Path(recipe).stem)
    each = CLAIMS | (RIVAL_CLAIMS if rival else {})
    return {f"{subject}/{name}": keys for name, keys in each.items()} if subject else {}


def warm_s(result: dict[str, Any]) -> float:
    """The seconds of a run's steps and evaluations: all but its start and its checkpoints."""
    return sum(result["seconds_by"].get(row, 0.0) for row in ("compile", *STEP, "evaluate"))


def run(recipe: str, seed: int, settings: list[str], out: Path) -> dict[str, Any]:
    """One training as a process; its result.json with the process's wall clock as `process_s`."""
    options = [option for setting in [*settings, f"seed={seed}"] for option in ("--set", setting)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "kasoku", "train", recipe, *options, "--out", str(out), "--quiet"]
    done = subprocess.run(command, check=False)
    process_s = time.perf_counter() - start
    if done.returncode == 3:  # diverged: a failure to be counted
        return {"top1": 0.0, "process_s": process_s, "target": 1.0, "seconds_by": {}}
    done.check_returncode()
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return {**result, "process_s": process_s}


def run_rival(file: Path, seed: int, options: list[str]) -> dict[str, float]:
    """One training by the rival's script as a process: what its last line has, and the process's wall clock."""
    start = time.perf_counter()
    command = [sys.executable, str(file), "--seed", str(seed), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    process_s = time.perf_counter() - start
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": process_s}


def yardstick() -> float:
    """The bare ResNet-9's images/s, in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--yardstick"], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the others follow")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--rival", type=Path, metavar="FILE", help="a script to time beside ours")
    parser.add_argument("--rival-options", type=shlex.split, default=[], metavar="WORDS", help="more words for it")
    parser.add_argument("--yardstick", action="store_true", help="only the ResNet-9's images/s")
    arguments = parse(parser)
    if arguments.yardstick:
        print(resnet9_rate())
        return
    if not arguments.recipe:
        parser.error("which recipe?")
    rates, results, rivals = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            rates.append(yardstick())
            results.append(run(arguments.recipe, seed, arguments.set, Path(folder) / str(seed)))
            last = results[-1]
            print(f"seed {seed}: {last['top1']:.2%} in {last['process_s']:.1f} s, ResNet-9 {rates[-1]:.0f} images/s; "
                  f"{last['seconds_by']}", flush=True)  # fmt: skip
            if arguments.rival:
                rivals.append(run_rival(arguments.rival, seed, arguments.rival_options))
                print(f"rival: {rivals[-1]['top1']:.2%} in {rivals[-1]['process_s']:.1f} s", flush=True)
        rates.append(yardstick())
    seconds = [r["process_s"] for r in results]
    top1 = [100 * r["top1"] for r in results]
    figures: dict[str, object] = {
        "seconds_per_run": round(statistics.median(seconds), 1),
        "seconds_per_run_spread": spread([round(s, 1) for s in seconds]),
        "top1_mean": round(statistics.mean(top1), 3),
        "top1_mean_spread": spread([round(a, 2) for a in top1]),
        "top1_min": round(min(top1), 3),
        "failure_rate": sum(r["top1"] < r["target"] for r in results) / len(results),
        "top1": [round(a, 2) for a in top1],
        "resnet9_images_per_s": [round(r, 1) for r in rates],
        "seconds_by": results[0]["seconds_by"],
    }
    if rivals:
        ratios = [s / r["process_s"] for s, r in zip(seconds, rivals, strict=True)]
        if len(ratios) > 1:
            _, low, high = map(math.exp, interval([math.log(ratio) for ratio in ratios]))
            figures |= {"low": round(low, 3), "high": round(high, 3)}
        figures |= {
            "ours_over_rival": round(statistics.median(ratios), 3),
            "ours_over_rival_spread": spread([round(r, 3) for r in ratios]),
            "rival_seconds": spread([round(r["process_s"], 1) for r in rivals]),
            "rival_top1": [round(100 * r["top1"], 2) for r in rivals],
            "rival_top1_mean": round(100 * statistics.mean(r["top1"] for r in rivals), 2),
        }
        if all("seconds" in r for r in rivals):
            warm = [round(warm_s(result) / r["seconds"], 3) for result, r in zip(results, rivals, strict=True)]
            figures |= {"warm_over_rival": round(statistics.median(warm), 3), "warm_over_rival_spread": spread(warm)}
    parameters = {
        "recipe": arguments.recipe,
        "seeds": arguments.seeds,
        "first_seed": arguments.first_seed,
        "set": arguments.set,
    }
    finish("time_to_accuracy", parameters, figures, claims(arguments.recipe, rival=bool(rivals)))


if __name__ == "__main__":
    main()
