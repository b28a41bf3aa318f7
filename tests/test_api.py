"""What `import kasoku` gives: the names, when they are imported, and what the functions do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import kasoku
from kasoku.core import Threads
from kasoku.core.files import read_json
from kasoku.training.run_folder import load_recipe

RECIPE = Path(kasoku.__file__).parent / "recipes" / "digits_cnn_98.toml"
SHORT = ["epochs=1", "evaluate.every=1", "device.threads=1"]


def test_the_public_names_are_what_is_there():
    names = {name for name in dir(kasoku) if not name.startswith("_")}
    imported = {"TYPE_CHECKING", "import_module"}
    packages = {path.parent.name for path in Path(kasoku.__file__).parent.glob("*/__init__.py")}
    modules = {path.stem for path in Path(kasoku.__file__).parent.glob("*.py")}
    assert names - imported - packages - modules == set(kasoku.__all__)
    assert [type(getattr(kasoku, name)) for name in kasoku.__all__]
    with pytest.raises(AttributeError, match="module 'kasoku' has no attribute 'Jobb'"):
        _ = kasoku.Jobb


def test_they_are_the_names_of_the_packages():
    from kasoku import core

    assert all(getattr(kasoku, name) is getattr(core, name) for name in ("InputError", "Job", "Schedule", "Technique"))


@pytest.mark.process
@pytest.mark.timing
def test_import_kasoku_takes_no_torch_and_a_twentieth_of_a_core_second():
    code = "import time; t = time.process_time(); import kasoku, sys; print(time.process_time() - t, *sys.modules)"
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(5)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.05
    assert not {"torch", "numpy", "rich"} & set(runs[0])


def test_a_recipe_is_found_by_its_file_and_by_its_name(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE.read_text())
    named, file = (kasoku.load_recipe(recipe, ["seed=7"]) for recipe in ("digits_cnn_98", tmp_path / "mine.toml"))
    assert named == file
    assert named.seed == 7


def test_train_is_the_command_bit_for_bit(digits_run, tmp_path):
    recipe = kasoku.load_recipe(digits_run / "recipe.toml")
    result = kasoku.train(recipe, tmp_path / "run", quiet=True)
    assert load_recipe(tmp_path / "run") == recipe
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (digits_run / "model.safetensors").read_bytes()
    assert result.top1 == read_json(tmp_path / "run" / "result.json")["top1"]
    with pytest.raises(kasoku.InputError, match="holds a run already"):
        kasoku.train(recipe, tmp_path / "run", quiet=True)


def test_train_resumes_to_the_same_bits(tmp_path):
    recipe, run = kasoku.load_recipe("digits_cnn_98", [*SHORT, "save.every_steps=10"]), tmp_path / "run"
    kasoku.train(recipe, run, quiet=True)
    weights = (run / "model.safetensors").read_bytes()
    *_, before_last, last = sorted((run / "checkpoints").iterdir())
    assert before_last.name < last.name
    shutil.rmtree(last)
    (run / "model.safetensors").unlink()
    kasoku.train(recipe, run, resume=True, quiet=True)
    assert (run / "model.safetensors").read_bytes() == weights


def test_train_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kasoku.train(kasoku.load_recipe("digits_cnn_98", SHORT), quiet=True)
    assert result.top1 > 0.5
    assert [path for path in tmp_path.rglob("*") if "cache" not in path.parts] == []


def test_train_on_two_ranks_is_collective(tmp_path):
    recipe = kasoku.load_recipe("digits_cnn_98", [*SHORT, "norm_batch=32"])
    results = Threads(2).run(lambda comm: kasoku.train(recipe, tmp_path / "run", comm=comm, quiet=True))
    assert results[0].top1 == results[1].top1 > 0.5


def test_train_without_comm_among_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(kasoku.InputError, match=r"process group of 2 ranks: give comm=kasoku\.distributed\.TorchComm"):
        kasoku.train(kasoku.load_recipe("digits_cnn_98", SHORT), quiet=True)


def test_evaluate_gives_the_scores_of_the_training(digits_run):
    scores = kasoku.evaluate(digits_run)
    assert scores.top1 == pytest.approx(read_json(digits_run / "result.json")["best_top1"])
    assert scores.images == 360
    assert scores.top5 >= scores.top1
    one, twice = kasoku.evaluate(str(digits_run)), kasoku.evaluate([digits_run, digits_run])
    assert (twice.top1, twice.top5, twice.images) == (one.top1, one.top5, one.images)
    assert twice.loss == pytest.approx(one.loss, rel=1e-6)  # the mean of two logarithms is rounded


def test_predict_gives_classes_with_probabilities(digits_run, tmp_path):
    test = kasoku.load_recipe("digits_cnn_98").data().test
    for i in range(20):
        Image.fromarray(test.images_NHWC[i, ..., 0].numpy()).save(tmp_path / f"{i:02}.png")
    found = kasoku.predict(digits_run, tmp_path, top=3)
    assert list(found) == sorted(tmp_path.glob("*.png"))
    assert all(len(classes) == 3 for classes in found.values())
    assert all(1 >= a >= b >= c >= 0 for (_, a), (_, b), (_, c) in found.values())
    hits = [int(classes[0][0]) == label for classes, label in zip(found.values(), test.labels_N.tolist(), strict=False)]
    assert sum(hits) > 15
    everything = kasoku.predict(digits_run, [tmp_path / "00.png"], top=100)[tmp_path / "00.png"]
    assert sum(share for _, share in everything) == pytest.approx(1)


def test_bad_input_is_one_line(digits_run, tmp_path):
    for call, message in (
        (lambda: kasoku.load_recipe(tmp_path / "none.toml"), "none.toml"),
        (lambda: kasoku.load_recipe("digits_cnn_98", ["batch=0"]), "batch=0: at least 1; images"),
        (lambda: kasoku.evaluate(tmp_path), "no run there"),
        (lambda: kasoku.predict(digits_run, tmp_path / "none.png"), "no such file"),
    ):
        with pytest.raises(kasoku.InputError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_strangers_run_may_name_only_what_this_call_allows(digits_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(digits_run, tmp_path / "runs" / "stranger")
    (run / "evil.py").write_text("raise SystemExit('ran')")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace("kasoku.models.cifarnet", "runs.stranger.evil.f"))
    (run / "manifest.json").unlink()
    kasoku.load_recipe("digits_cnn_98")  # which lets recipes name modules in the current folder
    for call in (lambda: kasoku.evaluate(run), lambda: kasoku.predict(run, tmp_path)):
        with pytest.raises(kasoku.InputError, match=r"runs\.stranger\.evil\.f"):
            call()
    with pytest.raises(SystemExit, match="ran"):
        kasoku.evaluate(run, allow=["runs"])
    with pytest.raises(kasoku.InputError, match=r"runs\.stranger\.evil\.f"):
        kasoku.evaluate(run)


def test_train_resumes_only_the_runs_own_recipe_and_leaves_a_finished_run(digits_run, tmp_path):
    run = shutil.copytree(digits_run, tmp_path / "run")
    own = kasoku.load_recipe(run / "recipe.toml")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    other = kasoku.load_recipe(run / "recipe.toml", ["optimizer.lr=0.5"])
    with pytest.raises(
        kasoku.InputError, match=r"optimizer\.lr = 0\.05, this one 0\.5: that would be another training"
    ):
        kasoku.train(other, run, resume=True, quiet=True)
    result = kasoku.train(own, run, resume=True, quiet=True)
    assert result.top1 == read_json(run / "result.json")["top1"]
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    longer = kasoku.load_recipe(run / "recipe.toml", ["epochs=5", "schedule.epochs=5"])
    assert kasoku.train(longer, run, resume=True, quiet=True).epochs == 5
    assert load_recipe(run) == longer
