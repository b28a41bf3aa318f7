"""--json: one object on standard output and nothing else, with the keys that docs/commands.md has."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.inspected import remember_networks
from kasoku.cli import VERBS, main
from kasoku.commands import arguments
from kasoku.commands.arguments import JsonArguments
from kasoku.core.files import json_text
from kasoku.data import digits

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "digits_cnn_98.toml")
ONE = ["--set", "device.threads=1"]
PAGE = (ROOT / "docs" / "commands.md").read_text()
TABLE = re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", PAGE.partition("## JSON for programs")[2], re.MULTILINE)
Answer = Callable[..., dict[str, Any]]


def documented(command: str) -> list[set[str]]:
    """The keys that the page has for a command, a set for each row."""
    rows = [(re.findall(r"`(.*?)`", commands), re.findall(r"`(.*?)`", keys)) for commands, keys in TABLE]
    return [set(keys) for commands, keys in rows if command in commands]


def assert_documented(command: str, answer: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """Holds an answer against the page; `but`: keys of options that were not given, or of the other kind."""
    wanted = set[str]().union(*documented(command)) - set(but)
    assert set(answer) == wanted


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """The object that a command prints, which must be all of its standard output."""

    def run(*words: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--json"]) == code

        def refused(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        found = json.loads(capsys.readouterr().out, parse_constant=refused)
        assert isinstance(found, dict)
        return found

    return run


def test_the_page_has_every_command_with_the_option():
    having = {verb for verb, (module, _) in VERBS.items() if verb != "launch"}
    kinds = {verb: getattr(arguments, f"{VERBS[verb][0].capitalize()}Arguments") for verb in having}
    having = {verb for verb, kind in kinds.items() if issubclass(kind, JsonArguments)}
    assert having == {"eval", "predict", "tune", "plan", "simulate", "profile", "list"}
    assert having == {name.split()[0] for commands, _ in TABLE for name in re.findall(r"`(.*?)`", commands)}


def test_eval_answers_with_the_scores_of_runs_and_ensemble(answer: Answer, digits_run: Path):
    found = answer("eval", str(digits_run), str(digits_run))
    assert_documented("eval", found)
    result = json.loads((digits_run / "result.json").read_text())
    assert [row["name"] for row in found["scores"]] == [str(digits_run)] * 2 + ["ensemble of 2"]
    for row in found["scores"]:
        assert row.keys() == {"name", "top1", "top5", "loss", "images"}
        assert (row["top1"], row["images"]) == (pytest.approx(result["best_top1"]), 360)


def test_predict_answers_with_classes_and_with_what_cannot_be_read(answer: Answer, digits_run: Path, tmp_path: Path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(digits().test.images_NHWC[0, :, :, 0].numpy()).save(folder / "a.png")
    (folder / "b.png").write_bytes(b"no image")
    found = answer("predict", str(digits_run), str(folder), "--out", str(tmp_path / "rows.csv"), code=2)
    assert_documented("predict", found)
    good, bad = found["images"]
    assert good.keys() == bad.keys() == {"image", "classes", "error"}
    assert (good["image"], good["error"], bad["classes"]) == (str(folder / "a.png"), "", [])
    assert "b.png" in bad["error"]
    cells = (tmp_path / "rows.csv").read_text().splitlines()[1].split(",")
    assert [each["class"] for each in good["classes"]] == cells[1:11:2]
    assert [f"{each['probability']:.4f}" for each in good["classes"]] == cells[2:11:2]


def test_tune_answers_with_its_settings_and_tuning_json(answer: Answer, tmp_path: Path):
    options = ["--range", "32:64", "--budget", "5", "--strategy", "Throughput", "--out", str(tmp_path), *ONE]
    found = answer("tune", RECIPE, *options)
    assert_documented("tune", found)
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert {key: found[key] for key in written} == written
    assert f"batch={found['chosen']}" in found["settings"]


def test_simulate_answers_with_simulation_json(answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remember_networks(monkeypatch)
    more = ["--what-if", "latency=0.5", "--sweep", "gpus=1:2"]
    options = ["--cluster", "dgx-a100", "--gpus", "2", "--out", str(tmp_path / "s"), *more]
    found = answer("simulate", RECIPE, *options)
    assert_documented("simulate", found, but=("exchange_s",))
    written = json.loads((tmp_path / "s" / "simulation.json").read_text())
    assert found == {"folder": str(tmp_path / "s"), **written}


def test_a_simulation_that_fails_at_its_page_prints_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "report.html")

    remember_networks(monkeypatch)
    monkeypatch.setattr("kasoku.commands.simulate._record", full)
    capsys.readouterr()
    assert main(["simulate", RECIPE, "--cluster", "dgx-a100", "--gpus", "2", "--out", str(tmp_path), "--json"]) == 2
    assert (tmp_path / "simulation.json").exists()
    assert capsys.readouterr().out == ""


@pytest.fixture
def plan(answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    remember_networks(monkeypatch)
    monkeypatch.setattr("kasoku.simulate.plan_search.with_searched_groups", lambda chosen: chosen)  # seconds
    one = ["--set", "batch=64"]
    cluster = tmp_path / "desk.toml"
    cluster.write_text(
        'name = "desk"\nnodes = 1\n[node]\ngpus = 1\nport_gb_s = 10.0\nnic_gb_s = 1.0\n[own_gpu]\nname = "core"\n'
        "alpha_ms = 5.0\nbeta_ms = 0.2\nleast = 8\nmost = 512\ntflops = 0.2\nmemory_gb_s = 20\nusd_hour = 0.05\n"
    )
    return answer("plan", RECIPE, "--cluster", str(cluster), "--fastest", "--out", str(tmp_path / "plan"), *one)


def test_plan_answers_with_plan_json(plan: dict[str, Any], tmp_path: Path):
    assert_documented("plan", plan, but=("exchange_s",))
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan == {"folder": str(tmp_path / "plan"), **written}


def test_profile_answers_with_profile_and_ledger(answer: Answer, tmp_path: Path):
    found = answer("profile", RECIPE, "--steps", "1", "--out", str(tmp_path / "p"), *ONE)
    assert_documented("profile", found)
    for name in ("profile", "ledger"):
        assert found[name] == json.loads((tmp_path / "p" / f"{name}.json").read_text())


def test_list_answers_with_names_and_with_the_settings_of_one(answer: Answer):
    assert "kasoku.models.resnet50" in answer("list")["models"]
    assert "digits_cnn_98" in answer("list")["recipes"]
    found = answer("list", "EMA")
    assert_documented("list NAME", found)
    assert found["name"] == "kasoku.optim.EMA"
    assert {"name": "decay", "type": "number", "default": "0.999"}.items() <= found["settings"][0].items()


def test_a_command_that_fails_prints_no_object(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "resnet5", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean resnet50?" in captured.err


def test_numbers_that_json_lacks_are_null():
    assert json.loads(json_text({"a": [float("nan"), float("inf"), 0.5]})) == {"a": [None, None, 0.5]}
