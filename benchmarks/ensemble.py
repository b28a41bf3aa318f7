"""What does an ensemble gain over its members, and has a submission of its predictions the error that eval counts?

    KASOKU_DATA=/data python benchmarks/ensemble.py [--members 4] [--seeds 3] [--epochs 40] [--out DIR]

cnn11 on photos of ten ImageNet classes (recipes/documents/001_photos.toml). Members are trained on two ranks by
`kasoku launch local`, each whole on one of them; an ensemble of another seed shares no member. The test photos are
then put into one folder under numbers that say nothing of their classes, and `kasoku predict --numbers` writes five
class numbers for each: those of the ILSVRC, from $KASOKU_DATA/imagenet_meta/map_clsloc.txt, or without it 1, 2, ...
members_top5_error, ensemble_top5_error: in percent, means over seeds; a member's is its own at the end of training.
gain_top5: the difference in points; gain_top5_low, gain_top5_high: its 95 % interval over seeds (Student's t), None for
one seed. The same of top-1 accuracy. error_by_members: top-5 error of the first 1, 2, ... members together.
submission_top5_error: of the submission; submission_off_by: points from eval's error, the most of all seeds.
submission_lines: of the last submission; parameters.images: the test photos.
With --out finished members stay, and the same command goes on.
Why it matters: [001], 13.89 % top-5 error of an ensemble's predictions for the unlabelled images of ILSVRC2012.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import finish
from kasoku.report.significance import interval
from kasoku.training.trained_run import score_runs

RECIPE = Path(__file__).parent.parent / "recipes" / "documents" / "001_photos.toml"


def kasoku(*words: object) -> None:
    """Runs a command, to its end."""
    command = [sys.executable, "-m", "kasoku", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)


def unlabelled(test: Path, folder: Path, numbers: dict[str, str]) -> list[str]:
    """Fills a folder with links to the test images, in random order; the class number of each, by their names."""
    images = sorted(test.glob("*/*"))
    random.Random(0).shuffle(images)
    folder.mkdir()
    for i, image in enumerate(images):
        (folder / f"test_{i + 1:08}{image.suffix}").symlink_to(image.resolve())
    return [numbers[image.parent.name] for image in images]


def train(out: Path, seed: int, asked: argparse.Namespace) -> list[Path]:
    """Trains an ensemble, whose members have the seeds from `seed` on; their run folders."""
    where = ["--gpus-per-node", asked.ranks, "--members", asked.members, "--out", out, "--continue", "--quiet"]
    settings = {"epochs": asked.epochs, "seed": seed, "device.kind": "cpu"}
    kasoku("launch", "local", RECIPE, *where, *(f"--set={path}={value}" for path, value in settings.items()))
    return sorted(out.glob("member-*"))


def submitted(out: Path, images: Path, truth: list[str], numbers: Path) -> tuple[float, int]:
    """Percent of the images whose class is not among the five of their line of the submission; the lines of it."""
    file = out / "submission.txt"
    kasoku("predict", out, images, "--numbers", numbers, "--out", file)
    lines = [line.split() for line in file.read_text().splitlines()]
    return 100 * statistics.mean(number not in five for number, five in zip(truth, lines, strict=False)), len(lines)


def ends(values: list[float]) -> dict[str, float | None]:
    """The ends of the 95 % interval of a mean; None of one value."""
    if len(values) < 2:
        return {"low": None, "high": None}
    _, low, high = interval(values)
    return {"low": round(low, 2), "high": round(high, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6), help="ensembles, at most 5")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2, help="processes that train members")
    parser.add_argument("--out", type=Path, help="the folder for the runs (default: a temporary one)")
    asked = parser.parse_args()
    data = Path(os.environ.get("KASOKU_DATA", ""))
    table, test = data / "imagenet_meta" / "map_clsloc.txt", data / "imagenette224" / "val"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        images = Path(own) / "test"
        if not table.is_file():
            classes = sorted(folder.name for folder in test.iterdir())
            table = Path(own) / "numbers.txt"
            table.write_text("".join(f"{name} {number}\n" for number, name in enumerate(classes, 1)))
        numbers = dict(line.split()[:2] for line in table.read_text().splitlines())  # a class, its number, its name
        truth = unlabelled(test, images, numbers)
        rows: list[dict[str, Any]] = []
        for seed in range(0, asked.seeds * asked.members, asked.members):
            out = (asked.out or Path(own)) / f"seed-{seed}"
            members = train(out, seed, asked)
            alone = [json.loads((run / "result.json").read_text()) for run in members]
            first = [score_runs(members[:k])[-1][1] for k in range(1, len(members) + 1)]
            whole = first[-1]
            error, lines = submitted(out, images, truth, table)
            row = {
                "members_top1": 100 * statistics.mean(run["top1"] for run in alone),
                "ensemble_top1": 100 * whole.top1,
                "members_top5_error": 100 - 100 * statistics.mean(run["top5"] for run in alone),
                "ensemble_top5_error": 100 - 100 * whole.top5,
                "submission_top5_error": error,
                "by_members": [100 - 100 * scores.top5 for scores in first],
            }
            rows.append(row)
            print(json.dumps({"seed": seed, **row}), flush=True)
    figures: dict[str, object] = {
        key: round(statistics.mean(row[key] for row in rows), 2) for key in rows[0] if key != "by_members"
    }
    gains = {
        "gain_top5": [row["members_top5_error"] - row["ensemble_top5_error"] for row in rows],
        "gain_top1": [row["ensemble_top1"] - row["members_top1"] for row in rows],
    }
    for name, values in gains.items():
        figures[name] = round(statistics.mean(values), 2)
        figures |= {f"{name}_{end}": value for end, value in ends(values).items()}
    means = [statistics.mean(errors) for errors in zip(*(row["by_members"] for row in rows), strict=True)]
    figures["error_by_members"] = [[k + 1, round(error, 2)] for k, error in enumerate(means)]
    apart = [row["submission_top5_error"] - row["ensemble_top5_error"] for row in rows]
    figures |= {"submission_off_by": round(max(map(abs, apart)), 3), "submission_lines": lines, "n": len(rows)}
    finish("ensemble", {**vars(asked), "out": str(asked.out), "images": len(truth)}, figures)


if __name__ == "__main__":
    main()
