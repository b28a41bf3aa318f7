"""Does another program, without kasoku, give the answers of `kasoku predict` with the exported network?

    python benchmarks/application.py [--epochs E] [--photos N]

A network is trained on the photos of $KASOKU_DATA/imagenette224 (recipe documents/004_application), exported as ONNX
and for torch.export, and asked for the likeliest class of N test photos: by `kasoku predict`, and by
application_program.py, a process in which importing kasoku fails, which loads the file with onnxruntime or
torch.export and photos with Pillow.
onnx_same, torch_export_same: the share of photos with the same likeliest class. ..._apart: the largest difference of
its probability; the CSV of `kasoku predict` has four digits.
Result: records/documents/004.json. Why it matters: [004]'s cycle ends when the model is in an application.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from common import finish
from kasoku.core import InputError

FORMATS = {"onnx": ("onnx", "onnx"), "torch_export": ("torch-export", "pt2")}  # by key: --format, ending
PROGRAM = Path(__file__).with_name("application_program.py")


def said(*words: str) -> str:
    """What a Python command prints."""
    return subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, timeout=3000).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--photos", type=int, default=600)
    arguments = parser.parse_args()
    data = os.environ.get("KASOKU_DATA")
    if not data:
        raise InputError("application.py: set KASOKU_DATA to the folder of imagenette224/")
    photos = sorted(map(str, (Path(data) / "imagenette224" / "val").glob("*/*")))
    photos = sorted(random.Random(0).sample(photos, min(arguments.photos, len(photos))))
    with tempfile.TemporaryDirectory() as home:
        run, table = f"{home}/run", Path(home) / "predicted.csv"
        settings = ["--set", f"epochs={arguments.epochs:g}", "--out", run, "--quiet"]
        said("-m", "kasoku", "train", "documents/004_application", *settings)
        said("-m", "kasoku", "predict", run, *photos, "--out", str(table))
        rows = {row["image"]: row for row in csv.DictReader(table.read_text().splitlines())}
        figures: dict[str, object] = {"photos": len(photos)}
        figures["top1"] = json.loads(Path(run, "result.json").read_text())["top1"]
        for key, (form, ending) in FORMATS.items():
            file = f"{home}/network.{ending}"
            said("-m", "kasoku", "export", run, "--format", form, "--out", file)
            answers = json.loads(said(str(PROGRAM), file, *photos).splitlines()[-1])
            same = sum(rows[photo]["class_1"] == name for photo, (name, _) in answers.items())
            apart = [abs(float(rows[photo]["probability_1"]) - share) for photo, (_, share) in answers.items()]
            figures |= {f"{key}_same": same / len(photos), f"{key}_apart": round(max(apart), 4)}
    finish("application", {"epochs": arguments.epochs, "photos": arguments.photos}, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
