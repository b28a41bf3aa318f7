"""`save.upload`: the results of a finished training at an address, and what happens when that takes nothing."""

import json
import signal
import sys
from pathlib import Path

import pytest

import kasoku
from helpers.started import RECIPE, forked
from helpers.stores import object_store
from kasoku.cli import main
from kasoku.data.remote import store
from kasoku.training.control import Request

SHORT = [
    part
    for each in ("epochs=0.23", "evaluate.target=0", "schedule.warmup=0", "device.threads=1", "device.kind=cpu")
    for part in ("--set", each)
]
ALL = {"model.safetensors", "result.json", "recipe.toml", "metrics.jsonl"}


@pytest.fixture(autouse=True)
def _waits_are_short(monkeypatch):
    monkeypatch.setattr(store, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(store, "_PATIENCE_S", 1.0)


@pytest.fixture
def memory(monkeypatch):
    """The class of fsspec's file system in memory, at memory://, empty."""
    spec = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is missing")
    monkeypatch.setattr(spec.MemoryFileSystem, "store", {})
    return spec.MemoryFileSystem


def train(out: Path, *more: str, recipe: Path = RECIPE, code: int = 0) -> None:
    settings = [*SHORT, "--set", "save.upload=memory://results/digits", "--quiet"]
    assert main(["train", str(recipe), *settings, "--out", str(out), *more]) == code


def stored(memory) -> dict[str, bytes]:
    return {path.removeprefix("/results/digits/"): file.getvalue() for path, file in memory.store.items()}


def results(run: Path, *more: str) -> dict[str, bytes]:
    return {f"{run.name}/{name}": (run / name).read_bytes() for name in (*ALL, *more)}


def test_the_results_are_uploaded_at_the_end_and_nothing_else(memory, tmp_path, capsys):
    train(tmp_path / "run")
    assert stored(memory) == results(tmp_path / "run")
    assert capsys.readouterr().err == "kasoku: 4 files of results are in memory://results/digits/run\n"


def test_a_stopped_training_uploads_nothing(memory, tmp_path, monkeypatch):
    stop = Request(save=False, stop=signal.SIGTERM)
    monkeypatch.setattr("kasoku.training.trainer.Trainer.own_request", lambda _: stop)
    train(tmp_path / "run", code=75)
    assert not memory.store


def test_a_failed_upload_keeps_the_run_and_continue_uploads_again(memory, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(memory, "put_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not yours")))
        train(run, code=2)
    said = capsys.readouterr().err
    assert said == (
        f"kasoku: memory://results/digits/run/model.safetensors: access refused (PermissionError not yours); not "
        f"uploaded, but whole in {run}; go on with: kasoku train --resume {run}\n"
    )
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert json.loads((run / "result.json").read_text())["steps"] == 5
    assert not memory.store
    (run / "report.html").write_text("a page")
    train(run, "--continue")
    assert stored(memory) == results(run, "report.html")
    assert {file: file.read_bytes() for file in before} == before
    memory.store.clear()
    assert main(["train", "--resume", str(run), "--set", "save.upload=memory://results/digits/other"]) == 0
    assert stored(memory).keys() == {f"other/run/{name}" for name in (*ALL, "report.html")}


def test_an_address_that_is_short_of_bytes_is_no_success(memory, tmp_path, monkeypatch, capsys):
    real = memory.put_file

    def half(self, lpath, rpath, **more):
        real(self, lpath, rpath, **more)
        self.store[rpath].truncate(10)

    monkeypatch.setattr(memory, "put_file", half)
    train(tmp_path / "run", code=2)
    assert "no answer for 1 s (OSError 10 bytes arrived, not " in capsys.readouterr().err


def test_the_members_of_an_ensemble_are_uploaded_with_its_scores(memory, tmp_path):
    run = tmp_path / "run"
    for more in ([], ["--continue"]):
        memory.store.clear()
        train(run, "--members", "2", *more)
        wanted = {f"run/member-{i}/{name}" for i in (1, 2) for name in ALL} | {"run/ensemble.json"}
        assert stored(memory).keys() == wanted
        assert all((tmp_path / name).read_bytes() == data for name, data in stored(memory).items())


