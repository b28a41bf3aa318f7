"""The case of asynchronous.py in which workers die: goodput of `kasoku train`, asynchronous and synchronous."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "digits_cnn_98.toml"
WORKERS, SHARE = 4, 0.45  # of a core, of each
PERIOD_US, POLL_S, LIMIT_S = 100_000, 0.05, 300.0
SIDES = {"async": "techniques=[{use='kasoku.distributed.Asynchronous'}]", "sync": "techniques=[]"}


@contextmanager
def quotas() -> Iterator[list[Path]]:
    """A control group for each worker, of so much of a core (cgroup v1, as root)."""
    top = Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "cgroup", "-o", "cpu", "none", str(top)], check=True)
    folders = [top / f"kasoku-{os.getpid()}-{rank}" for rank in range(WORKERS)]
    try:
        for folder in folders:
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(round(SHARE * PERIOD_US)))
        yield folders
    finally:
        for folder in folders:
            while (folder / "cgroup.procs").read_text():
                time.sleep(POLL_S)
            folder.rmdir()
        subprocess.run(["umount", str(top)], check=False)
        top.rmdir()


class Launcher:
    """Starts the workers of one training, each with its quota, and starts one again when it ends."""

    def __init__(self, asked: argparse.Namespace, side: str, groups: Sequence[Path], out: Path) -> None:
        self.groups, self.out, self.starts, self.batch = groups, out, 0, asked.batch * len(groups)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        size = len(groups)
        self.place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        settings = [
            SIDES[side],
            f"batch={self.batch}",
            f"model.widths={asked.widths}",
            "optimizer={use='kasoku.optim.sgd', lr=0.02, momentum=0.9}",
            "schedule={use='kasoku.core.Constant'}",
            "epochs=100000",
            "data={use='kasoku.data.fashion_mnist'}",
            "evaluate.every=100000",
            f"save.every_s={asked.save_s}",
            "device.threads=1",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        self.command = [sys.executable, "-m", "kasoku", "train", str(RECIPE), *words, "--quiet", "--continue"]
        self.processes = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": self.place["WORLD_SIZE"]}
        words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.groups[rank])]
        with (self.out.parent / f"{self.out.name}-{rank}.log").open("ab") as log:
            words += [*self.command, "--out", str(self.out)]
            return subprocess.Popen(words, env={**os.environ, **self.place, **where}, stdout=log, stderr=log)

    def poll(self) -> int:
        """Starts again what has ended; the images up to the newest checkpoint."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[rank] = self._start(rank)
        steps = (int(folder.name.split("-")[1]) for folder in (self.out / "checkpoints").glob("step-*"))
        return max(steps, default=0) * self.batch

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def goodput(asked: argparse.Namespace, side: str, groups: Sequence[Path], out: Path, *, deaths: bool) -> dict[str, Any]:
    """Images a second from the first checkpoint to the first one after --seconds; deaths, and starts."""
    with ExitStack() as stack:
        launcher = Launcher(asked, side, groups, out)
        stack.callback(launcher.end)
        began = time.monotonic()
        while not (before := launcher.poll()):
            if time.monotonic() - began > LIMIT_S:
                raise RuntimeError(f"{side}: no checkpoint in {LIMIT_S:g} s, see {out.parent}")
            time.sleep(POLL_S)
        images, first, killed = before, time.monotonic(), 0
        last = first
        while last < first + asked.seconds:  # ends with a checkpoint, as it began with one
            now = time.monotonic()
            if now > first + asked.seconds + LIMIT_S:
                raise RuntimeError(f"{side}: no checkpoint in {LIMIT_S:g} s, see {out.parent}")
            if deaths and first + (killed + 1) * asked.kill_every < min(now, first + asked.seconds):
                killed += 1
                launcher.processes[killed % len(groups)].send_signal(signal.SIGKILL)  # rank 1 first, rank 0 last
            if (newest := launcher.poll()) > images:
                images, last = newest, now
            time.sleep(POLL_S)
    seconds = last - first
    return {
        "images_per_s": (images - before) / seconds,
        "killed": killed,
        "starts": launcher.starts,
        "seconds": seconds,
    }


def deaths(asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of both sides, each beside its own undisturbed training."""
    folder = Path(tempfile.mkdtemp(prefix="kasoku-deaths-"))
    figures: dict[str, Any] = {"n": 1}
    with quotas() as groups:
        alone = goodput(asked, "async", groups[:1], folder / "alone", deaths=False)
        start_s = json.loads((folder / "alone" / "metrics.jsonl").read_text().splitlines()[0])["seconds"]
        for side, prefix in (("async", ""), ("sync", "sync_")):
            whole = goodput(asked, side, groups, folder / f"{side}-whole", deaths=False)
            found = goodput(asked, side, groups, folder / side, deaths=True)
            alive = 1 - start_s * found["killed"] / (WORKERS * found["seconds"])
            share = found["images_per_s"] / whole["images_per_s"]
            figures |= {
                f"{prefix}goodput": round(share / alive, 3),
                f"{prefix}goodput_with_starts": round(share, 3),
                f"{prefix}alive": round(alive, 3),
                f"{prefix}over_alone": round(found["images_per_s"] / (WORKERS * alive * alone["images_per_s"]), 3),
                f"{prefix}images_per_s": round(found["images_per_s"], 1),
                f"{prefix}undisturbed_images_per_s": round(whole["images_per_s"], 1),
                f"{prefix}killed": found["killed"],
                f"{prefix}starts": found["starts"],
            }
            print(side, whole, found, flush=True)
    figures |= {"images_per_s_alone": round(alone["images_per_s"], 1), "start_s": round(start_s, 1)}
    shutil.rmtree(folder)
    return figures
