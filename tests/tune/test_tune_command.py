"""`kasoku tune`, batch = "auto" and `kasoku search`, as a user types them; what is wrong is said in one line."""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.ranks import on_processes
from helpers.started import KASOKU, clean
from helpers.tuning import DIGITS, MLPERF, POINTS, SMALL, planted
from kasoku.cli import main
from kasoku.commands import tune as tuning
from kasoku.config import recipe as recipes
from kasoku.core import InputError
from kasoku.training import auto_batch as sizing
from kasoku.training.run_folder import RunFolder
from kasoku.training.trainer import build
from kasoku.tune import GpuUsageMaximize, Throughput

# ---- kasoku tune


def test_the_batch_is_measured_and_printed_with_rates_that_follow(small, tmp_path, capsys):
    out = tmp_path / "found"
    command = ["tune", str(small), "--strategy", "Throughput", "--budget", "8", "--range", "16:256", "--out", str(out)]
    assert main(command) == 0
    told = json.loads((out / "tuning.json").read_text())
    assert (told["strategy"], told["budget_s"]) == ("Throughput", 8)
    tried = {sample["batch"]: sample for sample in told["samples"]}
    assert set(tried) <= set(range(16, 257))
    assert tried[told["chosen"]]["low_s"] <= tried[told["chosen"]]["step_s"] <= tried[told["chosen"]]["high_s"]
    shown = capsys.readouterr().out
    settings = re.findall(r"--set (\S+)", shown)
    assert settings == [f"batch={told['chosen']}", "reference_batch=64"]
    assert f"x {told['chosen'] / 64:.4g} (linear, from 64)" in shown
    recipe = recipes.load(small, settings)
    assert (recipe.batch, recipe.rate_scale) == (told["chosen"], told["chosen"] / 64)


def test_a_budget_too_short_gives_the_best_so_far_and_says_so(small, capsys):
    assert main(["tune", str(small), "--budget", "0.001"]) == 0
    assert "time was over, the best so far" in " ".join(capsys.readouterr().out.split())


