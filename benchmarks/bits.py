"""Do two checkouts train to the same bits? Trains 50 steps of each way of training and digests the weights.

Run it in both checkouts on one machine and compare the JSON lines: `digests` must be equal. Everything goes through the
`kasoku` command, so what this file knows of the package are the dotted names in NAMES and the options of the command.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tomli_w
from PIL import Image
from safetensors import safe_open

from common import finish

NAMES = {
    "network": "kasoku.models.cifarnet",
    "residual": "kasoku.models.resnet18",
    "digits": "kasoku.data.digits",
    "cifar10": "kasoku.data.cifar10",
    "folder": "kasoku.data.folder",
    "pack": "kasoku.data.shards",
    "augment": "kasoku.data.Augment",
    "mix": "kasoku.data.Mix",
    "low resolution": "kasoku.data.LowResolution",
    "grow": "kasoku.data.GrowBatch",
    "overlap": "kasoku.distributed.Overlap",
    "recalibrate": "kasoku.distributed.Recalibrate",
    "saved memory": "kasoku.memory.SavedMemory",
    "muon": "kasoku.optim.muon",
    "lars": "kasoku.optim.lars",
    "sgd": "kasoku.optim.sgd",
    "ema": "kasoku.optim.EMA",
    "clip": "kasoku.optim.Clip",
    "loss": "kasoku.optim.cross_entropy",
    "linear": "kasoku.core.Linear",
    "step": "kasoku.core.StepDecay",
}
KASOKU = [sys.executable, "-m", "kasoku"]
STEPS = 50
DIGITS_A_BATCH, DIGIT_BATCHES = 64, 22  # an epoch of the digits
PHOTOS_A_CLASS, PHOTO_BATCH = 80, 16
PHOTO_BATCHES = 3 * PHOTOS_A_CLASS // PHOTO_BATCH
CIFAR_BATCH, CIFAR_IMAGES = 100, 50_000


def use(name: str, **settings: object) -> dict[str, object]:
    """A table of a recipe."""
    return {"use": NAMES[name], **settings}


MUON = use("muon", lr=0.05, momentum=0.8, rest={"bias_lr": 2.0, "head_lr": 20.0})
SGD = use("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4)
CROP = use("augment", crop="random_resized", flip="random", jitter=0.1)


@dataclass(frozen=True)
class Case:
    """One training: its recipe, how it is started, and which folders of the run hold weights."""

    recipe: dict[str, object]
    command: tuple[str, ...] = ("train",)
    options: tuple[str, ...] = ()
    runs: tuple[str, ...] = (".",)
    needs: str = ""  # a folder under $KASOKU_DATA
    techniques: tuple[dict[str, object], ...] = field(default=())

    def document(self, folders: dict[str, str]) -> str:
        """The recipe's TOML; `root` of its data is one of `folders`."""
        data = dict(self.recipe["data"])  # type: ignore[call-overload]
        if "root" in data:
            data["root"] = folders[data["root"]]
        common = {
            "loss": use("loss", smoothing=0.1),
            "device": {"kind": "cpu", "precision": "fp32", "threads": 1},
            "evaluate": {"every": 1000.0},
            "schedule": use("linear", warmup=0.5 / self.recipe["epochs"]),  # half an epoch
        }
        return tomli_w.dumps(common | self.recipe | {"data": data, "techniques": list(self.techniques)})


def on_digits(**more: object) -> dict[str, object]:
    """A recipe for 50 steps on the digits."""
    recipe: dict[str, object] = {
        "epochs": STEPS / DIGIT_BATCHES,
        "batch": DIGITS_A_BATCH,
        "model": use("network", widths=[16, 32]),
        "data": use("digits"),
        "optimizer": MUON,
    }
    return recipe | more


def on_photos(source: str = "folder", **more: object) -> dict[str, object]:
    """A recipe for 50 steps on JPEGs, in a folder or in a pack."""
    recipe: dict[str, object] = {
        "epochs": STEPS / PHOTO_BATCHES,
        "batch": PHOTO_BATCH,
        "model": use("network", widths=[16, 32]),
        "data": use(source, root=source, size=32),
        "optimizer": SGD,
    }
    return recipe | more


