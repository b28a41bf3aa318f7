"""kasoku plan: what it chooses, that what it writes runs, and a run held against what was expected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kasoku.cli import main
from kasoku.parallel import Overlap
from kasoku.recipe import load

RECIPES = Path(__file__).parent.parent / "recipes"
DIGITS = RECIPES / "digits_cnn_98.toml"
POINTS = RECIPES / "imagenet_resnet50_mlperf.toml"
DESK = """
name = "desk"
nodes = 4
[node]
gpus = 2
port_gb_s = 10.0
nic_gb_s = 1.0
[own_gpu]
name = "core"
alpha_ms = 5.0
beta_ms = 0.2
least = 8
most = 512
tflops = 0.2
memory_gb_s = 20
usd_hour = 0.05
"""
PRICED = """
name = "small"
nodes = 16
gpu = "a100"
[node]
gpus = 8
port_gb_s = 240.0
nics = 8
nic_gb_s = 24.0
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    file.write_text(PRICED)
    return str(file)


@pytest.fixture(autouse=True)
def _no_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "searched" not in request.node.name:  # it takes seconds
        monkeypatch.setattr("kasoku.planning._searched", lambda chosen: chosen)


def planned(folder: Path, recipe: Path, *options: str) -> dict[str, object]:
    assert main(["plan", str(recipe), "--out", str(folder), *options]) == 0
    found: dict[str, object] = json.loads((folder / "plan.json").read_text())
    return found


def test_a_deadline_takes_the_cheapest_in_time_and_the_least_time_takes_no_longer(small: str, tmp_path: Path) -> None:
    on = ["--cluster", small, "--set", "points=[]", "--set", "batch=4096"]
    soon = planned(tmp_path / "a", POINTS, *on, "--deadline", "20min")
    late = planned(tmp_path / "b", POINTS, *on, "--deadline", "4h")
    fastest = planned(tmp_path / "c", POINTS, *on, "--fastest")
    paid = planned(tmp_path / "d", POINTS, *on, "--budget", "30USD")
    assert soon["training_s"] * soon["most"] <= 1200  # type: ignore[operator]
    assert late["usd"] <= soon["usd"] <= fastest["usd"]  # type: ignore[operator]
    assert late["gpus"] < fastest["gpus"]  # type: ignore[operator]
    assert fastest["training_s"] <= min(plan["training_s"] for plan in (soon, late, paid))  # type: ignore[type-var]
    assert paid["usd"] * paid["most"] <= 30  # type: ignore[operator]


def test_the_recipe_and_the_script_are_those_of_the_choice_with_its_searched_groups(small: str, tmp_path: Path) -> None:
    found = planned(tmp_path / "p", POINTS, "--cluster", small, "--set", "batch=8192", "--deadline", "1h")
    recipe = load(tmp_path / "p" / POINTS.name)
    assert recipe.batch == found["batch"] == 8192
    assert recipe.origin == "the point 8,192"
    assert recipe.epochs == 42
    assert any(isinstance(technique, Overlap) for technique in recipe.techniques)
    script = tmp_path / "p" / "launch.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    nodes = found["gpus"] // 8  # type: ignore[operator]
    assert f"#SBATCH --nodes={nodes}\n" in text
    assert f"train {tmp_path / 'p' / POINTS.name}" in text


def test_points_of_a_recipe_are_all_tried_and_a_noise_scale_gives_more_epochs(small: str, tmp_path: Path) -> None:
    shown = planned(tmp_path / "p", POINTS, "--cluster", small, "--fastest")
    assert shown["batch"] in (1632, 3264, 4096, 8192, 13056, 32768, 49152, 58880, 65536, 67840)
    given = ["--cluster", small, "--set", "points=[]", "--set", "batch=4096", "--noise-scale", "8192", "--fastest"]
    found = planned(tmp_path / "q", POINTS, *given)
    recipe = load(tmp_path / "q" / POINTS.name)
    batch = int(found["batch"])  # type: ignore[call-overload]
    assert recipe.epochs == pytest.approx(40 * (1 + batch / 8192) / (1 + 4096 / 8192), rel=1e-4)
    assert recipe.rate_scale == pytest.approx(batch / 4096)


def test_what_is_planned_trains_and_is_held_against_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "desk.toml").write_text(DESK)
    options = ["--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "epochs=1", "--set", "schedule.warmup=0"]
    plan = planned(tmp_path / "p", DIGITS, *options)
    run = tmp_path / "run"
    recipe = str(tmp_path / "p" / DIGITS.name)
    command = [sys.executable, "-m", "kasoku", "train", recipe, "--quiet", "--out", str(run)]
    subprocess.run([*command, "--set", "device.threads=1"], check=True)  # its environment.json keeps the command
    capsys.readouterr()
    assert main(["plan", "--compare", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    took = json.loads((run / "ledger.json").read_text())["rows"]
    computing = took["forward"] + took["backward"] + took["update"]
    rows = plan["rows"]
    assert isinstance(rows, dict)
    error = (rows["forward"] + rows["backward"]) / computing - 1
    assert f"{error:+.1%}" in shown
    assert "exposed communication" in shown
    assert "in all" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deadline", "1s"], "deadline of 1 s: the fastest way takes"),
        (["--budget", "0.01USD"], "the cheapest way may cost"),
        (["--deadline", "soon"], "as 10min"),
        (["--budget", "100"], "as 100USD"),
        ([], "one of --deadline TIME, --budget USD, --fastest"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(
    options: list[str], said: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--cluster", small, "--set", "points=[]", "--out", str(tmp_path / "p")]
    assert main(["plan", str(POINTS), *given, *options]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "p").exists()


def test_a_run_that_nobody_planned_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--compare", str(tmp_path)]) == 2
    assert "environment.json" in capsys.readouterr().err
    (tmp_path / "environment.json").write_text('{"command": ["kasoku", "train", "nowhere/a.toml"]}')
    assert main(["plan", "--compare", str(tmp_path)]) == 2
    assert "no plan.json there" in capsys.readouterr().err
