"""How long does a recipe take to its accuracy, everything counted, and how often does it get there?

Command: python benchmarks/time_to_accuracy.py recipes/cifar10_cifarnet_94.toml --seeds 3 [--set data.root=DIR]

Each seed is a `kasoku train` process of its own; seconds_per_run is the wall clock of the whole process. Before each
run the machine's yardstick is measured in a process of its own: a bare CIFAR ResNet-9, bf16, channels_last, batch 128.
It reached 322 images/s on the machine where the fastest public CIFAR-10 recipe (airbench94_muon) took 468 s as a whole
process; `bar_s` = 0.9 x 468 x 322 / rate is what that recipe less 10 % takes here (for CIFAR-10 to 94 %).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, resnet9_rate, spread

REFERENCE_S, REFERENCE_RATE, FACTOR = 468, 322, 0.9


def run(recipe: str, seed: int, settings: list[str], out: Path) -> dict[str, Any]:
    """One training as a process; its result.json with the process's wall clock as `process_s`."""
    options = [option for setting in [*settings, f"seed={seed}"] for option in ("--set", setting)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "kasoku.cli", "train", recipe, *options, "--out", str(out), "--quiet"]
    done = subprocess.run(command, check=False)
    process_s = time.perf_counter() - start
    if done.returncode == 3:  # diverged: a failure to be counted
        return {"top1": 0.0, "process_s": process_s, "target": 1.0, "seconds_by": {}}
    done.check_returncode()
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return {**result, "process_s": process_s}


def yardstick() -> float:
    """The bare ResNet-9's images/s, in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--yardstick"], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--yardstick", action="store_true", help="only the ResNet-9's images/s")
    arguments = parser.parse_args()
    if arguments.yardstick:
        print(resnet9_rate())
        return
    if not arguments.recipe:
        parser.error("which recipe?")
    rates, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            rates.append(yardstick())
            results.append(run(arguments.recipe, seed, arguments.set, Path(folder) / str(seed)))
            last = results[-1]
            print(f"seed {seed}: {last['top1']:.2%} in {last['process_s']:.1f} s, ResNet-9 {rates[-1]:.0f} images/s; "
                  f"{last['seconds_by']}", flush=True)  # fmt: skip
        rates.append(yardstick())
    seconds = [r["process_s"] for r in results]
    top1 = [100 * r["top1"] for r in results]
    rate = statistics.median(rates)
    figures: dict[str, object] = {
        "seconds_per_run": round(statistics.median(seconds), 1),
        "bar_s": round(FACTOR * REFERENCE_S * REFERENCE_RATE / rate, 1),
        "top1_mean": round(statistics.mean(top1), 3),
        "top1_min": round(min(top1), 3),
        "failure_rate": sum(r["top1"] < r["target"] for r in results) / len(results),
        "seconds": spread([round(s, 1) for s in seconds]),
        "top1": [round(a, 2) for a in top1],
        "resnet9_images_per_s": [round(r, 1) for r in rates],
        "seconds_by": results[0]["seconds_by"],
    }
    finish("time_to_accuracy", {"recipe": arguments.recipe, "seeds": arguments.seeds, "set": arguments.set}, figures)


if __name__ == "__main__":
    main()
