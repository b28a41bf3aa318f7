"""Members of an ensemble: how they differ, what they free, and that they can be stopped."""

import json
import signal
import time
import weakref
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.forked import Forked
from helpers.photos import photos_command
from helpers.started import clean
from kasoku.cli import main
from kasoku.training import ensemble

DIGITS = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"
SHORT = ["--set", "epochs=2", "--set", "schedule.epochs=2", "--set", "evaluate.target=0", "--set", "schedule.warmup=0"]
SHORT += ["--set", "device.threads=1"]
SMALL = ["--set", "model={use='kasoku.models.cifarnet', widths=[8, 8]}"]


def test_members_differ_by_seed_and_make_an_ensemble(tmp_path, capsys):
    out = tmp_path / "ensemble"
    assert main(["train", str(DIGITS), *SHORT, "--members", "2", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert "ensemble of 2" in table
    first, second = (load_file(out / f"member-{i}" / "model.safetensors") for i in (1, 2))
    assert not all(first[name].equal(second[name]) for name in first)
    alone = tmp_path / "alone"
    assert main(["train", str(DIGITS), *SHORT, "--set", "seed=1", "--quiet", "--out", str(alone)]) == 0
    wanted = load_file(alone / "model.safetensors")
    assert all(second[name].equal(wanted[name]) for name in wanted)
    capsys.readouterr()
    assert main(["eval", str(out)]) == 0
    assert "ensemble of 2" in capsys.readouterr().out


def test_an_ensemble_that_is_finished_says_so_and_its_report_lies_in_its_folder(tmp_path, capsys, monkeypatch):
    pytest.importorskip("plotly")
    out = tmp_path / "ensemble"
    assert main(["train", str(DIGITS), *SHORT, "--members", "2", "--quiet", "--out", str(out)]) == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 0
    shown, err = capsys.readouterr()
    assert shown == ""
    assert err.startswith(f"kasoku: {out}: 2 members, the first finished: 2 epochs, accuracy ")
    assert main(["train", "--resume", str(out), "--dry-run"]) == 0
    assert "epochs" in capsys.readouterr().out
    assert main(["train", "--resume", str(out), "--print"]) == 2
    assert "--print of an ensemble: one recipe is printed" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "report.html")
    assert main(["report", str(out), str(out / "member-1")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report.html"


def test_a_member_of_another_version_is_not_resumed(tmp_path, capsys):
    out = tmp_path / "ensemble"
    assert main(["train", str(DIGITS), *SHORT, "--members", "2", "--quiet", "--out", str(out)]) == 0
    recipe = out / "member-2" / "recipe.toml"
    recipe.write_text(recipe.read_text().partition("\n")[2])
    (recipe.parent / "manifest.json").unlink()
    assert main(["train", "--resume", str(out), "--quiet", "--set", "epochs=3", "--set", "schedule.epochs=3"]) == 2
    error = capsys.readouterr().err
    assert f"{recipe}: the first line is not " in error
    assert error.count("\n") == 1


def test_members_on_files_differ_in_any_setting_and_train_as_if_alone(tmp_path):
    out, alone = tmp_path / "ensemble", tmp_path / "alone"
    vary = [*SMALL, "--members", "2", "--vary", "optimizer.lr=0.05,0.02", "--vary", "batch=8,12"]
    vary += ["--vary", "techniques.0.crop=center,random_resized"]
    second = ["seed=1", "optimizer.lr=0.02", "batch=12", "techniques.0.crop=random_resized"]
    second = [*SMALL, *(word for setting in second for word in ("--set", setting))]
    assert main(photos_command(tmp_path, *vary, "--quiet", "--out", str(out))) == 0
    assert main(photos_command(tmp_path, *second, "--quiet", "--out", str(alone))) == 0
    ours, wanted = (load_file(run / "model.safetensors") for run in (out / "member-2", alone))
    assert all(ours[name].equal(wanted[name]) for name in wanted)
    ledger = json.loads((out / "member-2" / "ledger.json").read_text())
    assert sum(ledger["rows"].values()) == pytest.approx(ledger["wall_s"], abs=0.01)
    assert ledger["rows"]["other"] < 0.2 * ledger["wall_s"]


def test_a_member_that_has_ended_frees_its_images_and_weights(tmp_path, monkeypatch):
    fit, ended = ensemble.fit, []

    def fitted(training, run, **how):
        assert [held() for held in ended] == [None] * len(ended)
        result = fit(training, run, **how)
        loaders = training.job.plain_loader, training.test
        assert all(loader.executor.cache for loader in loaders)
        ended.extend(map(weakref.ref, (training.job.model, *(loader.executor for loader in loaders))))
        return result

    monkeypatch.setattr(ensemble, "fit", fitted)
    assert main(photos_command(tmp_path, *SMALL, "--members", "3", "--quiet", "--out", str(tmp_path / "run"))) == 0
    assert len(ended) == 9


@pytest.mark.process
def test_members_stopped_go_on_to_the_same_bits(tmp_path):
    more = [*SMALL, "--members", "2", "--quiet", "--set", "save.every_steps=1", "--set", "epochs=8"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(photos_command(tmp_path, *more, "--out", str(whole))) == 0
    process = Forked(photos_command(tmp_path, *more, "--out", str(parts)), clean())
    deadline = time.monotonic() + 60
    while len(list(parts.glob("member-2/checkpoints/step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert main(["train", "--resume", str(parts), "--quiet"]) == 0
    for member in ("member-1", "member-2"):
        a, b = (load_file(run / member / "model.safetensors") for run in (whole, parts))
        assert all(a[name].equal(b[name]) for name in a)
        assert json.loads((parts / member / "result.json").read_text())["stopped"] is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--members", "1"], "--members 1: at least 2"),
        (["--members", "3", "--vary", "optimizer.lr=0.1,0.2"], "2 values for 3 members"),
        (["--vary", "optimizer.lr=0.1,0.2"], "--vary without --members"),
        (["--members", "2", "--vary", "optimizer.rl=0.1,0.2"], "optimizer.rl: no such key"),
        (["--members", "2", "--vary", "data.seed=0,1"], "--vary of data: the members of an ensemble see the same data"),
        (["--members", "3", "--vary", "optimizer.lr=1", "--dry-run"], "1 values for 3 members"),
    ],
)
def test_members_that_cannot_be(options, line, tmp_path, capsys):
    assert main(["train", str(DIGITS), *options, "--quiet", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_varied_batch_takes_its_own_point(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    recipe = DIGITS.parent / "imagenet_resnet50_mlperf.toml"
    assert main(["train", str(recipe), "--members", "2", "--vary", "batch=4096,8192", "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "the point 4,096" in table
    assert "the point 8,192" in table
