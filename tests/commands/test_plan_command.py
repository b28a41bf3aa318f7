"""kasoku plan: what it chooses, that what it writes runs, and that it trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.inspected import remember_networks
from kasoku.cli import main
from kasoku.config.recipe import load
from kasoku.distributed import Asynchronous, Graded, Hierarchical, Mean, Overlap, PerLayer, Planned, Reducer, Wire

RECIPES = Path(__file__).parent.parent.parent / "recipes"
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
HIERARCHICAL = "{use='kasoku.distributed.Hierarchical', across={use='kasoku.distributed.Wire'}}"
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
        monkeypatch.setattr("kasoku.simulate.plan_search.with_searched_groups", lambda chosen: chosen)
    remember_networks(monkeypatch)


def planned(folder: Path, recipe: Path, *options: str) -> dict[str, object]:
    assert main(["plan", str(recipe), "--out", str(folder), *options]) == 0
    found: dict[str, object] = json.loads((folder / "plan.json").read_text())
    return found


def test_a_deadline_takes_the_cheapest_in_time(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert (
        "small has no [costs]: only the start of communicators is expected before the first step"
        in capsys.readouterr().err
    )
    for plan in (soon, late, fastest, paid):
        assert 0.8 < plan["least"] < 1 < plan["most"] < 2.5  # type: ignore[operator]
        low, high = (plan["training_s"] * plan[end] for end in ("least", "most"))  # type: ignore[operator]
        assert plan["shown"]["ranges"].startswith(f"{low:,.1f} to {high:,.1f} s and ")  # type: ignore[index]
    assert "price: AWS" in paid["shown"]["source"]  # type: ignore[index]
    assert "4.10 an hour a GPU" in paid["shown"]["training"]  # type: ignore[index]
    assert "how epochs scatter is not known" in paid["shown"]["ranges"]  # type: ignore[index]


def test_recipe_and_script_have_the_choice_with_its_searched_groups(small: str, tmp_path: Path) -> None:
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


def test_all_points_are_tried(small: str, tmp_path: Path) -> None:
    shown = planned(tmp_path / "p", POINTS, "--cluster", small, "--fastest")
    assert shown["batch"] in (1632, 3264, 4096, 8192, 13056, 32768, 49152, 58880, 65536, 67840)


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        ("schedule={use='kasoku.core.ArcCotangent'}", False),
        ("techniques=[{use='kasoku.data.LowResolution', side=6, until=0.5}]", True),
        (
            "techniques=[{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[10], "
            "gamma=2.0}}]",
            True,
        ),
    ],
)
def test_schedules_and_steps_that_change_are_planned(setting: str, kinds: bool, tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(DESK)
    found = planned(tmp_path / "p", DIGITS, "--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", setting)
    assert (len(found["steps"]) > 1) == kinds  # type: ignore[arg-type]


def test_no_gpu_takes_more_images_at_once_than_it_surely_holds(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--deadline", "99d", "--set", "points=[]", "--set", "batch=8192", "--set", "norm_batch=0"]
    found = planned(tmp_path / "p", POINTS, "--cluster", small, *options)
    assert 8192 / found["gpus"] <= 408  # type: ignore[operator]  # the most that an A100 was measured with
    (tmp_path / "one.toml").write_text(PRICED.replace("nodes = 16", "nodes = 1"))
    one = ["--cluster", str(tmp_path / "one.toml"), *options]
    assert main(["plan", str(POINTS), *one]) == 2
    assert ", 408 images at once each: a larger accumulate takes fewer" in capsys.readouterr().err
    planned(tmp_path / "parts", POINTS, *one, "--set", "accumulate=4")
    planned(tmp_path / "saved", POINTS, *one, "--set", "techniques=[{use='kasoku.memory.SavedMemory'}]")
    names = ["conv1", "bn1", *(f"layer{i + 1}.{k}" for i, n in enumerate((3, 4, 6, 3)) for k in range(n)), "fc"]
    blocks = [{"name": name, "forward_s": 1e-4, "backward_s": 2e-4} for name in names]
    (tmp_path / "profile.json").write_text(json.dumps({"blocks": blocks}))
    (tmp_path / "ledger.json").write_text('{"facts": {"batch": 8192}}')
    planned(tmp_path / "profiled", POINTS, *one, "--profile", str(tmp_path))
    (tmp_path / "desk.toml").write_text(DESK.replace("nodes = 4", "nodes = 1").replace("gpus = 2", "gpus = 1"))
    little = ["--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "batch=1024"]
    assert planned(tmp_path / "little", DIGITS, *little)["gpus"] == 1  # more than the file's 512: its images are small


def test_a_plan_of_a_model_beside_its_recipe_finds_it_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine_beside.py").write_text("from kasoku.models import cifarnet as mine\n")
    (own / "98digits.toml").write_text(DIGITS.read_text().replace("kasoku.models.cifarnet", "mine_beside.mine"))
    (tmp_path / "desk.toml").write_text(DESK)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    planned(tmp_path / "p", own / "98digits.toml", "--cluster", "desk.toml", "--fastest")
    assert {file.name for file in (tmp_path / "p").iterdir()} == {"98digits.toml", "launch.sbatch", "plan.json"}
    script = (tmp_path / "p" / "launch.sbatch").read_text()
    assert "#SBATCH --job-name=kasoku-98digits\n" in script
    sys.path[:] = before
    del sys.modules["mine_beside"]
    assert " --allow mine_beside" in script
    assert main(["train", str(tmp_path / "p" / "98digits.toml"), "--dry-run", "--allow", "mine_beside"]) == 0


@pytest.mark.parametrize(
    ("techniques", "late"),
    [("{use='kasoku.distributed.Overlap', buckets={use='kasoku.distributed.OneBucket'}}", True), ("{use=CLIP}", False)],
)
@pytest.mark.parametrize("searched", [True, False])
def test_the_recipe_has_the_groups_that_were_searched_or_not(
    techniques: str, late: bool, searched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desk.toml").write_text(DESK.replace("beta_ms = 0.2", "beta_ms = 40.0"))
    monkeypatch.setattr("kasoku.simulate.plan_search._WORTH", 2.0 if searched else 0.0)
    techniques = techniques.replace("CLIP", "'kasoku.optim.Clip', norm=1.0")
    found = planned(
        tmp_path / "p",
        DIGITS,
        *("--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "batch=512"),
        *("--set", f"techniques=[{techniques}]"),
    )
    (own,) = (t for t in load(tmp_path / "p" / DIGITS.name).techniques if isinstance(t, Overlap))
    said = found["shown"]["groups"]  # type: ignore[index]
    assert isinstance(own.buckets, Planned if searched else Graded)
    assert ("planned" in said) == searched
    assert own.next_forward == (late and searched)


@pytest.mark.parametrize(
    ("given", "alike", "said", "nic_gb_s"),
    [
        ("", Mean(), "", 1.0),
        ("", Mean(), "", 100.0),
        ("{use='kasoku.distributed.Wire'}", Wire(), "Wire", 1.0),
        pytest.param("{use='kasoku.distributed.Wire'}", Wire(), "Wire", 100.0, marks=pytest.mark.exhaustive),
        pytest.param(HIERARCHICAL, Wire(), "Wire", 1.0, marks=pytest.mark.exhaustive),
        (HIERARCHICAL, Wire(), "Wire", 100.0),
    ],
)
def test_the_recipe_averages_node_by_node_where_that_is_faster(
    given: str, alike: Reducer, said: str, nic_gb_s: float, tmp_path: Path
) -> None:
    text = PRICED.replace("nics = 8", "nics = 1").replace("nodes = 16", "nodes = 4")
    (tmp_path / "few.toml").write_text(text.replace("nic_gb_s = 24.0", f"nic_gb_s = {nic_gb_s}"))
    own = "{use='kasoku.distributed.Overlap'" + (f", reducer={given}" if given else "") + "}"
    options = ["--cluster", str(tmp_path / "few.toml"), "--fastest", "--set", "batch=8192", "--set", "points=[]"]
    found = planned(tmp_path / "p", POINTS, *options, "--set", f"techniques=[{own}]")
    assert found["gpus"] == 32
    (technique,) = (t for t in load(tmp_path / "p" / POINTS.name).techniques if isinstance(t, Overlap))
    shown = found["shown"]
    assert isinstance(shown, dict)
    if nic_gb_s == 1.0:  # 2 (N - 1) / N of the bytes leave a node of N = 4, where trees and a ring over all send more
        assert technique.reducer == Hierarchical(0, alike)  # of as many ranks as the script starts on a node
        assert "; the largest by hierarchical, " in shown["groups"]
        assert ("all-to-all and all-gather across" in shown["groups"]) == (said == "Wire")
        assert shown["reducer"].startswith(f"Hierarchical(node=0, across={said or 'Mean'}(")
    else:
        assert technique.reducer == alike
        assert "hierarchical" not in shown["groups"]
        assert shown["reducer"].startswith(f"{said}(") if said else "reducer" not in shown


def test_few_images_for_batch_norm_are_told_with_what_helps(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cluster", small, "--fastest", "--set", "points=[]", "--set", "batch=1024"]
    found = planned(tmp_path / "p", POINTS, *options, "--set", "norm_batch=0")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "BatchNorm" in line)
    assert f"BatchNorm over {1024 // found['gpus']} images at once" in line  # type: ignore[operator]
    assert "take a larger norm_batch or batch" in line
    planned(tmp_path / "q", POINTS, *options, "--set", "norm_batch=32")
    assert "BatchNorm" not in capsys.readouterr().err


@pytest.mark.parametrize(("ahead", "apart"), [("", True), (", max_staleness=4", True), (", max_staleness=0", False)])
def test_ranks_at_their_own_pace_keep_their_groups_and_are_not_searched(
    ahead: str, apart: bool, tmp_path: Path
) -> None:
    (tmp_path / "desk.toml").write_text(DESK.replace("beta_ms = 0.2", "beta_ms = 40.0"))
    pace = f"{{use='kasoku.distributed.Asynchronous', buckets={{use='kasoku.distributed.PerLayer'}}{ahead}}}"
    options = ["--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "batch=512"]
    found = planned(tmp_path / "p", DIGITS, *options, "--set", f"techniques=[{pace}]")
    (own,) = load(tmp_path / "p" / DIGITS.name).techniques
    assert found["gpus"] > 1  # type: ignore[operator]
    shown = found["shown"]
    assert isinstance(shown, dict)
    assert isinstance(own, Asynchronous if apart else Overlap)
    if apart:
        assert isinstance(own.buckets, PerLayer)
        assert "(a layer)" in shown["groups"]
        assert "; the largest by exchange, " in shown["groups"]
    else:
        assert "exchange" not in shown["groups"]


def test_a_recipe_with_graphs_has_one_bucket_and_no_searched_groups(tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(DESK)
    options = ["--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "batch=512"]
    found = planned(tmp_path / "p", DIGITS, *options, "--set", "device.graphs=true")
    assert "(one bucket)" in found["shown"]["groups"]  # type: ignore[index]
    assert not any(isinstance(t, Overlap) for t in load(tmp_path / "p" / DIGITS.name).techniques)


def test_a_plan_never_takes_the_place_of_its_own_recipe(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(POINTS.read_text())
    options = ["--cluster", small, "--fastest", "--set", "batch=8192"]
    assert main(["plan", str(recipe), *options, "--out", str(tmp_path)]) == 2
    assert "would be written over" in capsys.readouterr().err
    assert recipe.read_text() == POINTS.read_text()
    for _ in range(2):  # a plan of a recipe of that name is no run
        planned(tmp_path / "p", recipe, *options)
    (tmp_path / "p" / "environment.json").write_text("{}")
    assert main(["plan", str(recipe), *options, "--out", str(tmp_path / "p")]) == 2
    assert "holds a run" in capsys.readouterr().err


def test_what_is_planned_trains_and_its_items_are_those_of_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(DESK.replace("nodes = 4", "nodes = 1").replace("gpus = 2", "gpus = 1"))
    options = ["--cluster", str(tmp_path / "desk.toml"), "--fastest", "--set", "epochs=1", "--set", "schedule.warmup=0"]
    plan = planned(tmp_path / "p", DIGITS, *options)
    run = tmp_path / "run"
    recipe = str(tmp_path / "p" / DIGITS.name)
    assert main(["train", recipe, "--quiet", "--out", str(run), "--set", "device.threads=1"]) == 0
    took = json.loads((run / "ledger.json").read_text())["rows"]
    rows = plan["rows"]
    assert isinstance(rows, dict)
    assert {"forward", "backward", "exposed", "evaluate"} <= rows.keys()
    assert {"forward", "backward", "evaluate"} <= took.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deadline", "1s"], "deadline of 1 s: the fastest plan takes"),
        (["--budget", "0.01USD"], "the cheapest plan may cost"),
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


def test_groups_for_plain_ddp_are_printed_and_hold_all_gradients(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--cluster", small, "--set", "points=[]", "--set", "batch=4096", "--fastest"]
    planned(tmp_path / "a", POINTS, *on)
    assert "bucket_cap_mb_list" not in capsys.readouterr().out
    planned(tmp_path / "b", POINTS, *on, "--buckets")
    (listed,) = re.findall(r"DistributedDataParallel\(\.\.\., bucket_cap_mb_list=(\[.*?\])\)", capsys.readouterr().out)
    caps = json.loads(listed)
    assert len(caps) > 1
    assert sum(caps) == pytest.approx(4 * 25_557_032 / 2**20, abs=1e-4)
