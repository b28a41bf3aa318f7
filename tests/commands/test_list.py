"""`kasoku list NAME` shows the settings of whatever a recipe names; the recipes of kasoku are found by name."""

import tomllib
from pathlib import Path

import pytest

from kasoku.cli import main
from kasoku.config.recipe import dumps, load
from kasoku.config.shipped import RECIPES, locate


@pytest.fixture
def shown(capsys, monkeypatch):
    """The output of a command, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words: str) -> str:
        assert main([*words]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", ["EMA", "kasoku.optim.EMA"])
def test_the_settings_of_a_name_are_shown_with_type_default_and_range(shown, name):
    row = next(line for line in shown("list", name).splitlines() if line.startswith("decay"))
    assert row.split("  ", 1)[0] == "decay"
    assert "number" in row
    assert "= 0.999" in row
    assert "from 0 to below 1" in row


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resnet50", '"imagenet" | "cifar"'),
        ("cifar10", "root"),
        ("muon", "table: SGDSettings"),
        ("Cosine", "warmup"),
        ("recipe", "reference_batch"),
        ("evaluate", '"plain" | "mirror" | "crops"'),
        ("device", "hang_timeout_s"),
        ("Planned", "measure"),
        ("torch.nn.CrossEntropyLoss", "label_smoothing"),
    ],
)
def test_models_sources_rules_schedules_and_tables_have_settings(shown, name, wanted):
    assert wanted in shown("list", name)


def test_the_settings_of_a_technique_beside_you_are_shown(shown, tmp_path, monkeypatch):
    (tmp_path / "mine_listed.py").write_text(
        "from dataclasses import dataclass\nfrom kasoku.core import Technique\n"
        "@dataclass(frozen=True)\nclass Mine(Technique):\n"
        '    """Does it.\n\n    Args:\n        strength: how much, above 0.\n    """\n    strength: float = 2.0\n'
    )
    monkeypatch.chdir(tmp_path)
    assert "how much, above 0." in shown("list", "mine_listed.Mine")


@pytest.mark.parametrize(
    ("name", "nearest"), [("resnet5", "resnet50"), ("kasoku.models.resnet5", "resnet50"), ("recip", "recipe")]
)
def test_an_unknown_name_is_answered_with_the_nearest(capsys, name, nearest):
    assert main(["list", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"did you mean {nearest}?" in captured.err


def test_a_bare_name_is_a_recipe_of_ours_unless_the_folder_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits_cnn_98", "digits_cnn_98.toml"):
        assert locate(name) == RECIPES["digits_cnn_98"]
    own = tmp_path / "digits_cnn_98.toml"
    own.write_text(RECIPES["digits_cnn_98"].read_text().replace("batch = 64", "batch = 32"))
    for name in ("digits_cnn_98", "digits_cnn_98.toml"):
        assert load(name).batch == 32
    assert locate(Path("elsewhere/digits_cnn_98")) == Path("elsewhere/digits_cnn_98")


@pytest.mark.parametrize("words", ["train NAME --dry-run", "launch slurm NAME --gpus-per-node 2"])
def test_commands_take_a_recipe_by_name_and_name_the_nearest(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main(words.replace("NAME", "digits_cnn_98").split()) == 0
    capsys.readouterr()
    assert main(words.replace("NAME", "digits_cnn_9").split()) == 2
    assert "did you mean digits_cnn_98?" in capsys.readouterr().err


def test_print_gives_the_resolved_recipe_and_nothing_else(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["batch=16384", "seed=3"]
    words = ["train", "imagenet_resnet50_mlperf", "--print"]
    assert main([*words, *(word for setting in settings for word in ("--set", setting))]) == 0
    captured = capsys.readouterr()
    recipe = load(RECIPES["imagenet_resnet50_mlperf"], settings)
    assert captured.out == dumps(recipe)
    assert captured.err == ""
    assert "points" not in tomllib.loads(captured.out)  # the settings of this batch stand in their places
    assert not list(tmp_path.iterdir())


def test_every_recipe_is_in_the_package():
    assert "digits_cnn_98" in RECIPES
    root = Path(__file__).parents[2]
    names = [path.relative_to(root / "recipes").with_suffix("") for path in (root / "recipes").rglob("*.toml")]
    assert {str(name) for name in names if not name.name.isdecimal()} == set(RECIPES)  # 000.toml is no recipe
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kasoku"]
    assert {"recipes/*.toml", "recipes/documents/*.toml"} <= set(data)