def test_train_from_python_uploads_as_the_command(memory, tmp_path):
    settings = [each for each in SHORT if each != "--set"]
    recipe = kasoku.load_recipe(RECIPE, [*settings, "save.upload=memory://results/digits"])
    for resume in (False, True):
        memory.store.clear()
        kasoku.train(recipe, tmp_path / "run", quiet=True, resume=resume)
        assert stored(memory) == results(tmp_path / "run")


def test_without_a_run_folder_a_line_says_that_nothing_is_sent(memory, capsys):
    settings = [each for each in SHORT if each != "--set"]
    kasoku.train(kasoku.load_recipe(RECIPE, settings), quiet=True)
    line = "kasoku: Track and save.upload send nothing without a run folder: give out, a folder\n"
    assert line not in capsys.readouterr().err
    kasoku.train(kasoku.load_recipe(RECIPE, [*settings, "save.upload=memory://results"]), quiet=True)
    assert capsys.readouterr().err.count(line) == 1
    assert not memory.store
    track = "techniques=[{use = 'kasoku.tracking.Track', to = 'tensorboard'}]"
    kasoku.train(kasoku.load_recipe(RECIPE, [*settings, track]), quiet=True)
    assert capsys.readouterr().err.count(line) == 1


def test_a_folder_for_model_hubs_holds_no_password(memory, tmp_path):
    train(tmp_path / "run", "--set", "save.upload=memory://me:secret@results")
    assert "me:secret@" in (tmp_path / "run" / "recipe.toml").read_text()
    assert main(["export", str(tmp_path / "run"), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    assert not [file for file in (tmp_path / "hub").iterdir() if b"secret" in file.read_bytes()]
    assert 'upload = "memory://results"' in (tmp_path / "hub" / "recipe.toml").read_text()


@pytest.mark.parametrize("address", ["runs", "/runs", "file:///runs", "local:///runs", "s3"])
def test_an_upload_into_a_folder_is_refused(address, tmp_path, capsys):
    pytest.importorskip("fsspec", reason="fsspec is missing")
    run = tmp_path / "run"
    assert main(["train", str(RECIPE), "--set", f"save.upload={address}", "--out", str(run)]) == 2
    assert f"upload={address}: an address is wanted, such as s3://bucket/runs" in capsys.readouterr().err
    assert not run.exists()


def test_a_missing_package_is_told_before_the_training(tmp_path, monkeypatch, capsys):
    registry = pytest.importorskip("fsspec.registry", reason="fsspec is missing")
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "registry", {})
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert main(["train", str(RECIPE), "--set", "save.upload=s3://bucket/x", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kasoku: save.upload=s3://bucket/x: ")
    assert said.endswith("; run: pip install 'kasoku[s3]'\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.extras
@pytest.mark.process
@pytest.mark.parametrize("protocol", ["s3", "webhdfs"])
def test_two_ranks_upload_once_to_a_server(protocol, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with object_store(protocol, monkeypatch) as site:
        site.files = {}
        command = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", *SHORT, "--quiet"]
        said = forked([*command, "--set", f"save.upload={site.root}/runs", "--out", str(run)])
        assert site.files == {f"runs/{name}": data for name, data in results(run).items()}
        assert sorted(set(site.written)) == sorted(site.files)
        assert len(site.written) == len(site.files) * (1 if protocol == "s3" else 2)  # CREATE and APPEND
        assert said == f"kasoku: 4 files of results are in {site.root}/runs/run\n"
        site.files, site.status = {}, 403
        said = forked([*command, "--continue", "--out", str(run)], code=2)
        assert said.splitlines()[-1].endswith(
            f"not uploaded, but whole in {run}; go on with: kasoku train --resume {run}"
        )
        site.status = 0
        forked([*command, "--continue", "--out", str(run)])
        assert site.files == {f"runs/{name}": data for name, data in results(run).items()}
