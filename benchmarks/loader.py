"""How fast do batches come, how soon the first one, in how much memory, beside torch's DataLoader?

    python benchmarks/loader.py [--rounds N] [--seconds S] [--batch N]

The photos of $KASOKU_DATA/imagenet_fullsize (148 originals, each shown under 12 names, so that an epoch has 1,776), as
random resized crops of 224 with a flip, batches of 64, normalised in the main process. Each measurement is a process of
its own, in turns. theirs: torch's DataLoader with 2 and 8 workers (start method: see parameters), decoding with Pillow
(antialiased) or OpenCV (not antialiased), uint8 to the main process, where the same function normalises as ours.
ours: threads, found by measuring from as many as there are cores, or 2 and 8 for first batch and memory.
throughput_vs_...: medians of images/s over those of their better number of workers. throughput_pack_vs_opencv: ours
from a pack (side 256, JPEG of quality 90) over OpenCV from the originals. first_batch_..._workers: seconds from making
the loader to its first batch, ours over theirs with Pillow. memory_ratio: proportional set size of all processes above
that before the loader was made, the most while batches come, 8 workers with Pillow.
Bound: what `crop` alone does on all cores at once, images/s. Result: records/. Why it matters: [002] found
ImageNet training bound by its input.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from common import finish, parse, spread
from decode import library
from kasoku.core import InputError
from kasoku.core.hardware import cores
from kasoku.data import Augment, draws, folder, loader, normalise
from kasoku.data.augment.basic import box_draws, random_box
from kasoku.data.decode.decode import crop
from kasoku.data.packs.reader import shards
from kasoku.data.packs.writer import pack

SIDE, COPIES, BUDGET_S = 224, 12, 600
CLAIMS = {
    "loader/photos/over_pillow": ("throughput_vs_pillow", "images_per_s", "bound_images_per_s"),
    "loader/photos/over_opencv": "throughput_vs_opencv",
    "loader/photos/pack_over_opencv": ("throughput_pack_vs_opencv", "pack_images_per_s"),
    "loader/first_batch/workers_8": "first_batch_8_workers",
    "loader/first_batch/workers_2": "first_batch_2_workers",
    "loader/memory/workers_8": "memory_ratio",
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photos:
    """A data set as one writes it for DataLoader: the item is a crop of a file."""

    def __init__(self, root: str, library: str, side: int) -> None:
        self.paths = [str(path) for path in sorted(Path(root).rglob("*.JPEG"))]
        self.library, self.side = library, side
        self.read = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.read is None:
            self.read = library(self.library)
        at_N = torch.tensor([index])
        u_4 = box_draws(0, 0, at_N)[0].tolist()
        out_HWC = np.empty((self.side, self.side, 3), np.uint8)
        self.read(Path(self.paths[index]).read_bytes(), lambda w, h: random_box(w, h, u_4, 0.08), out_HWC)
        if draws(0, 0, at_N, 0).item() < 0.5:
            out_HWC = out_HWC[:, ::-1].copy()
        return torch.from_numpy(out_HWC), 0


def pss() -> int:
    """Bytes of this process and its children, shared pages in proportion."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        waiting += [int(child) for child in children]
    return total


def theirs(root: str, library: str, workers: int, batch: int, side: int = SIDE):
    return DataLoader(
        Photos(root, library, side), batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True
    )


def ours(root: str, workers: int, batch: int):
    dataset = shards(root, SIDE) if (Path(root) / "pack.json").exists() else folder(root, SIDE, validation=0.001)
    augment = Augment(flip="random", crop="random_resized", scale_min=0.08)
    return loader(dataset, "train", batch, augment=augment, threads=workers, cache_bytes=0)


def run(kind: str, root: str, workers: int, batch: int, seconds: float) -> dict[str, float]:
    """One measurement in this process."""
    before = pss()
    begin = time.perf_counter()
    batches = ours(root, workers, batch) if kind == "ours" else theirs(root, kind, workers, batch)
    first_s, images, most, start = 0.0, 0, 0, 0.0
    looked = begin
    while time.perf_counter() - begin < seconds + first_s:
        for x, _ in batches:
            if kind != "ours":
                x = normalise(x, MEAN, STD)
            now = time.perf_counter()
            if not first_s:
                first_s, start = now - begin, now
            else:
                images += len(x)
            if now - looked > 1:
                most, looked = max(most, pss()), now
            if now - begin > seconds + first_s:
                break
    return {"images_per_s": images / (time.perf_counter() - start), "first_s": first_s, "bytes": most - before}


