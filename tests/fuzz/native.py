"""The C code under sanitizers: native.c is built with gcc (addresses, undefined behaviour) and clang (memory)."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
_SEEDS = 60
_PHOTOS = 20


def seeds(path: Path) -> None:
    """Writes JPEG files of all kinds, behind their lengths; with some photos where $KASOKU_DATA has them."""
    draw, noise = random.Random(0), np.random.default_rng(0)
    files = []
    for i in range(_SEEDS):
        width, height = draw.randint(1, 90), draw.randint(1, 90)
        shape = (height, width, 3) if i % 4 == 1 else (max(1, height // 8), max(1, width // 8), 3)
        image = Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)).resize((width, height))
        settings: dict[str, Any] = {"quality": draw.choice([20, 60, 90, 100]), "optimize": i % 7 == 0}
        settings |= {"progressive": i % 13 == 0, "restart_marker_blocks": draw.randint(1, 5) if i % 3 == 0 else 0}
        if i % 5 == 0:
            image = image.convert("L")
        else:
            settings["subsampling"] = draw.choice([0, 1, 2])
        image.save(out := io.BytesIO(), "JPEG", **settings)
        files.append(out.getvalue())
    photos = Path(os.environ.get("KASOKU_DATA", "/nowhere")) / "imagenette224" / "train"
    files += [file.read_bytes() for file in sorted(photos.glob("*/*.JPEG"))[:: 1700 // _PHOTOS][:_PHOTOS]]
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in files))


def _run(
    kind: str, compiler: str, sanitizers: str, folder: Path, *, seed: int, until: float, most: int, keep: Path
) -> dict[str, Any]:
    found = next(
        (name for name in (compiler, *(f"{compiler}-{n}" for n in range(21, 13, -1))) if shutil.which(name)), ""
    )
    program, last = folder / "native", folder / "last"
    flags = ["-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-Wno-psabi"]
    build = found and subprocess.run(
        [found, *flags, str(HERE / "native.c"), "-o", str(program), "-lm"], capture_output=True, text=True, check=False
    )
    if not build or build.returncode:
        why = f"{found}: {build.stderr.strip()[-200:]}" if build else f"no {compiler}"
        if compiler == "clang":
            return {"inputs": 0, "findings": 0, "skipped": why}
        print(f"{kind}: native.c is not built, so that no input was tried: {why}", file=sys.stderr)
        return {"inputs": 0, "findings": 1}
    seeds(folder / "seeds")
    seconds = round(min(max(until - time.monotonic(), 1), 10**6))
    words = [str(word) for word in (folder / "seeds", last, most, seconds, seed)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # leak detection needs ptrace
    done = subprocess.run([program, *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        data = last.read_bytes()
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{kind}-{seed}.jpg").write_bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])
        (keep / f"{kind}-{seed}.txt").write_text(done.stderr)
        print(f"{kind} --seed {seed}: exit {done.returncode}: {done.stderr[:2000]}", file=sys.stderr)
        return {"inputs": 0, "findings": 1}
    return {**json.loads(done.stdout), "findings": 0}


def addresses(folder: Path, **settings: Any) -> dict[str, Any]:
    """AddressSanitizer and UndefinedBehaviorSanitizer, without exemptions."""
    return _run("jpeg", "gcc", "address,undefined", folder, **settings)


def memory(folder: Path, **settings: Any) -> dict[str, Any]:
    """MemorySanitizer, which only clang has."""
    return _run("jpeg-memory", "clang", "memory", folder, **settings)


KINDS = {"jpeg": addresses, "jpeg-memory": memory}
