"""The recipes and benchmarks of document 004: the rule scales the rate, the search fits, the other program is right."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kasoku.config import recipe as recipes
from kasoku.data.decode.decode import decode
from kasoku.tune.search_space import read_space

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDER = BENCHMARKS.parent / "recipes" / "documents"
sys.path.append(str(BENCHMARKS))


@pytest.fixture
def program(monkeypatch):
    """The other program; kasoku can be imported again after the test."""
    monkeypatch.setitem(sys.modules, "kasoku", sys.modules["kasoku"])
    return importlib.reload(importlib.import_module("application_program"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("004_*.toml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_document_written_back_is_equal(path):
    recipe = recipes.load(path)
    assert recipes.from_document(tomllib.loads(recipes.dumps(recipe))) == recipe


def test_the_rate_grows_with_the_batch_unless_it_is_told_not_to():
    path = FOLDER / "004_scaling.toml"
    assert recipes.load(path).rate_scale == 1
    assert recipes.load(path, ["batch=4096"]).rate_scale == 16
    assert recipes.load(path, ["batch=4096", "reference_batch=0"]).rate_scale == 1


def test_the_search_chooses_among_settings_of_its_recipe():
    space = read_space(BENCHMARKS / "search_space.toml")
    assert len(space) == 4
    for path, values in space.items():
        for value in values.examples:
            recipes.load(FOLDER / "004_search.toml", [f"{path}={value}"])


@pytest.mark.parametrize("size", [(224, 224), (500, 375), (90, 301), (40, 61)])
def test_the_other_program_sees_the_pixels_that_predict_sees(size, tmp_path, program):
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), np.uint8)
    path = tmp_path / "photo.jpg"
    Image.fromarray(noise).resize(size).save(path)
    ours_HWC = decode(str(path), 37)
    top, left = (ours_HWC.shape[0] - 32) // 2, (ours_HWC.shape[1] - 32) // 2
    ours_CHW = ours_HWC[top : top + 32, left : left + 32].transpose(2, 0, 1) / np.float32(255)
    np.testing.assert_array_equal(program.pixels(str(path), 37, 32, 32), ours_CHW)


@pytest.mark.process
def test_importing_kasoku_fails_in_the_other_program():
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import application_program; import kasoku"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "import of kasoku halted" in done.stderr


@pytest.mark.process
def test_a_command_is_given_the_folder_of_benchmarks(tmp_path, monkeypatch):
    reproduce = importlib.import_module("reproduce")
    monkeypatch.setattr("claims.CHECKOUT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "say.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    done = reproduce._outcome(tmp_path / "out", "benchmarks/say.py {benchmarks}/space.toml {out}")
    assert done["result"] == [str(tmp_path / "benchmarks" / "space.toml"), str(tmp_path / "out")]
    assert json.loads((tmp_path / "out.json").read_text())["result"] == done["result"]
