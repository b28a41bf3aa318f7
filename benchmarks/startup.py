"""How long until the first step is made, when what a start consists of overlaps?

    python benchmarks/startup.py [--rounds N] [--files N] [--ms N]

As root: two ranks in network namespaces of their own, on a link that takes 20 ms each way (a round trip is 40 ms), a
folder of 50,000 JPEG files of 32 pixels in ten classes that rank 0 indexes for both (the files' names are in the page
cache), a small network, gloo, Overlap. A start is `kasoku train` in
fresh processes on both ranks, from the process's start to the end of its first step, by rank 0's clock.
overlapped_over_sequential: medians of starts with overlapping tasks and of starts with one task after the other
(KASOKU_SEQUENTIAL=1), in turns. At most 0.8 is wanted.
overlapped_over_critical_path: of each overlapped start, over the longest chain of its own tasks; 1 is the bound, at
most 1.15 is wanted.
first_epoch_over_second: a training of two epochs on a part of the images, each epoch from the request for its first
batch to its last update; the first one right after the start. At most 1.05 is wanted.
Result: records/. Why it matters: while one rank starts, all wait; with every restart, again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image

from common import finish, parse, spread
from kasoku.distributed.startup import SEQUENTIAL
from link import ADDRESS, linked

CLASSES, SIDE, LIMIT_S, BUDGET_S = 10, 32, 120, 420
CLAIMS = {
    "startup/two_ranks/over_sequential": ("overlapped_over_sequential", "overlapped_s", "sequential_s"),
    "startup/two_ranks/over_critical_path": "overlapped_over_critical_path",
    "startup/epochs/first_over_second": "first_epoch_over_second",
}
NETWORK = """
from torch import nn