def test_an_out_that_cannot_be_written_is_refused_before_the_search(small, digits_run, tmp_path, monkeypatch, capsys):
    asked = planted(monkeypatch, 96)
    (tmp_path / "file").touch()
    for out, wrong in ((digits_run, "holds a run, which would be lost"), (tmp_path / "file", "a folder is wanted")):
        assert main(["tune", str(small), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert wrong in error
        assert error.count("\n") == 1
    assert asked == []


TUNE = """
[tune]
budget = 5
strategy = {use = "kasoku.tune.GpuUsageMaximize", target = 0.9}
"""


def test_the_table_tune_has_strategy_and_budget_and_options_override_it(small, monkeypatch):
    asked = planted(monkeypatch, 96)
    small.write_text(small.read_text() + TUNE)
    assert main(["tune", str(small)]) == 0
    assert (asked[0]["strategy"], asked[0]["budget_s"]) == (GpuUsageMaximize(target=0.9), 5)
    assert main(["tune", str(small), "--budget", "7", "--set", "tune.strategy.target=0.8"]) == 0
    assert (asked[1]["strategy"], asked[1]["budget_s"]) == (GpuUsageMaximize(target=0.8), 7)
    assert recipes.load(small).tune == recipes.from_document(tomllib.loads(recipes.dumps(recipes.load(small)))).tune
    assert main(["tune", str(small), "--strategy", "Throughput"]) == 0
    assert asked[2]["strategy"] == Throughput()
    target = ["--strategy", "GpuUsageMaximize", "--set", "tune.strategy.target=0.8"]
    assert main(["tune", str(small), *target]) == 0
    assert asked[3]["strategy"] == GpuUsageMaximize(target=0.8)


def test_a_training_with_batch_auto_tunes_as_its_table_says(auto, tmp_path, monkeypatch):
    asked = planted(monkeypatch, 96)
    auto.write_text(auto.read_text() + TUNE)
    assert main(["train", str(auto), "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert (asked[0]["strategy"], asked[0]["budget_s"]) == (GpuUsageMaximize(target=0.9), 5)
    assert tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["tune"]["strategy"]["target"] == 0.9


OWN = """
from kasoku.tune import Needs

class Doubled:
    needs = Needs()

    def __init__(self, times: int, epochs: tuple[tuple[int, float], ...] = ()):
        self.times, self.epochs = times, epochs

    def search(self, tries):
        batch = tries.least
        for _ in range(self.times):
            tries.take(batch)
            batch *= 2
        return tries.result(batch // 2, f"doubled {self.times} times, {len(self.epochs)} known")
"""


def test_a_strategy_of_ones_own_is_named_in_the_recipe(small, tmp_path, capsys):
    (tmp_path / "my_strategies.py").write_text(OWN)
    small.write_text(SMALL + '[tune]\nstrategy = {use = "my_strategies.Doubled", times = 3}\n' + POINTS)
    assert main(["tune", str(small), "--range", "32:128", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "tuning.json").read_text())
    assert ([s["batch"] for s in told["samples"]], told["strategy"]) == ([32, 64, 128], "Doubled")
    assert told["why"] == "doubled 3 times, 3 known"  # the epochs of the recipe's points
    assert main(["tune", str(small), "--strategy", "my_strategies.Doubled"]) == 2
    assert "missing a required argument: 'times'" in capsys.readouterr().err


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_the_rate_follows_as_the_recipe_scales(small, monkeypatch, capsys, scaling):
    asked = planted(monkeypatch, 256)
    assert main(["tune", str(small), "--set", f"scaling={scaling}", "--range", "32:512", "--budget", "7"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    factor = {"linear": 4, "sqrt": 2}[scaling]
    assert f"x {factor} ({scaling}, from 64): optimizer.lr {0.1 * factor:.4g}" in shown
    assert "out of memory" in shown
    assert (asked[0]["budget_s"], asked[0]["least"], asked[0]["most"]) == (7, 32, 512)


def test_sizes_are_what_ranks_parts_and_groups_of_norm_batch_can_share(small, monkeypatch):
    asked = planted(monkeypatch, 96)
    settings = ["--set", "norm_batch=16", "--set", "accumulate=2", "--set", "batch=96"]
    assert main(["tune", str(small), *settings]) == 0
    assert asked[0]["multiple"] == 32
    assert asked[0]["least"] == 32
    assert asked[0]["most"] == 1437 // 32 * 32


def test_with_norm_batch_a_share_is_trained_at_once_as_it_was_measured(small, monkeypatch, capsys):
    asked = planted(monkeypatch, 96)
    assert main(["tune", str(small), "--set", "norm_batch=16"]) == 0
    assert asked[0]["multiple"] == 16
    assert asked[0]["accumulate"] == 1
    assert "--set batch=96 --set reference_batch=64 --set accumulate=1" in capsys.readouterr().out


def test_sizes_stay_within_the_points_and_epochs_follow_them():
    def at(batch: int) -> recipes.Recipe:
        return recipes.load(MLPERF, [f"batch={batch}"])

    first = recipes.load(MLPERF, ["batch=auto"])
    begin, multiple = first.batch, max(1, first.norm_batch)
    least, most = sizing.limits(at, (0, 0), images=1_281_167, multiple=multiple, begin=begin, few=8)
    assert least == begin
    assert most == max(point["batch"] for point in tomllib.loads(MLPERF.read_text())["points"])
    curve = sizing.curve(at, least, most)
    assert curve[0] == (begin, at(begin).epochs)
    assert curve[-1] == (most, at(most).epochs)
    assert curve[0][1] < curve[-1][1]
    one = recipes.load(DIGITS)
    assert sizing.curve(lambda batch: one, 8, 512) == ()


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--strategy", "Troughput"], r"--strategy Troughput: no such strategy: did you mean Throughput\?"),
        (["--strategy", "best"], "no such strategy: one of TimeToTarget, Throughput"),
        (["--range", "64:32"], "--range 64:32: an empty range"),
        (["--range", "0:32"], "an empty range"),
        (["--range", "64"], "--range 64: LOW:HIGH is wanted, such as 32:512"),
        (["--range", "5000:6000"], "none of them can be tried .*1437 images"),
        (["--budget", "0"], r"tune: budget=0(\.0)?: above 0 and below inf; seconds"),
        (["--budget", "nan"], "budget=nan: above 0"),
        (["--set", "tune.stratgy=1"], r"tune\.stratgy: no such key: did you mean strategy\?"),
        (["--set", "tune.strategy.use=kasoku.tune.Troughput"], r"no such name: did you mean Throughput\?"),
        (["--set", "tune.strategy={use='kasoku.tune.Throughput', gain=0.1}"], r"tune\.strategy\.gain: no such key"),
        (["--set", "tune.strategy.use=kasoku.optim.Clip"], r"tune\.strategy\.use: a Strategy is wanted"),
        (["--set", "tune.target=0.5"], r"tune\.target: no such key"),
        (["--range", "a:b"], "--range a:b: LOW:HIGH is wanted"),
        (["--set", "batch=2000"], "batch=2000: at most 1437 images"),
        (["--set", "optimizer.lrr=1"], r"optimizer\.lrr: no such key: did you mean lr\?"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(small, refused, arguments, pattern):
    refused(pattern, "tune", small, *arguments)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("RuntimeError('mat1 and mat2\\nshapes cannot be multiplied')", "mat1 and mat2 shapes cannot be multiplied"),
        pytest.param("AttributeError('no attribute head')", "no attribute head", marks=pytest.mark.exhaustive),
        pytest.param("AssertionError('an even width')", "an even width", marks=pytest.mark.exhaustive),
        pytest.param("NameError('name x is not defined')", "name x is not defined", marks=pytest.mark.exhaustive),
        pytest.param("ZeroDivisionError('division by zero')", "division by zero", marks=pytest.mark.exhaustive),
    ],
)
def test_a_recipe_that_cannot_run_one_step_is_refused_in_one_line(small, refused, tmp_path, error, says):
    name = f"broken_{error.partition('(')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes: int = 10):\n        super().__init__()\n"
        "        self.head = torch.nn.Linear(64, num_classes)\n\n"
        "    def forward(self, x):\n        if self.training and x.device.type != 'meta':\n"
        f"            raise {error}\n"
        "        return self.head(x.flatten(1))\n"
    )
    small.write_text(SMALL.replace('use = "kasoku.models.cifarnet", widths = [8, 16]', f'use = "{name}.Net"'))
    pattern = rf"no step can be made \({error.partition('(')[0]}: {says}\): mend"
    refused(pattern, "tune", small, "--budget", "5")


# ---- batch = "auto"


def test_auto_tunes_first_and_the_run_keeps_the_number_with_its_rates(auto, tmp_path, monkeypatch, capsys):
    auto.write_text(auto.read_text() + "\n[tune]\nbudget = 1.0\n")
    run = tmp_path / "run"
    assert main(["train", str(auto), "--out", str(run)]) == 0
    assert "tuned by TimeToTarget" in " ".join(capsys.readouterr().out.split())
    told = json.loads((run / "tuning.json").read_text())
    written = tomllib.loads((run / "recipe.toml").read_text())
    assert (written["batch"], written["reference_batch"]) == (told["chosen"], 64)
    assert written["origin"] == "tuned by TimeToTarget"
    copy = tmp_path / "copy.toml"
    copy.write_text((run / "recipe.toml").read_text())
    assert main(["train", str(copy), "--quiet", "--out", str(tmp_path / "again")]) == 0  # tuning left no trace
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "again"))
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert main(["train", "--resume", str(run), "--quiet", "--set", "epochs=2"]) == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 2


def test_a_folder_that_holds_a_run_is_refused_before_it_tunes(auto, tmp_path, monkeypatch, refused):
    asked = planted(monkeypatch, 96)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("")
    refused("holds a run already", "train", auto, "--out", tmp_path / "run")
    assert not asked


def test_auto_needs_to_know_which_batch_the_rates_are_for(auto, refused):
    refused('batch = "auto": .*give reference_batch', "train", auto, "--set", "reference_batch=0")


def test_auto_with_points_takes_the_settings_of_the_batch_found():
    points = tomllib.loads(MLPERF.read_text())["points"]
    recipe = recipes.load(MLPERF, ["batch=auto"])
    assert recipe.auto_batch
    assert recipe.batch == min(point["batch"] for point in points)
    assert tomllib.loads(recipes.dumps(recipe))["batch"] == "auto"
    found = recipes.load(MLPERF, ["batch=auto", "batch=13056"])
    assert not found.auto_batch
    assert found == recipes.load(MLPERF, ["batch=13056"])


def test_an_auto_recipe_goes_to_toml_and_back(auto, tmp_path):
    recipe = recipes.load(auto)
    copy = tmp_path / "copy.toml"
    copy.write_text(recipes.dumps(recipe))
    assert recipes.load(copy) == recipe


def test_where_nothing_tunes_auto_is_refused_in_one_line(auto, refused):
    refused("tuned for a single training only", "train", auto, "--members", "2")
    with pytest.raises(InputError, match="tuned for a single training only"):
        build(recipes.load(auto))


def test_a_dry_run_tells_where_tuning_begins_and_launch_takes_any_ranks(auto, capsys):
    assert main(["train", str(auto), "--dry-run"]) == 0
    assert "auto: tuning begins here" in " ".join(capsys.readouterr().out.split())
    assert main(["launch", "slurm", str(auto), "--nodes", "3", "--gpus-per-node", "5"]) == 0


def tuned_by(comm, path: Path) -> tuple[int, float]:
    def at(batch: int) -> recipes.Recipe:
        return recipes.load(path, [f"batch={batch}"])

    tuned = tuning.tune(recipes.load(path, ["tune.budget=4"]), at, comm=comm, sizes=(0, 512))
    return tuned.recipe.batch, tuned.recipe.rate_scale


@pytest.mark.process
def test_two_ranks_take_the_same_batch_which_they_can_share(auto):
    first, second = on_processes(2, tuned_by, auto)
    assert first == second
    assert first[0] % 2 == 0


def test_rates_are_found_among_the_settings_also_where_they_are_defaults(small):
    wanted = {"optimizer.lr": 0.05, "optimizer.rest.bias_lr": 2.0, "optimizer.rest.head_lr": 20.0}
    assert sizing.rates_of(recipes.load(DIGITS)) == wanted
    plain = recipes.load(small, ["optimizer={use='torch.optim.SGD', momentum=0.9}"])
    assert sizing.rates_of(plain) == {"optimizer.lr": 0.001}


# ---- kasoku search


SPACE = "optimizer.lr = {low = 0.01, high = 0.2, log = true}\nmodel.widths = {choices = [[8, 16], [4, 8]]}\n"


@pytest.fixture
def space(tmp_path) -> Path:
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return path


@pytest.mark.process
def test_a_search_trains_its_trials_and_prints_the_settings_of_the_best(small, space, tmp_path, capsys):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    out = tmp_path / "search"
    how = ["--trials", "2", "--jobs", "2", "--pruner", "none"]
    command = ["search", str(small), "--space", str(space), *how, "--out", str(out)]
    assert main([*command, "--set", "evaluate.target=0.01", "--set", "epochs=2"]) == 0
    shown = capsys.readouterr().out
    results = [json.loads((out / f"trial-{i}" / "result.json").read_text()) for i in (1, 2)]
    assert all(result["stopped"] is None and result["epochs"] == 2 for result in results)  # none ends at its target
    (best,) = (line for line in shown.splitlines() if line.startswith("--set "))
    settings = re.findall(r"--set '?([\w.]+)=(.*?)'?(?= --set|$)", best)
    assert [path for path, _ in settings] == ["optimizer.lr", "model.widths"]
    top1 = max(result["top1"] for result in results)
    of_best = [
        tomllib.loads((out / f"trial-{i + 1}" / "recipe.toml").read_text())["optimizer"]["lr"]
        for i, result in enumerate(results)
        if result["top1"] == top1
    ]
    assert float(settings[0][1]) in of_best


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_search_that_is_ended_ends_its_trainings_which_save(small, space, tmp_path, number):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent was killed")
    out = tmp_path / "search"
    command = [*KASOKU, "search", str(small), "--space", str(space), "--trials", "1", "--out", str(out)]
    process = subprocess.Popen([*command, "--set", "epochs=100000"], env=clean(), stderr=subprocess.PIPE, text=True)
    trial = out / "trial-1"
    deadline = time.monotonic() + 120
    while not (trial / "metrics.jsonl").exists() or not (trial / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == (75 if number == signal.SIGINT else -signal.SIGKILL)
    assert (f"--out {out}" in error) == (number == signal.SIGINT)
    deadline = time.monotonic() + 120
    while not (trial / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((trial / "result.json").read_text())["stopped"] == "SIGTERM"
    while True:  # nobody holds the run any more
        try:
            RunFolder(trial, resume=True).close()
            break
        except InputError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert list((trial / "checkpoints").glob("step-*"))


def test_an_unknown_path_is_named_with_the_nearest_right_one(small, space, refused, tmp_path):
    space.write_text("optimizer.lrr = {low = 0.01, high = 0.2}\n")
    pattern = r"space\.toml: optimizer\.lrr: no such key: did you mean lr\?"
    refused(pattern, "search", small, "--space", space, "--trials", "1", "--out", tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_space_whose_values_the_recipe_cannot_take_is_refused(small, space, refused):
    space.write_text('batch = {choices = ["small", "large"]}\n')
    refused(r'space\.toml: batch = "small": an integer is wanted', "search", small, "--space", space, "--trials", "1")


def test_a_search_without_optuna_says_what_to_install(small, space, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    out = tmp_path / "search"
    refused(r'pip install "optuna>=4\.0"', "search", small, "--space", space, "--trials", "1", "--out", out)


def test_no_trials_are_refused(small, space, refused):
    refused("trials=0: at least 1", "search", small, "--space", space, "--trials", "0")
