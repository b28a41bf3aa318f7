"""`kasoku train` end to end, on the embedded digits: what a user types, and what lies in the run folder after it."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import kasoku
from helpers.forked import Forked
from helpers.started import clean, forked
from kasoku.cli import main
from kasoku.core import InputError
from kasoku.report import StepBottleneck
from kasoku.training import metrics
from kasoku.training.run_folder import finished, load_recipe

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"
SHORT = ["--set", "epochs=3", "--set", "schedule.epochs=3", "--set", "schedule.warmup=1"]
SHORT += ["--set", "device.threads=1", "--quiet"]  # two threads gain nothing on images this small


def train(*arguments: str) -> int:
    return main(["train", *arguments])


def recipe_with_state(tmp_path: Path) -> Path:
    """The digits with accumulation and EMA: much of what a checkpoint must bring back."""
    path = tmp_path / "recipe.toml"
    average = '[[techniques]]\nuse = "kasoku.optim.EMA"\ndecay = 0.9\n'
    path.write_text(f"accumulate = 2\n{RECIPE.read_text()}\n{average}")
    return path


def weights(run: Path) -> dict[str, object]:
    return load_file(run / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(left[k].equal(right[k]) for k in left)


def steps_saved(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]


@pytest.mark.usefixtures("one_core")
def test_digits_reach_98_percent_and_the_run_folder_is_complete(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(str(RECIPE), "--out", str(out)) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["top1"] >= 0.98
    assert 0 < result["time_to_target_s"] <= result["seconds"]
    assert sum(result["seconds_by"].values()) == pytest.approx(result["seconds"], abs=0.05)
    rows = {"import", "data", "model", "compile", "forward", "backward", "evaluate", "save"}
    assert rows <= set(result["seconds_by"])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["test_top1"] == result["top1"]
    logged = [line for line in lines if "loss" in line]
    assert all(0 <= line["utilization"] <= 1 for line in logged)
    assert all(0 < line["memory_bytes"] <= line["memory_peak_bytes"] for line in logged)
    assert all(line.startswith(":::MLLOG {") for line in (out / "mlperf.log").read_text().splitlines())
    for name in ("recipe.toml", "environment.json", "data.json", "best.safetensors", "model.safetensors"):
        assert (out / name).stat().st_size > 0
    assert list((out / "checkpoints").glob("step-*"))
    shown = capsys.readouterr().out
    assert shown.startswith(json.loads((out / "environment.json").read_text())["chosen"] + "\n")
    assert "time to target" in shown
    assert str(out) in shown.replace("\n", "")


def test_the_recipe_written_beside_a_run_reproduces_it_bit_for_bit(tmp_path):
    assert train(str(RECIPE), *SHORT, "--out", str(tmp_path / "a")) == 0
    copy = tmp_path / "copy.toml"
    copy.write_text((tmp_path / "a" / "recipe.toml").read_text())
    assert train(str(copy), "--quiet", "--out", str(tmp_path / "b")) == 0
    assert same(tmp_path / "a", tmp_path / "b")


def test_another_seed_gives_other_weights(tmp_path):
    assert train(str(RECIPE), *SHORT, "--out", str(tmp_path / "a")) == 0
    assert train(str(RECIPE), *SHORT, "--set", "seed=1", "--out", str(tmp_path / "b")) == 0
    assert not same(tmp_path / "a", tmp_path / "b")


@pytest.mark.process
@pytest.mark.smoke
def test_killed_at_a_random_step_and_resumed_gives_the_same_weights(tmp_path):
    recipe = recipe_with_state(tmp_path)
    more = ["epochs=10", "schedule.epochs=10", "save.every_steps=3", "evaluate.target=0"]
    settings = [*SHORT, *(part for setting in more for part in ("--set", setting))]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(str(recipe), *settings, "--out", str(whole)) == 0
    process = Forked(["train", str(recipe), *settings, "--out", str(killed)], clean())
    at = random.randint(1, 60)  # of 110; a new one every time: any step must do
    deadline = time.monotonic() + 120
    while process.poll() is None and not any(step >= at for step in steps_saved(killed)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"the training ended before step {at}"
    forked(["train", "--resume", str(killed), "--quiet"])
    assert same(whole, killed), f"killed after step {at}"


@pytest.mark.process
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.smoke), signal.SIGINT])
def test_a_signal_finishes_the_step_writes_a_checkpoint_and_exits_with_75(tmp_path, number):
    out = tmp_path / "run"
    endless = [
        "--set",
        "epochs=10000",
        "--set",
        "device.threads=1",
        "--set",
        "evaluate.target=0",
        "--set",
        "save.every_steps=5",
        "--quiet",
    ]
    process = Forked(["train", str(RECIPE), *endless, "--out", str(out)], clean())
    deadline = time.monotonic() + 120
    while not list((out / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert f"--resume {out}" in error
    result = json.loads((out / "result.json").read_text())
    assert result["stopped"] == number.name
    assert max(steps_saved(out)) == result["steps"]


def test_the_newest_checkpoint_damaged_is_named_and_the_one_before_serves(tmp_path, capsys):
    recipe = recipe_with_state(tmp_path)
    settings = [*SHORT, "--set", "save.every_steps=10", "--set", "evaluate.target=0"]
    assert train(str(recipe), *settings, "--out", str(tmp_path / "whole")) == 0
    run = tmp_path / "run"
    assert train(str(recipe), *settings, "--out", str(run)) == 0
    newest = max((run / "checkpoints").glob("step-*"))
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    (run / "model.safetensors").unlink()
    assert train("--resume", str(run)) == 0
    assert f"{newest.name} is damaged" in capsys.readouterr().err
    assert same(tmp_path / "whole", run)


def test_a_run_that_reached_its_target_is_over_also_when_resumed(tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "evaluate.target=0.9", "--set", "device.threads=1", "--quiet"]
    assert train(str(RECIPE), *settings, "--out", str(run)) == 0
    before = json.loads((run / "result.json").read_text())
    assert before["epochs"] < 20
    assert train("--resume", str(run), "--quiet") == 0
    after = json.loads((run / "result.json").read_text())
    assert (after["epochs"], after["time_to_target_s"]) == (before["epochs"], before["time_to_target_s"])


def test_a_run_that_reached_its_target_trains_on_to_a_higher_one(tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "evaluate.target=0.3", "--set", "evaluate.every=0.5", "--set", "device.threads=1", "--quiet"]
    assert train(str(RECIPE), *settings, "--out", str(run)) == 0
    before = json.loads((run / "result.json").read_text())
    shutil.copytree(run, tmp_path / "other")
    assert train("--resume", str(run), "--quiet", "--set", "evaluate.target=1", "--set", "epochs=2") == 0
    after = json.loads((run / "result.json").read_text())
    assert after["epochs"] > before["epochs"]
    more = ["--set", "evaluate.target=0", "--set", "epochs=2"]
    assert train("--resume", str(tmp_path / "other"), "--quiet", *more) == 0
    assert json.loads((tmp_path / "other" / "result.json").read_text())["epochs"] == 2


def test_a_finished_run_says_so_and_is_left_as_it_is(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(str(RECIPE), *SHORT, "--set", "evaluate.stop=false", "--out", str(run)) == 0
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for more in ([], ["--quiet"], ["--set", "epochs=3"]):
        capsys.readouterr()
        assert train("--resume", str(run), *more) == 0
        out, err = capsys.readouterr()
        assert out == ""
        finished_line = r"finished: 3 epochs, accuracy \d\d\.\d\d%; train on: --resume with --set epochs=N.*\n"
        assert re.fullmatch(f"kasoku: {run}: {finished_line}", err)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    (run / "result.json").write_text(json.dumps(json.loads((run / "result.json").read_text()) | {"epochs": 1.0}))
    assert finished(run, replace(load_recipe(run), epochs=1.0)).startswith("finished: 1 epoch, accuracy ")


def test_resuming_with_more_epochs_stretches_the_schedule(tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["--set", "evaluate.stop=false", "--set", "device.threads=1", "--set", "epochs=2"]
    assert train(str(RECIPE), *settings, "--out", str(run)) == 0
    assert train("--resume", str(run), "--set", "epochs=4") == 0
    assert "schedule" not in capsys.readouterr().err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["epoch"], line["lr"]) for line in lines if "lr" in line]
    peak = points[0][1] / (1 - points[0][0] / 2)
    later = [(epoch, lr) for epoch, lr in points if epoch > 2]
    assert later
    assert [lr for _, lr in later] == pytest.approx([peak * (1 - epoch / 4) for epoch, _ in later], rel=1e-2)


def test_more_epochs_of_a_batch_that_grows_are_all_of_them(tmp_path):
    run = tmp_path / "run"
    grows = ["--set", "techniques.1.use=kasoku.data.GrowBatch", "--set", "evaluate.target=0"]
    settings = [*grows, "--set", "epochs=3", "--set", "device.threads=1", "--quiet"]
    assert train(str(RECIPE), *settings, "--out", str(run)) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 22 + 11 + 5
    assert train("--resume", str(run), "--set", "epochs=6", "--quiet") == 0
    result = json.loads((run / "result.json").read_text())
    assert (result["epochs"], result["steps"]) == (6, 22 + 11 + 5 + 11 + 5 + 5)


def test_a_run_goes_on_in_another_precision(tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "evaluate.stop=false", "--set", "device.threads=1", "--quiet"]
    assert train(str(RECIPE), *settings, "--set", "epochs=1", "--out", str(run)) == 0
    for epochs, precision in ((2, "fp16"), (3, "fp32")):  # with loss scaling, and without
        more = ["--set", f"epochs={epochs}", "--set", f"device.precision={precision}"]
        assert train("--resume", str(run), *more, "--quiet") == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 3


def test_what_holds_up_the_latest_steps_is_shown_and_in_the_metrics(tmp_path, capsys, monkeypatch):
    verdict = StepBottleneck("input-bound", 0.25, "", "")
    monkeypatch.setattr(metrics.LiveVerdict, "judge", lambda self, facts: (verdict, facts().batch == 64))
    assert train(str(RECIPE), "--set", "epochs=1", "--set", "device.threads=1", "--out", str(tmp_path / "run")) == 0
    assert "held up now: input-bound, 25% of a step of rank 0" in "".join(capsys.readouterr())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line.get("held_up/input-bound") for line in lines if "loss" in line} == {0.25}


def test_a_run_folder_whose_recipe_pins_the_schedule_keeps_it(tmp_path, capsys):
    whole, run = tmp_path / "whole", tmp_path / "run"
    old = [
        "--set",
        "epochs=4",
        "--set",
        "schedule.epochs=4",
        "--set",
        "device.threads=1",
        "--set",
        "evaluate.stop=false",
    ]
    assert train(str(RECIPE), *old, "--out", str(whole)) == 0
    new = [*old[:2], *old[4:]]
    assert train(str(RECIPE), *new, "--out", str(run)) == 0
    assert same(whole, run)  # the same curve, bit for bit
    assert train("--resume", str(whole), "--set", "epochs=6") == 0
    err = capsys.readouterr().err
    assert "schedule Linear: the rate is 0 for the last 33% of the training (6 epochs)" in err
    assert "--set schedule.epochs=0" in err


def test_all_checkpoints_damaged_starts_again_and_keeps_the_new_ones(tmp_path, capsys):
    run = tmp_path / "run"
    settings = [*SHORT, "--set", "save.every_steps=20", "--set", "save.keep=1"]
    assert train(str(RECIPE), *settings, "--out", str(run)) == 0
    (first,) = run.glob("checkpoints/step-*")
    first.joinpath("state.pt").write_bytes(b"")
    (run / "result.json").unlink()  # as of a run that was killed
    assert train("--resume", str(run), "--quiet") == 0
    assert "starting from the beginning" in capsys.readouterr().err
    assert steps_saved(run) == [66]


def test_resuming_may_not_change_what_is_trained_and_records_what_it_may(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(str(RECIPE), *SHORT, "--out", str(run)) == 0
    assert train("--resume", str(run), "--set", "optimizer.momentum=0.5") == 2
    assert "another training" in capsys.readouterr().err
    assert train("--resume", str(run), "--set", "epochs=4", "--quiet") == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 4
    assert "epochs = 4" in (run / "recipe.toml").read_text()


@pytest.mark.parametrize("first", ["", "# format 4 of kasoku's run folders: a time below 1 is a share of it\n"])
def test_a_run_of_another_version_is_refused_in_one_line(first, digits_run, tmp_path, capsys):
    run = shutil.copytree(digits_run, tmp_path / "run")
    recipe = run / "recipe.toml"
    recipe.write_text(first + recipe.read_text().partition("\n")[2])
    (run / "manifest.json").unlink()
    resumed = ["train", "--resume", str(run)]
    for command in (["eval", str(run)], resumed, ["train", str(RECIPE), "--out", str(run), "--continue"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{recipe}: the first line is not \"# format 6 of kasoku's run folders: " in error
        assert "another version of kasoku wrote it: evaluate it with that version, or train anew" in error
    with pytest.raises(InputError, match="another version of kasoku wrote it"):
        kasoku.train(kasoku.load_recipe(recipe, ["epochs=5"]), run, resume=True, quiet=True)


def test_a_loss_that_is_not_finite_stops_with_step_checkpoint_and_cause(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text().replace("lr = 0.05", "lr = 1e30"))
    settings = [*SHORT, "--set", "save.every_steps=1", "--set", "schedule.warmup=0"]
    assert train(str(recipe), *settings, "--out", str(tmp_path / "run")) == 3
    error = capsys.readouterr().err
    assert "at step " in error
    assert "last good checkpoint: " in error
    assert "rate" in error
    assert error.count("\n") == 1


def test_rates_follow_the_batch_linearly_from_the_reference_batch(tmp_path, capsys):
    settings = [*SHORT[:-1], "--set", "reference_batch=32", "--set", "schedule.warmup=0"]
    assert train(str(RECIPE), *settings, "--out", str(tmp_path / "run")) == 0
    assert "rates x 2" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("lr", 0) for line in lines) > 20  # twice the recipe's largest, falling


def test_bf16_and_fp32_both_learn(tmp_path):
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        assert train(str(RECIPE), *SHORT, "--set", f"device.precision={precision}", "--out", str(out)) == 0
        assert json.loads((out / "result.json").read_text())["top1"] > 0.8


def test_a_running_training_keeps_its_folder_for_itself(tmp_path, capsys):
    from kasoku.training.run_folder import RunFolder

    run = RunFolder(tmp_path / "run")
    assert train(str(RECIPE), *SHORT, "--out", str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert "in use by a running training" in error
    assert str(os.getpid()) in error
    run.close()


def test_a_plain_loop_gives_the_weights_of_the_trainer_bit_for_bit(tmp_path):
    import torch

    from kasoku import core, data, device, models, optim

    more = (
        '[[techniques]]\nuse = "kasoku.optim.EMA"\ndecay = 0.9\n[[techniques]]\nuse = "kasoku.optim.Clip"\nnorm = 2.0\n'
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text() + more)
    assert train(str(recipe), *SHORT, "--set", "evaluate.target=0", "--out", str(tmp_path / "run")) == 0

    digits, chosen = data.digits(), device.choose(device.Device(threads=1))
    torch.manual_seed(0)
    model = models.cifarnet(in_channels=1, widths=(32, 64))
    model.prepare(data.sample(digits, 5000))
    job = core.Job(
        model,
        lambda m: optim.muon(m, lr=0.05, momentum=0.8, rest=optim.SGDSettings(bias_lr=2.0, head_lr=20.0)),
        loader=data.loader(digits, "train", 64),
        loss=lambda outputs, labels: optim.cross_entropy(outputs, labels, smoothing=0.1),
    )
    rate = optim.Rate(core.Linear(epochs=3, warmup=1))
    averages = optim.EMA(decay=0.9), optim.Clip(norm=2.0)
    job.apply(*chosen.techniques, device.Seeded(0), rate, data.Augment(translate=1), *averages)
    for _ in range(3):
        for x, y in job.loader:
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    with job.evaluation() as judged:
        ours = {name: tensor.clone() for name, tensor in judged.state_dict().items()}
    theirs = weights(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.process
@pytest.mark.parametrize(
    "package",
    [
        pytest.param("numpy", marks=pytest.mark.smoke),
        "torch",
        "rich.console",
        "kasoku.distributed.local_launch",
    ],
)
def test_ctrl_c_while_packages_are_imported_ends_in_one_line(package):
    """Even where who imports makes another error of every exception, as compiled packages do."""
    code = f"""
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
real = builtins.__import__
def importing(name, *rest):
    if name == {package!r}:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("failed to import") from None
    return real(name, *rest)
builtins.__import__ = importing
sys.argv = ["kasoku", "list"]
from kasoku.__main__ import main
sys.exit(main())
"""
    process = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (130, "kasoku: interrupted before it began\n")


def test_the_accuracy_lost_to_stale_averages_is_shown_when_asked_for(tmp_path, capsys):
    recalibrate = "techniques=[{use='kasoku.distributed.Recalibrate', images=0}]"
    settings = ["--set", recalibrate, "--set", "evaluate.stale=true", "--set", "norm_batch=32", "--set", "epochs=2"]
    more = [
        "--set",
        "device.threads=1",
        "--set",
        "schedule.epochs=2",
        "--set",
        "schedule.warmup=0",
        "--set",
        "evaluate.target=0",
    ]
    assert train(str(RECIPE), *settings, *more, "--out", str(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert shown.count("accuracy lost to stale averages: ") == 2
    assert "2 of 32 images" in shown
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "test_stale_top1" in line]
