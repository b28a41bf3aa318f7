"""Which sizes tuning tries of a recipe, on which ranks; and what it says of a rank that fails."""

import json
import tomllib
from functools import wraps
from pathlib import Path

import pytest
import torch

from helpers.photos import coloured_photos
from helpers.started import started
from helpers.tuning import MLPERF, POINTS, SMALL, planted
from kasoku.cli import main
from kasoku.commands import tune as tuning
from kasoku.config import from_folder as photos_of
from kasoku.config import recipe as recipes
from kasoku.data.datasets import tables
from kasoku.training import auto_batch as sizing

IMAGENET = 1_281_167


def mlperf(batch: int) -> recipes.Recipe:
    return recipes.load(MLPERF, [f"batch={batch}"])


# ---- which sizes


def test_tuning_begins_at_a_size_that_ranks_can_share_within_the_points():
    assert sizing._begin(mlperf, 1632, 32) == 1632
    assert sizing._begin(mlperf, 1632, 256) == 1792, "1,536 lies below the recipe's points"
    assert sizing._begin(mlperf, 4096, 3 * 32) == 4032
    assert sizing._begin(mlperf, 8, 32) == 32


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((0, 0), (1632, 67840)),
        ((1000, 8192), (1632, 8192)),
        ((1000, 100_000), (1632, 67840)),
        ((2000, 3000), (2016, 2976)),
    ],
)
def test_sizes_are_cut_off_where_the_points_end_and_epochs_follow_them(asked, found):
    for begin in (1632, 4096):
        assert sizing.limits(mlperf, asked, images=IMAGENET, multiple=32, begin=begin, few=8) == found
    curve = sizing.curve(mlperf, *found)
    assert curve[0] == (found[0], mlperf(found[0]).epochs)
    assert curve[-1] == (found[1], mlperf(found[1]).epochs)


def test_the_largest_size_that_grows_within_the_images_is_found_exactly(small):
    grow = "techniques=[{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[1], gamma=2}}]"

    def at(batch: int) -> recipes.Recipe:
        return recipes.load(small, [f"batch={batch}", "epochs=2", grow])

    least, most = sizing.limits(at, (0, 0), images=1437, multiple=1, begin=64, few=8)
    assert (least, most) == (8, 718)


def test_a_range_that_is_cut_off_is_told_in_one_line(small, monkeypatch, capsys):
    asked = planted(monkeypatch, 64)
    small.write_text(SMALL + POINTS)
    assert main(["tune", str(small), "--range", "8:512"]) == 0
    assert (asked[0]["least"], asked[0]["most"]) == (32, 128)
    assert asked[0]["strategy"].epochs[0] == (32, 1.0)
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "of batches from 8 to 512 those from 32 to 128 can be shared by the ranks and trained with" in told.err
    assert "reference_batch" not in told.out, "the points say what the rates are"


def test_without_its_points_the_rates_are_those_of_the_recipes_own_batch(small, monkeypatch, capsys):
    planted(monkeypatch, 128)
    small.write_text(SMALL + POINTS)
    assert main(["tune", str(small), "--set", "points=[]"]) == 0
    told = capsys.readouterr().out
    assert "--set batch=128 --set reference_batch=64" in told
    assert "x 2 (linear, from 64): optimizer.lr 0.2" in " ".join(told.split())


# ---- before a training


def test_photos_are_tuned_from_their_rates_batch_and_listed_once(tmp_path, monkeypatch):
    photos, looks = coloured_photos(tmp_path / "photos"), []
    folder = tables.folder
    looked = wraps(folder)(lambda root, size: looks.append(root) or folder(root, size))
    monkeypatch.setattr(tables, "folder", looked)
    asked = planted(monkeypatch, 16)
    out = tmp_path / "run"
    settings = ["--set", "batch=auto", "--set", "epochs=1", "--set", "device.threads=1", "--set", "data.size=32"]
    given = ["train", "--data", str(photos), *settings, "--quiet", "--out", str(out)]
    assert main(given) == 0
    written = tomllib.loads((out / "recipe.toml").read_text())
    assert (written["batch"], written["reference_batch"], written["origin"]) == (16, 8, "tuned by TimeToTarget")
    assert len(looks) == len(asked) == 1
    for setting in ("batch=16", 'model={use="kasoku.models.resnet18"}'):
        assert photos_of.recipe_for(photos, None, settings=[setting]).reference_batch == 0


def test_what_was_compiled_for_tuning_is_forgotten_before_the_training(auto, tmp_path, monkeypatch):
    resets: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    planted(monkeypatch, 96)
    assert main(["train", str(auto), "--quiet", "--out", str(tmp_path / "plain")]) == 0
    assert not resets
    compiled = ["--set", "techniques=[{use='kasoku.device.Compile', backend='eager'}]"]
    assert main(["train", str(auto), "--quiet", "--out", str(tmp_path / "compiled"), *compiled]) == 0
    assert resets == [1]


# ---- ranks


def test_all_gpus_tune_unless_the_recipe_wants_the_cpu(auto, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for kind, used in (("auto", 4), ("cpu", 1)):
        assert tuning._gpus(tuning.TuneArguments(recipe=auto, set=(f"device.kind={kind}",))) == used


def ended(arguments: list[str], codes: tuple[int, ...]) -> list[str]:
    """What two ranks said, which end with these exit codes."""
    ranks = started(arguments, 2)
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert tuple(rank.returncode for rank in ranks) == codes, said
    return said


@pytest.mark.process
def test_two_ranks_tune_and_train_with_the_batch_they_found(auto, tmp_path):
    out = tmp_path / "run"
    ended(["train", str(auto), "--out", str(out), "--set", "epochs=2"], (0, 0))
    told, written = json.loads((out / "tuning.json").read_text()), tomllib.loads((out / "recipe.toml").read_text())
    assert written["batch"] == told["chosen"]
    assert written["batch"] % 2 == 0
    assert json.loads((out / "result.json").read_text())["epochs"] == 2


def failing(tmp_path: Path, name: str, condition: str) -> str:
    """A recipe whose network raises in training where the condition of rank and step holds."""
    (tmp_path / f"{name}.py").write_text(
        "import os\nimport torch\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes: int = 10):\n        super().__init__()\n"
        "        self.head = torch.nn.Linear(64, num_classes)\n        self.step = 0\n\n"
        "    def forward(self, x):\n        rank = int(os.environ.get('RANK', '0'))\n"
        "        if self.training and x.device.type != 'meta':\n            self.step += 1\n"
        f"            if {condition}:\n                raise RuntimeError('planted')\n"
        "        return self.head(x.flatten(1))\n"
    )
    path = tmp_path / f"{name}.toml"
    path.write_text(SMALL.replace('use = "kasoku.models.cifarnet", widths = [8, 16]', f'use = "{name}.Net"'))
    return str(path)


@pytest.mark.process
@pytest.mark.parametrize("condition", ["True", "rank == 1"])
def test_what_a_rank_cannot_do_at_all_is_told_once(tmp_path, condition):
    recipe = failing(tmp_path, "fails_at_once", condition)
    said = "".join(ended(["tune", recipe], (2, 2)))
    lines = [line for line in said.splitlines() if line.startswith("kasoku: ")]
    assert len(lines) == 1, said
    failed = "rank 1: " if condition == "rank == 1" else ""
    assert lines[0].startswith(f"kasoku: {failed}no step can be made (RuntimeError: planted)")
