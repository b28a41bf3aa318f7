"""What must be seen on a GPU, in one go of at most 8 minutes: `make gpu`. A table last, then one JSON line.

Each check is a process of its own with a limit; one that fails or has no data does not stop the others. CIFAR-10 is
looked for in $KASOKU_CIFAR10 (the official binary format). Without a GPU it says so and exits with 1. If $KASOKU_RIVAL
names a script as time_to_accuracy.py takes it, with its options, 20 seeds of it and of the CIFAR-10 recipe run in
turns after that, for at most 10 minutes more.

Published beside ours: airbench94_muon 2.59 s to 94 % on an A100 (training alone, data on the GPU, kernels warm).
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common import finish, parse, seconds_per_call
from kasoku.report import print_table
from time_to_accuracy import run, run_rival, warm_s

ROOT = Path(__file__).parent.parent
_RACE_S = 600.0
RECORD = ["--record"] if "--record" in sys.argv else []  # handed on to the benchmarks that are run


def train(recipe: str, *settings: str) -> dict[str, object]:
    """One `kasoku train` as a process; its result.json."""
    options = [option for setting in settings for option in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "kasoku", "train", str(ROOT / "recipes" / recipe), *options]
        subprocess.run([*command, "--quiet", "--out", str(out)], check=True, timeout=240)
        result: dict[str, object] = json.loads((out / "result.json").read_text())
    return result


def digits() -> str:
    """The whole path on the GPU, fp16 with loss scaling too."""
    shown = []
    for precision in ("bf16", "fp16", "fp32"):
        result = train("digits_cnn_98.toml", f"device.precision={precision}")
        shown.append(f"{precision} {result['top1']:.2%} in {result['time_to_target_s']} s")
    return "; ".join(shown)


def deterministic_resume() -> str:
    """Killed and resumed gives the same bits with deterministic = true."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kasoku", "train"]
        options = ["device.deterministic=true", "evaluate.target=0", "epochs=4", "schedule.epochs=4"]
        settings = [str(ROOT / "recipes" / "digits_cnn_98.toml"), "--quiet"]
        settings += [part for option in [*options, "save.every_steps=7"] for part in ("--set", option)]
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        subprocess.run([*command, *settings, "--out", str(whole)], check=True, timeout=120)
        process = subprocess.Popen([*command, *settings, "--out", str(parts)])
        deadline = time.monotonic() + 60
        while not list((parts / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.wait()
        subprocess.run([*command, "--resume", str(parts), "--quiet"], check=True, timeout=120)
        same = (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    return "bit for bit" if same else "DIFFERENT WEIGHTS"


def cifar10() -> str:
    """The CIFAR-10 recipe."""
    root = os.environ.get("KASOKU_CIFAR10")
    if not root:
        return "skipped: KASOKU_CIFAR10 names no folder"
    shown = []
    for more in ((), ("device.graphs=true",), ("device.compile=true",)):
        result = train("cifar10_cifarnet_94.toml", f"data.root={root}", *more)
        by = result["seconds_by"]
        shown.append(f"{more[0] if more else 'plain'}: {result['top1']:.2%}, {result['seconds']} s in all, "
                     f"compile {by['compile']}, forward {by['forward']}, backward {by['backward']}")  # fmt: skip
    return "; ".join(shown)


def race() -> str:
    """The CIFAR-10 recipe and a rival's script, in turns: whole processes (cold); training and test alone (warm)."""
    rival, root = shlex.split(os.environ.get("KASOKU_RIVAL", "")), os.environ.get("KASOKU_CIFAR10")
    if not rival or not root:
        return "skipped: KASOKU_RIVAL names no script, or KASOKU_CIFAR10 no folder"
    cold, warm, accuracies, end = [], [], [], time.monotonic() + _RACE_S - 60
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(20):
            settings = [f"data.root={root}"]
            ours = run(str(ROOT / "recipes" / "cifar10_cifarnet_94.toml"), seed, settings, Path(folder) / str(seed))
            theirs = run_rival(Path(rival[0]), seed, rival[1:])
            cold.append(ours["process_s"] / theirs["process_s"])
            warm.append(warm_s(ours) / theirs.get("seconds", math.nan))
            accuracies.append((ours["top1"], theirs["top1"]))
            if time.monotonic() > end:
                break
    own, rivals = (statistics.mean(column) for column in zip(*accuracies, strict=True))
    times = f"cold {statistics.median(cold):.3f}, warm {statistics.median(warm):.3f} of the rival's seconds"
    return f"{times}; {own:.2%} beside {rivals:.2%}; n {len(cold)}"


def resnet50() -> str:
    """ResNet-50 at 224 pixels, batch 256: PyTorch's defaults, ours, ours compiled. 12.3 GFLOP an image."""
    from kasoku.core import Job
    from kasoku.device import ChannelsLast, Compile, Device, choose
    from kasoku.models import resnet50 as network
    from kasoku.optim import sgd

    chosen = choose(Device())
    x = torch.randn(256, 3, 224, 224, device=chosen.device)
    y = torch.randint(1000, (256,), device=chosen.device)
    shown = []
    for name, techniques in {
        "defaults": (),
        "ours": chosen.techniques,
        "ours compiled": (*chosen.techniques, Compile()),
    }.items():
        job = Job(network().to(chosen.device), sgd, loader=[(x, y)]).apply(*techniques)
        has_layout = any(isinstance(t, ChannelsLast) for t in techniques)
        images = x.to(memory_format=torch.channels_last) if has_layout else x

        def step(job: Job = job, images: torch.Tensor = images) -> None:
            job.loss(job.model(images), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()

        rate = 256 / statistics.median(seconds_per_call(step, calls=10, warm=5))
        shown.append(f"{name} {rate:,.0f} images/s ({rate * 12.3e9 / 1e12:.0f} TFLOP/s)")
        job.close()
    return "; ".join(shown)


def benchmark(script: str, *options: str, keys: tuple[str, ...]) -> str:
    """Some figures of another benchmark's JSON line."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options, *RECORD]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return ", ".join(f"{key} {figures[key]}" for key in keys)


def lars() -> str:
    """The Triton kernels: right on the device, and what a step costs (bound asked: 1.3 of fused SGD; naive 5)."""
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/optim/test_lars_cuda.py"]
    right = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    keys = ("ours_over_fused_sgd", "naive_over_ours", "launches_161", "launches_322")
    shown = "tests pass" if right.returncode == 0 else f"FAILED: {right.stdout.strip().splitlines()[-1]}"
    return f"{shown}; {benchmark('lars_step.py', keys=keys)}"


def virtual_ranks() -> str:
    """64 virtual ranks on one GPU."""
    return benchmark("virtual_ranks.py", "--pairs", "3", keys=("virtual_over_plain", "memory_64_over_2"))


def asynchronous() -> str:
    """Two ranks that do not wait for each other, by turns on one GPU: they learn, with any bits on the wire."""
    from kasoku.config.recipe import load
    from kasoku.core import Threads, process_start
    from kasoku.training.trainer import build, fit

    shown = []
    for wire in ("fp32", "bf16", "int8"):
        technique = f"techniques=[{{use='kasoku.distributed.Asynchronous', wire='{wire}'}}]"
        recipe = load(ROOT / "recipes" / "digits_cnn_98.toml", [technique])
        ranks = Threads(2).run(lambda comm, r=recipe: fit(build(r, comm), None, started=process_start(), quiet=True))
        shown.append(f"{wire} {ranks[0].top1:.2%}")
        if ranks[0].top1 < 0.95:
            return f"FAILED: {shown[-1]}"
    return "; ".join(shown)


def ranks() -> str:
    """Two ranks by turns on one GPU, in fp16 with loss scaling and late updates, eager and with graphs in buckets."""
    from kasoku.config.recipe import load
    from kasoku.core import Threads, process_start
    from kasoku.training.trainer import build, fit

    shown = []
    for graphs in ("false", "true"):
        settings = ["device.precision=fp16", f"device.graphs={graphs}"]
        recipe = load(ROOT / "recipes" / "digits_cnn_98.toml", settings)
        results = Threads(2).run(lambda comm, r=recipe: fit(build(r, comm), None, started=process_start(), quiet=True))
        shown.append(f"graphs={graphs} {results[0].top1:.2%}")
        if results[0].top1 < 0.95:
            return f"FAILED: {shown[-1]}"
    return "; ".join(shown)


CHECKS: dict[str, Callable[[], str]] = {
    "digits": digits,
    "deterministic resume": deterministic_resume,
    "cifar10": cifar10,
    "resnet50": resnet50,
    "lars": lars,
    "virtual ranks": virtual_ranks,
    "asynchronous": asynchronous,
    "ranks": ranks,
    "race": race,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", choices=CHECKS, help="only this one")
    only = parse(parser).check
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch finds no GPU here: run it on a machine with one", file=sys.stderr)
        return 1
    if only:
        print(CHECKS[only]())
        return 0
    rows = {"GPU": torch.cuda.get_device_name(0)}
    end = time.monotonic() + 470
    for name in CHECKS:
        command = [sys.executable, __file__, "--check", name, *RECORD]
        try:
            limit = _RACE_S if name == "race" else max(1.0, min(240.0, end - time.monotonic()))
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            rows[name] = ("" if done.returncode == 0 else "FAILED: ") + (lines[-1] if lines else "no output")
        except subprocess.TimeoutExpired:
            rows[name] = "FAILED: took too long"
        print(f"{name}: {rows[name]}", flush=True)
    print_table("GPU checks", rows)
    finish("gpu", {"limit_s": 480}, {name.replace(" ", "_"): row for name, row in rows.items()})
    return int(any("FAILED" in row or "DIFFERENT" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
