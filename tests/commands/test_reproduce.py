"""`kasoku reproduce`: experiments as commands, claims and figures; what it prints, keeps and leaves out."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kasoku.cli import main
from kasoku.commands import reproduce
from kasoku.config.shipped import RECIPES
from kasoku.report import documents

ROOT = Path(__file__).parents[2]
PLANTED = """
title = "[009] planted"
source = "nobody"

[[parts]]
name = "twice"
section = "1"
title = "A number and its double"
set = "two numbers"

[parts.commands.double]
short = "benchmarks/double.py 21"
long = "benchmarks/double.py 2100"

[[parts.claims]]
claim = "the double is twice the number"
published = "2"
value = "double.doubled / double.numbers.0"
unit = "times"
holds = "1.99 to 2.01"

[[parts.claims]]
claim = "the number is small"
value = "double.numbers.0 - double.one"
holds = "< 3"
why = "it was large"

[[parts.claims]]
claim = "it was done on 64 GPUs"
published = "27 times one GPU"
why = "no GPU"

[[parts.figures]]
title = "Fig. 1"
x = "number"
y = "double"
published = { "theirs" = [[64, 27.0]] }
lines = { "ours" = "double.curve" }

[[parts]]
name = "broken"
section = "2"
title = "A program that fails"

[parts.commands.fails]
short = "benchmarks/fails.py"

