"""Whole trainings of several ranks for tests: processes on loopback, and what their run folders hold."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file

from helpers.forked import Forked
from helpers.ranks import port as port

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_cnn_98.toml"
KASOKU = [sys.executable, "-m", "kasoku"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "kasoku", "train"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "JOB_")
# Rules whose steps do not amplify the last bit, so that runs on other numbers of ranks can be compared.
SETTINGS = [
    "optimizer={use='kasoku.optim.sgd', lr=0.1, momentum=0.9}",
    "norm_batch=16",
    "device.precision=fp32",
    "device.threads=1",
    "schedule.epochs=3",
    "schedule.warmup=1",
    "evaluate.target=0",
]


def options(*more: str) -> list[str]:
    return [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]


def clean(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what a launcher around the tests set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)} | dict(more or {})


def ended(command: Sequence[str], environment: Mapping[str, str] | None = None, code: int = 0) -> str:
    """Runs a command to its end, which must have this exit code; its stderr."""
    done = subprocess.run(command, env=clean(environment), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stderr


def forked(arguments: Sequence[str], code: int = 0) -> str:
    """Runs `kasoku ARGUMENTS` in a forked process, which must have this exit code; its stderr."""
    process = Forked(arguments, clean())
    said = process.communicate(timeout=300)
    assert process.returncode == code, (process.returncode, *said)
    return said[1]


def started(arguments: Sequence[str], size: int) -> list[Forked]:
    """The ranks of `kasoku ARGUMENTS`, as a launcher starts them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": str(size)}
    places = [{"RANK": str(i), "LOCAL_RANK": str(i), "LOCAL_WORLD_SIZE": str(size)} for i in range(size)]
    return [Forked(arguments, clean(where | place)) for place in places]


def wait_for_checkpoints(processes: Sequence[Forked | subprocess.Popen[str]], *runs: Path) -> None:
    """Until each of these runs has a checkpoint; kills the processes if one ends before, or after two minutes."""
    until = time.monotonic() + 120
    while not all(list(run.glob("checkpoints/step-*")) for run in runs):
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            kill(processes)
            raise AssertionError([process.returncode for process in processes])
        time.sleep(0.005)


def stop_by_sigterm(ranks: Sequence[Forked], run: Path, *signalled: int) -> None:
    """Sends SIGTERM to some ranks: all must then end with code 75, and rank 0 alone says how to go on."""
    try:
        for rank in signalled:
            ranks[rank].send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        kill(ranks)
    assert [rank.returncode for rank in ranks] == [75] * len(ranks), said
    assert f"stopped by SIGTERM; go on with: kasoku train --resume {run}" in said[0]
    assert not any("kasoku" in text for text in said[1:])


def kill(processes: Sequence[Forked | subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def largest_difference(a: Path, b: Path) -> float:
    """Of any weight or statistic, relative where they are above 1."""
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    pairs = [(left[name].double(), right[name].double()) for name in left]
    return max(float(((x - y).abs() / y.abs().clamp(min=1)).max()) for x, y in pairs)