def network(num_classes, in_channels=3, image_size=32, width=64):
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    blocks = [block(in_channels, width), *(block(width, width) for _ in range(3))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
"""
RECIPE = """
epochs = {epochs}
batch = 128
model = {{ use = "small_network.network" }}
data = {{ use = "kasoku.data.folder", root = "{root}", size = 32 }}
optimizer = {{ use = "kasoku.optim.sgd", lr = 0.01, momentum = 0.9 }}
evaluate = {{ every = 1000 }}
[[techniques]]
use = "kasoku.distributed.Overlap"
"""


def make_folder(root: Path, files: int) -> None:
    """Small JPEG files, a folder a class, in train/ and val/."""
    random = np.random.default_rng(0)
    for part, count in (("train", files * 98 // 100), ("val", files - files * 98 // 100)):
        for label in range(CLASSES):
            home = root / part / f"class-{label}"
            home.mkdir(parents=True)
            bodies = [_jpeg(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(16)]
            for i in range(count // CLASSES):
                (home / f"image-{i:06}.jpg").write_bytes(bodies[i % 16])


def _jpeg(pixels_HWC: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "JPEG")
    return out.getvalue()


class Hosts:
    """The two ends of the link, where ranks are run."""

    def __init__(self, names: Sequence[str], home: Path) -> None:
        self.names, self.home, self.count = names, home, 0

    def started(self, command: Sequence[str], recipe: str, **more: str) -> list[subprocess.Popen[str]]:
        """Both ranks of a command whose last argument is a recipe; no index of an earlier start is kept."""
        self.count += 1
        ranks = []
        for rank, name in enumerate(self.names):
            folder = self.home / f"start-{self.count}-{rank}"
            folder.mkdir()
            (folder / "recipe.toml").write_text(recipe)
            (folder / "small_network.py").write_text(NETWORK)
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env |= {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": str(29600 + self.count % 1000)}
            env |= {"GLOO_SOCKET_IFNAME": "ve0", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
            core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
            words = ["ip", "netns", "exec", name, "taskset", "-c", str(core), sys.executable, *command]
            out = subprocess.DEVNULL if rank else subprocess.PIPE
            ranks.append(
                subprocess.Popen(
                    [*words, str(folder / "recipe.toml")], env=os.environ | env | more, stdout=out, text=True
                )
            )
        return ranks

    def start(self, recipe: str, *, overlap: bool) -> tuple[float, float, dict[str, list[float]]]:
        """One start: its seconds, those of its critical path, and when its tasks ran."""
        run = self.home / f"run-{self.count}"
        more = {} if overlap else {SEQUENTIAL: "1"}
        ranks = self.started(["-m", "kasoku", "train", "--quiet", "--out", str(run)], recipe, **more)
        try:
            told = _told(run / "mlperf.log", ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        tasks, after = told["metadata"]["tasks"], told["metadata"]["after"]
        shutil.rmtree(run)
        return told["value"], critical_path_s(tasks, after), tasks


def critical_path_s(tasks: dict[str, list[float]], after: dict[str, list[str]]) -> float:
    """Seconds of the longest chain of tasks that depend on each other; no start can be faster."""
    longest: dict[str, float] = {}
    for name in after:  # predecessors come first
        if name in tasks:
            begin, end = tasks[name]
            longest[name] = end - begin + max((longest[other] for other in after[name] if other in longest), default=0)
    return max(longest.values(), default=0)


def _told(log: Path, ranks: Sequence[subprocess.Popen[str]]) -> dict:
    """The line about the start in rank 0's log."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and all(rank.poll() is None for rank in ranks):
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines:
            if '"key": "start"' in line:
                return json.loads(line.removeprefix(":::MLLOG "))
        time.sleep(0.05)
    raise RuntimeError("a start did not come to its first step: see above")


def two_epochs(recipe: Path) -> None:
    """A rank: trains two epochs, and prints how long each took."""
    start_s = time.perf_counter()
    sys.path.append(str(recipe.parent))
    from kasoku.distributed.environment import place
    from kasoku.distributed.membership import process_group
    from kasoku.distributed.startup import Start

    start = Start(began=start_s)
    with process_group(place(), start, partial(import_module, "kasoku.training.trainer"), None) as comm:
        from kasoku.config import recipe as recipes
        from kasoku.config import trust
        from kasoku.training.trainer import build

        trust.allow_beside(recipe)
        job = build(recipes.load(recipe), comm, start=start).job
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            for x_NCHW, y_N in job.loader:
                job.loss(job.model(x_NCHW), y_N).backward()
                job.optimizer.step()
                job.optimizer.zero_grad()
            job.drain()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


def epochs(hosts: Hosts, recipe: str) -> tuple[float, float]:
    """Seconds of a first and a second epoch."""
    ranks = hosts.started([__file__, "--two-epochs"], recipe)
    try:
        out = ranks[0].communicate(timeout=4 * LIMIT_S)[0]
        first, second = json.loads(out.splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return first, second


def measure(hosts: Hosts, arguments: argparse.Namespace, folder: Path, small: Path) -> dict[str, object]:
    """All figures."""
    recipe = RECIPE.format(epochs=1, root=folder)
    found: dict[bool, list[tuple[float, float, dict[str, list[float]]]]] = {True: [], False: []}
    begin = time.monotonic()
    hosts.start(recipe, overlap=True)  # fills the page cache
    for i in range(arguments.rounds):
        for overlap in (True, False) if i % 2 == 0 else (False, True):
            found[overlap].append(hosts.start(recipe, overlap=overlap))
        if i >= 2 and (time.monotonic() - begin) * (i + 2) / (i + 1) > BUDGET_S:
            break
    pairs = [epochs(hosts, RECIPE.format(epochs=2, root=small)) for _ in range(arguments.trainings)]
    over, line = ([s for s, _, _ in found[overlap]] for overlap in (True, False))
    paths = [s / path for s, path, _ in found[True]]
    items = {
        "overlapped" if overlap else "sequential": {
            name: round(statistics.median(tasks[name][1] - tasks[name][0] for _, _, tasks in starts), 3)
            for name in starts[0][2]
        }
        for overlap, starts in found.items()
    }
    return {
        "overlapped_over_sequential": round(statistics.median(over) / statistics.median(line), 4),
        "overlapped_over_critical_path": round(statistics.median(paths), 4),
        "first_epoch_over_second": round(statistics.median(one / two for one, two in pairs), 4),
        "n": len(over),
        "overlapped_s": spread(over),
        "sequential_s": spread(line),
        "overlapped_over_critical_path_spread": spread(paths),
        "first_epoch_over_second_spread": spread([one / two for one, two in pairs]),
        "seconds_by_epoch": [[k + 1, statistics.median(pair[k] for pair in pairs)] for k in range(2)],
        "epoch_s": [[round(s, 3) for s in pair] for pair in pairs],
        "tasks_s": items,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of starts, at most; fewer where time is short")
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--ms", type=float, default=20.0, help="of the link, each way")
    parser.add_argument("--images", type=int, default=12_800, help="to train two epochs on")
    parser.add_argument("--trainings", type=int, default=3, help="of two epochs")
    parser.add_argument("--two-epochs", type=Path, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if arguments.two_epochs:
        two_epochs(arguments.two_epochs)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed then too
    with tempfile.TemporaryDirectory() as home:
        folder, small = Path(home) / "photos", Path(home) / "fewer"
        make_folder(folder, arguments.files)
        make_folder(small, arguments.images * 100 // 98)
        with linked(arguments.ms / 1000) as names:
            figures = measure(Hosts(names, Path(home)), arguments, folder, small)
    parameters: dict[str, object] = {"ranks": 2, "threads": 1, "link_ms_each_way": arguments.ms}
    parameters |= {"files": arguments.files, "images_of_two_epochs": arguments.images, "rounds": arguments.rounds}
    finish("startup", parameters, figures, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