[[parts.claims]]
claim = "it works"
value = "fails.works"
holds = "true"
"""
DOUBLE = """import json, sys
n = int(sys.argv[1])
print("measuring")
print(json.dumps({"numbers": [n], "doubled": 2 * n, "one": 1.0, "curve": [[n, 2 * n]]}))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one document and two benchmarks."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "double.py").write_text(DOUBLE)
    (tmp_path / "benchmarks" / "fails.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "009.toml").write_text(PLANTED)
    monkeypatch.setattr(documents, "DOCUMENTS", {"009": tmp_path / "009.toml"})
    monkeypatch.setattr(documents, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.process
def test_claims_are_held_against_what_the_commands_found(planted, capsys):
    assert main(["reproduce", "009", "--part", "twice", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert "HOLDS: the double is twice the number (published: 2): here 2 times" in out
    assert "DOES NOT HOLD: the number is small: here 20" in out  # a result, so the exit code is 0
    assert "NOT SHOWN HERE: it was done on 64 GPUs (published: 27 times one GPU): no GPU" in out
    assert "1 holds, 1 does not hold, 2 not shown here" in out
    page = (planted / "out" / "report.html").read_text()
    assert "the double is twice the number" in page
    assert "published: theirs" in page
    assert "measuring" in (planted / "out" / "twice" / "double.log").read_text()


@pytest.mark.process
def test_what_is_done_is_not_done_again_in_the_same_folder(planted, capsys):
    main(["reproduce", "009", "--part", "twice", "--out", "out"])
    (planted / "benchmarks" / "double.py").write_text("raise SystemExit(9)")
    assert main(["reproduce", "009", "--part", "twice", "--out", "out"]) == 0
    assert "twice/double: done before" in capsys.readouterr().out
    assert main(["reproduce", "009", "--part", "twice"]) == 1  # a folder of its own measures anew


@pytest.mark.process
def test_a_command_that_crashes_is_named_and_stops_no_other(planted, capsys):
    assert main(["reproduce", "009"]) == 1
    said = capsys.readouterr()
    assert "broken/fails: exit code 1" in said.err
    assert "no such thing" in said.err
    assert "HOLDS: the double is twice" in said.out
    assert "NOT SHOWN HERE: it works: fails crashed" in said.out


@pytest.mark.process
def test_a_result_without_the_key_of_a_claim_is_a_crash(planted, capsys):
    (planted / "benchmarks" / "double.py").write_text("print('{}')")
    assert main(["reproduce", "009", "--part", "twice", "--out", "out"]) == 1
    assert "double.doubled: the result of double has no doubled" in capsys.readouterr().err


@pytest.mark.process
def test_long_results_are_kept_and_stand_beside_short_ones(planted, capsys):
    assert main(["reproduce", "009", "--part", "twice", "--long", "--record"]) == 0
    kept = json.loads((planted / "records" / "documents" / "009.json").read_text())
    assert kept["twice"]["double"]["result"]["doubled"] == 4200
    assert kept["twice"]["double"]["command"] == "benchmarks/double.py 2100"
    assert {"date", "seconds", "machine", "commit"} <= set(kept["twice"]["double"])
    capsys.readouterr()
    main(["reproduce", "009", "--part", "twice"])
    out = capsys.readouterr().out
    assert "the number is small: here 20, recorded 2,099" in out
    # a command that runs only in its short form
    assert main(["reproduce", "009", "--part", "broken", "--long"]) == 0
    assert "NOT SHOWN HERE: it works: no command of this length, but --short" in capsys.readouterr().out


def test_a_profile_is_drawn_as_the_use_of_the_device_over_time():
    kernels = {"step_s": 2.0, "used": [["kernels", 0.5, 1.0, 1.0]]}
    parts = {"step_s": 1.0, "used": [["input", 0.0, 0.25, 0.5], ["update", 0.25, 1.0, 0.75]]}
    points = documents.use_by_second([kernels, parts])
    assert points[:6] == [[0, 0], [0.5, 0], [0.5, 1], [1, 1], [1, 0], [2, 0]]
    assert points[6:] == [[2, 0.5], [2.25, 0.5], [2.25, 0.75], [3, 0.75]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["001"], "001: no such document; there are 009"),
        (["009", "--part", "twise"], "--part twise: [009] has twice, broken: did you mean twice?"),
        (["009", "--record"], "--record keeps long results: give --long too"),
    ],
)
def test_options_that_do_not_fit_are_refused(planted, capsys, words, line):
    assert main(["reproduce", *words]) == 2
    assert line in capsys.readouterr().err


def test_without_a_checkout_it_says_where_the_benchmarks_are(planted, capsys, monkeypatch):
    monkeypatch.setattr(documents, "IN_CHECKOUT", False)
    assert main(["reproduce", "009"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_a_part_without_what_it_needs_is_not_shown(planted, capsys, monkeypatch):
    text = PLANTED.partition("[parts.commands.double]")
    (planted / "009.toml").write_text(f'{text[0]}needs = ["data"]\n{text[1]}{text[2]}')
    monkeypatch.delenv("KASOKU_DATA", raising=False)
    assert main(["reproduce", "009", "--part", "twice"]) == 0
    assert (
        "NOT SHOWN HERE: the double is twice the number (published: 2): it needs real images" in capsys.readouterr().out
    )


# ---- the five documents


def parts() -> list[tuple[str, dict]]:
    return [(f"{name}-{part['name']}", part) for name in documents.DOCUMENTS for part in documents.read(name)["parts"]]


@pytest.mark.parametrize("part", [pytest.param(part, id=name) for name, part in parts()])
def test_what_a_part_names_is_there(part):
    assert {"name", "section", "title", "claims"} <= set(part)
    assert set(part.get("needs", [])) <= set(reproduce.NEEDS)
    commands = part.get("commands", {})
    assert not commands or part["set"]
    for texts in commands.values():
        assert texts
        assert set(texts) <= {"short", "long", "full"}
        for text in texts.values():
            verb, *rest = shlex.split(text)
            assert verb == "kasoku" or (ROOT / verb).is_file(), text
            assert all(word in RECIPES for word in rest if word.startswith("documents/")), text
    values = [claim["value"] for claim in part["claims"] if "value" in claim]
    values += [value for figure in part.get("figures", []) for value in figure["lines"].values()]
    for value in values:
        assert documents.value_of(value, {}) is None, value
        assert {key.partition(".")[0] for key in re.split(" [-/] ", value)} <= set(commands), value
    for claim in part["claims"]:
        assert set(claim) <= {"claim", "section", "published", "value", "unit", "holds", "why", "own"}
        assert claim.get("own", True) is True, claim
        assert "value" in claim or "why" in claim, claim  # what is not shown has a reason
        assert re.fullmatch(r"(<=?|>=?) -?[\d.]+|-?[\d.]+ to -?[\d.]+|true|false|", claim.get("holds", "")), claim