SHIFT = use("augment", translate=1)
CASES = {
    "digits": Case(on_digits(), techniques=(SHIFT, use("ema", decay=0.9), use("clip", norm=1.0))),
    "cifar10": Case(
        {
            "epochs": STEPS * CIFAR_BATCH / CIFAR_IMAGES,
            "batch": CIFAR_BATCH,
            "model": use("network", widths=[32, 64, 64]),
            "data": use("cifar10", root="cifar10"),
            "optimizer": MUON,
            "schedule": use("linear", epochs=0.1),
            "evaluate": {"every": 1000.0, "batch": 1000},
        },
        techniques=(
            use("augment", flip="alternating", translate=2, jitter=0.1),
            use("low resolution", side=24, until=0.5),
        ),
        needs="cifar10",
    ),
    "folder": Case(on_photos(), techniques=(CROP,)),
    "pack": Case(on_photos("pack"), techniques=(CROP,)),
    "mix": Case(on_photos(), techniques=(CROP, use("mix"))),
    "growing_batch": Case(
        on_digits(epochs=3 + 6 / (DIGIT_BATCHES // 2)),
        techniques=(SHIFT, use("grow", schedule=use("step", milestones=[1.0], gamma=2.0))),
    ),
    "two_ranks_overlap": Case(
        on_digits(norm_batch=16, optimizer=SGD),
        command=("launch", "local"),
        options=("--gpus-per-node", "2"),
        techniques=(SHIFT, use("overlap")),
    ),
    "virtual_ranks_lars": Case(
        on_digits(norm_batch=8, optimizer=use("lars", lr=2.0, momentum=0.9, trust={"eta": 0.02})),
        techniques=(SHIFT, use("recalibrate")),
    ),
    "saved_memory": Case(
        on_photos(model=use("residual")),
        techniques=(CROP, use("saved memory", factor=1.5, lossless=True)),
    ),
    "members_in_memory": Case(on_digits(), ("train",), ("--members", "2"), ("member-1", "member-2")),
    "members_of_files": Case(on_photos(), ("train",), ("--members", "2"), ("member-1", "member-2"), techniques=(CROP,)),
}


def photos(folder: Path) -> None:
    """Three classes of JPEGs of many sizes, drawn: smooth colours and a little noise, some gray."""
    random = np.random.default_rng(0)
    for part, count in (("train", PHOTOS_A_CLASS), ("val", 8)):
        for label in range(3):
            place = folder / part / f"class-{label}"
            place.mkdir(parents=True)
            for i in range(count):
                coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                coarse[..., label] |= 128
                size = tuple(int(n) for n in random.integers(24, 120, 2))
                pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
                noise = random.integers(0, 16, pixels.shape, dtype=np.uint8)
                image = Image.fromarray(np.minimum(pixels, 239) + noise)
                (image.convert("L") if i % 10 == 9 else image).save(place / f"{i:03}.jpg", quality=90)


def cifar10(source: Path, folder: Path) -> None:
    """The official binary files from mosaics of 50 columns and 20 rows."""

    def records(part: str) -> np.ndarray:
        found = []
        for path in sorted(source.glob(f"{part}_*.webp")):
            mosaic = np.asarray(Image.open(path).convert("RGB"))
            tiles = mosaic.reshape(-1, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3 * 32 * 32)
            labels = np.fromfile(path.with_suffix(".labels"), np.uint8)
            found.append(np.concatenate([labels[:, None], tiles], axis=1))
        return np.concatenate(found)

    home = folder / "cifar-10-batches-bin"
    home.mkdir(parents=True)
    for number, part in enumerate(np.split(records("train"), 5), start=1):
        part.tofile(home / f"data_batch_{number}.bin")
    records("test").tofile(home / "test_batch.bin")
    (home / "batches.meta.txt").write_text((source / "classes.txt").read_text())


def digest(path: Path) -> str:
    """sha256 of all weights and buffers, with their names."""
    found = hashlib.sha256()
    with safe_open(path, "np") as file:
        for name in sorted(file.keys()):
            array = file.get_tensor(name)
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def kasoku(arguments: list[str], cache: Path) -> None:
    """Runs a command to its end, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([*KASOKU, *arguments], env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"kasoku {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def steps(run: Path) -> int:
    """How many steps a run's metrics tell of."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return max(line["step"] for line in lines if "step" in line)


def train(name: str, case: Case, folders: dict[str, str], home: Path) -> str:
    """Trains a case; returns its digest."""
    recipe, out = home / f"{name}.toml", home / name
    recipe.write_text(case.document(folders))
    start = time.perf_counter()
    kasoku([*case.command, str(recipe), *case.options, "--quiet", "--out", str(out)], home / "cache")
    runs = [out / run for run in case.runs]
    for run in runs:
        if steps(run) != STEPS:
            sys.exit(f"{name}: {steps(run)} steps, {STEPS} are wanted")
    found = [digest(run / "model.safetensors") for run in runs]
    whole = found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()
    print(f"{name:20} {whole[:16]}  {time.perf_counter() - start:5.1f} s", flush=True)
    return whole


def prepared(home: Path, wanted: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The folders of images, made under `home`; and the cases that must be skipped, with the reason."""
    folders = {name: str(home / name) for name in ("folder", "pack", "cifar10")}
    photos(home / "folder")
    kasoku(["pack", folders["folder"], folders["pack"], "--side", "40", "--workers", "1", "--quiet"], home / "cache")
    real, skipped = os.environ.get("KASOKU_DATA", ""), {}
    for name in wanted:
        needs = CASES[name].needs
        if needs and not (real and (Path(real) / needs).is_dir()):
            skipped[name] = f"KASOKU_DATA names no folder with {needs}"
    if "cifar10" in wanted and "cifar10" not in skipped:
        cifar10(Path(real) / "cifar10", home / "cifar10")
    return folders, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--at-once", type=int, default=2, help="trainings at once (default: 2)")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}: one of {', '.join(CASES)}")
    wanted = options.cases or list(CASES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        home = Path(folder)
        folders, skipped = prepared(home, wanted)
        for name, reason in skipped.items():
            print(f"{name:20} skipped: {reason}")
        left = [name for name in wanted if name not in skipped]

        def make(name: str) -> str:
            return train(name, CASES[name], folders, home / "runs")

        (home / "runs").mkdir()
        digests = dict(zip(left, pool.map(make, left), strict=True))
    finish("bits", {"steps": STEPS, "threads": 1}, {"digests": digests, "skipped": skipped})


if __name__ == "__main__":
    main()