def measured(kind: str, root: str, workers: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own."""
    words = [kind, root, str(workers)]
    command = [sys.executable, __file__, "--one", *words, "--batch", str(arguments.batch)]
    out = subprocess.run(
        [*command, "--seconds", str(arguments.seconds)], check=True, stdout=subprocess.PIPE, text=True, timeout=180
    )
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def bound(root: Path) -> float:
    """Images/s of cropping alone on all cores."""
    bodies = [path.read_bytes() for path in sorted(root.rglob("*.JPEG"))[:148]]
    u_N4 = box_draws(0, 0, torch.arange(len(bodies))).tolist()

    def all_of_them(_: int) -> None:
        out_HWC = np.empty((SIDE, SIDE, 3), np.uint8)
        for body, u_4 in zip(bodies, u_N4, strict=True):
            crop(body, lambda w, h, u_4=u_4: random_box(w, h, u_4, 0.08), out_HWC)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(all_of_them, range(cores())))
        start = time.perf_counter()
        list(pool.map(all_of_them, range(4 * cores())))
        return 4 * cores() * len(bodies) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if arguments.one:
        kind, root, workers = arguments.one
        print(json.dumps(run(kind, root, int(workers), arguments.batch, arguments.seconds)))
        return 0
    data = os.environ.get("KASOKU_DATA")
    if not data:
        raise InputError("loader.py: set KASOKU_DATA to the folder of imagenet_fullsize/")
    with tempfile.TemporaryDirectory() as home:
        root, packed = Path(home) / "photos", Path(home) / "pack"
        (root / "all").mkdir(parents=True)
        for copy in range(COPIES):
            for path in sorted((Path(data) / "imagenet_fullsize").rglob("*.JPEG")):
                (root / "all" / f"{copy}-{path.name}").symlink_to(path.resolve())
        pack(str(root), str(packed), side=256, quiet=True)
        ways = {"ours": ("ours", root, 0), "ours_pack": ("ours", packed, 0)}
        ways |= {f"ours_{n}": ("ours", root, n) for n in (2, 8)}
        ways |= {f"{kind}_{n}": (kind, root, n) for kind in ("pillow", "opencv") for n in (2, 8)}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        begin = time.monotonic()
        for number in range(arguments.rounds):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                kind, where, workers = ways[name]
                found[name].append(measured(kind, str(where), workers, arguments))
            if number >= 2 and (time.monotonic() - begin) * (number + 2) / (number + 1) > BUDGET_S:
                break
        most = bound(root)
    of = {name: {k: statistics.median(one[k] for one in each) for k in each[0]} for name, each in found.items()}
    best = {kind: max(of[f"{kind}_{n}"]["images_per_s"] for n in (2, 8)) for kind in ("pillow", "opencv")}
    figures: dict[str, object] = {
        "throughput_vs_pillow": round(of["ours"]["images_per_s"] / best["pillow"], 3),
        "throughput_vs_opencv": round(of["ours"]["images_per_s"] / best["opencv"], 3),
        "throughput_pack_vs_opencv": round(of["ours_pack"]["images_per_s"] / best["opencv"], 3),
        "first_batch_8_workers": round(of["ours_8"]["first_s"] / of["pillow_8"]["first_s"], 3),
        "first_batch_2_workers": round(of["ours_2"]["first_s"] / of["pillow_2"]["first_s"], 3),
        "memory_ratio": round(of["ours_8"]["bytes"] / of["pillow_8"]["bytes"], 3),
        "throughput_over_bound": round(of["ours"]["images_per_s"] / most, 3),
        "n": len(found["ours"]),
        "images_per_s": round(of["ours"]["images_per_s"], 1),
        "pack_images_per_s": round(of["ours_pack"]["images_per_s"], 1),
        "bound_images_per_s": round(most, 1),
        **{name: {k: spread([round(one[k], 4) for one in each]) for k in each[0]} for name, each in found.items()},
    }
    method = multiprocessing.get_start_method()
    parameters: dict[str, object] = {"batch": arguments.batch, "seconds": arguments.seconds, "start_method": method}
    finish("loader", parameters, figures, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
