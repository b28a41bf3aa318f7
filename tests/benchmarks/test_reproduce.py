"""`kasoku reproduce`: experiments as commands, claims and figures; what it prints, keeps and leaves out."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from kasoku.cli import main
from kasoku.config import toml
from kasoku.config.shipped import RECIPES
from kasoku.core.files import read_json

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import claims  # noqa: E402 - after its folder
import reproduce  # noqa: E402

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

WATCHES_ITS_LOG = """import json, time
from pathlib import Path
print("measuring")
end = time.monotonic() + 10
while not (works := Path("../fails.log").read_text() == "measuring\\n") and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps({"works": works}))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one document and two benchmarks."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "double.py").write_text(DOUBLE)
    (tmp_path / "benchmarks" / "fails.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "009.toml").write_text(PLANTED)
    monkeypatch.setattr(claims, "DOCUMENTS", {"009": tmp_path / "009.toml"})
    monkeypatch.setattr(claims, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("ends", "verdict", "shown"),
    [([0.1, 0.5], "holds", "0.3 points (0.1 to 0.5)"), ([-0.1, 0.7], "undecided", "0.3 points (-0.1 to 0.7)")],
)
def test_a_bound_inside_the_interval_decides_nothing(ends: list[float], verdict: str, shown: str) -> None:
    claim = {"claim": "one is better", "value": "both.gain", "unit": "points", "holds": "> 0"}
    part = {"name": "compared", "section": "1", "claims": [claim]}
    results = {"compared": {"both": {"gain": 0.3, "gain_interval": ends}}}
    (row,) = claims.rows({"parts": [part]}, {}, results, {})
    assert (row.verdict_recorded, row.recorded) == (verdict, shown)


@pytest.mark.process
def test_claims_are_held_against_what_the_commands_found(planted, capsys):
    assert main(["reproduce", "009", "--part", "twice", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert "HOLDS: the double is twice the number (published: 2; holds if 1.99 to 2.01): here 2 times" in out
    assert "DOES NOT HOLD: the number is small (holds if < 3): here 20: it was large" in out  # a result: exit code 0
    assert "NOT SHOWN HERE: it was done on 64 GPUs (published: 27 times one GPU): no GPU" in out
    assert "holds 1, does not hold 1, undecided 0, not shown here 2" in out
    page = (planted / "out" / "report.html").read_text()
    assert "the double is twice the number" in page
    assert "published: theirs" in page
    for head in ("holds if", "verdict here", "verdict recorded"):
        assert f"<th>{head}</th>" in page
    assert "<td>1.99 to 2.01</td>" in page
    assert claims.LEGEND in page
    assert "--part twice: A number and its double; two numbers." in page
    assert '<table class="prose">' in page
    log = planted / "out" / "short" / "twice" / "double.log"
    assert "measuring" in log.read_text()
    assert f"its output: {log}" in out


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
    assert "NOT SHOWN HERE: it works (holds if true): fails crashed" in said.out


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
    assert "the number is small (holds if < 3): here 20, recorded 2,099 (does not hold)" in out
    # results of another part stay beside it
    assert main(["reproduce", "009", "--part", "broken", "--long"]) == 0
    out = capsys.readouterr().out
    assert "the number is small (holds if < 3): recorded 2,099: left out by --part" in out
    assert "NOT SHOWN HERE: it works (holds if true): this part has no --long form" in out


@pytest.mark.process
def test_this_run_is_judged_whatever_was_recorded(planted, capsys):
    main(["reproduce", "009", "--part", "twice", "--long", "--record"])
    text = (planted / "009.toml").read_text()
    (planted / "009.toml").write_text(text.replace('"< 3"', '"< 100"'))
    capsys.readouterr()
    main(["reproduce", "009", "--part", "twice", "--out", "out"])
    out = capsys.readouterr().out
    assert "\nHOLDS: the number is small (holds if < 100): here 20, recorded 2,099 (does not hold)\n" in out
    assert "holds 2, does not hold 0, undecided 0, not shown here 2" in out
    page = (planted / "out" / "report.html").read_text()
    assert re.search("<td>20</td><td>holds</td><td>2,099</td><td>does not hold</td>", page)


@pytest.mark.process
def test_a_long_run_is_labelled_here_and_keeps_the_short_one(planted, capsys):
    main(["reproduce", "009", "--part", "twice", "--out", "out"])
    main(["reproduce", "009", "--part", "twice", "--out", "out", "--long"])
    assert "the number is small (holds if < 3): here 2,099" in capsys.readouterr().out
    values = [read_json(planted / "out" / length / "twice" / "double.json")["result"] for length in ("short", "long")]
    assert [value["numbers"] for value in values] == [[21], [2100]]


def test_a_part_without_the_form_asked_for_says_which_it_has(planted, capsys):
    text = PLANTED.replace("short = ", "full = ")
    (planted / "009.toml").write_text(text)
    assert main(["reproduce", "009"]) == 0
    out = capsys.readouterr().out
    assert "holds if 1.99 to 2.01): it runs only with --long or --full" in out
    assert "it works (holds if true): it runs only with --full" in out
    assert main(["reproduce", "009", "--part", "twice", "--list"]) == 0


def test_its_parts_are_listed(planted, capsys):
    assert main(["reproduce", "009", "--list"]) == 0
    assert capsys.readouterr().out == "twice: A number and its double\nbroken: A program that fails\n"


def test_help_names_the_documents_that_are_there(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    assert ", ".join(claims.DOCUMENTS) in capsys.readouterr().out


@pytest.mark.process
def test_a_claim_of_our_own_is_counted_apart(planted, capsys):
    own = 'claim = "the number is small"\nsection = "3"\nown = true\n'
    (planted / "009.toml").write_text(PLANTED.replace('claim = "the number is small"\n', own))
    main(["reproduce", "009", "--part", "twice", "--out", "out"])
    out = capsys.readouterr().out
    assert "DOES NOT HOLD: the number is small (ours; holds if < 3): here 20" in out
    assert (
        "holds 1, does not hold 0, undecided 0, not shown here 2, figure only 0; ours: holds 0, does not hold 1" in out
    )
    page = (planted / "out" / "report.html").read_text()
    assert "<td>3</td><td>the number is small</td><td>ours</td>" in page


@pytest.mark.process
def test_a_command_that_a_signal_stopped_is_not_called_crashed(planted, capsys):
    (planted / "benchmarks" / "fails.py").write_text("raise SystemExit(75)")
    assert main(["reproduce", "009", "--part", "broken", "--out", "out"]) == 1
    said = capsys.readouterr()
    assert "broken/fails: stopped by a signal after 0 s: repeat with --out to go on" in said.err
    assert "it works (holds if true): fails stopped" in said.out


@pytest.mark.process
def test_output_is_in_the_log_while_a_command_runs(planted):
    (planted / "benchmarks" / "fails.py").write_text(WATCHES_ITS_LOG)
    main(["reproduce", "009", "--part", "broken", "--out", "out"])
    assert read_json(planted / "out" / "short" / "broken" / "fails.json")["result"] == {"works": True}


@pytest.mark.process
def test_a_null_value_is_not_shown_with_the_reason_of_its_command(planted, capsys):
    text = DOUBLE.replace('2 * n, "one"', 'None, "null_because": "it is too large", "one"')
    (planted / "benchmarks" / "double.py").write_text(text)
    assert main(["reproduce", "009", "--part", "twice", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert "the double is twice the number (published: 2; holds if 1.99 to 2.01): it is too large" in out
    assert "here 20: it was large" in out  # a claim that has its value


@pytest.mark.process
def test_commands_find_images_under_a_relative_path(planted, monkeypatch):
    text = 'import json, os\nprint(json.dumps({"works": os.path.isdir(os.environ["KASOKU_DATA"] + "/cifar10")}))\n'
    (planted / "benchmarks" / "fails.py").write_text(text)
    (planted / "images" / "cifar10").mkdir(parents=True)
    monkeypatch.setenv("KASOKU_DATA", "images")
    main(["reproduce", "009", "--part", "broken", "--out", "out"])
    assert read_json(planted / "out" / "short" / "broken" / "fails.json")["result"] == {"works": True}


@pytest.mark.process
def test_the_page_has_what_kasoku_profile_found(planted):
    profiled = ("kasoku profile digits_cnn_98 --steps 2 --set batch=16 --set device.kind=cpu --out {out}",)
    (planted / "009.toml").write_text(PLANTED.replace("benchmarks/fails.py", *profiled).replace("fails.works", ""))
    assert main(["reproduce", "009", "--part", "broken", "--out", "out"]) == 0
    page = (planted / "out" / "report.html").read_text()
    assert '<h2 id="run-0">broken/fails</h2>' in page
    assert "Idle gaps" in page


def test_a_profile_is_drawn_as_the_use_of_the_device_over_time():
    kernels = {"step_s": 2.0, "used": [["kernels", 0.5, 1.0, 1.0]]}
    parts = {"step_s": 1.0, "used": [["input", 0.0, 0.25, 0.5], ["update", 0.25, 1.0, 0.75]]}
    points = claims.use_by_second([kernels, parts])
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
    monkeypatch.setattr("kasoku.commands.reproduce.BENCHMARKS", planted / "benchmarks")
    assert main(["reproduce", "009"]) == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize("set_to", [None, "", "images"])
def test_a_part_without_the_images_it_needs_says_how_to_get_them(planted, capsys, monkeypatch, set_to):
    text = PLANTED.partition("[parts.commands.double]")
    (planted / "009.toml").write_text(f'{text[0]}needs = ["data:fashion_mnist"]\n{text[1]}{text[2]}')
    (planted / "images" / "cifar10").mkdir(parents=True)
    monkeypatch.delenv("KASOKU_DATA", raising=False)
    if set_to is not None:
        monkeypatch.setenv("KASOKU_DATA", set_to)
    assert main(["reproduce", "009", "--part", "twice"]) == 0
    shown = "NOT SHOWN HERE: the double is twice the number (published: 2; holds if 1.99 to 2.01)"
    remedy = "kasoku data fashion-mnist --to DIR; export KASOKU_DATA=DIR"
    assert f"{shown}: it needs $KASOKU_DATA/fashion_mnist: {remedy}\n" in capsys.readouterr().out


@pytest.mark.process
def test_only_the_commands_that_lack_something_are_left_out(planted, capsys, monkeypatch):
    other = '[parts.commands.other]\nneeds = ["cc"]\nlong_needs = []\nshort = "benchmarks/double.py 1"\n'
    other += 'long = "benchmarks/double.py 1"\n\n[[parts.claims]]\nclaim = "so is one"\nvalue = "other.doubled"\n\n'
    (planted / "009.toml").write_text(PLANTED.replace("[[parts.claims]]", other + "[[parts.claims]]", 1))
    monkeypatch.setitem(reproduce.NEEDS, "cc", (lambda: False, "it needs a C compiler"))
    assert main(["reproduce", "009", "--part", "twice"]) == 0
    out = capsys.readouterr().out
    assert "NOT SHOWN HERE: so is one: it needs a C compiler" in out
    assert "\nHOLDS: the double is twice" in out
    main(["reproduce", "009", "--part", "twice", "--long"])
    assert "FIGURE ONLY: so is one: here 2" in capsys.readouterr().out


@pytest.mark.parametrize("lacks", ["ip", "tc", "taskset", "root"])
def test_root_alone_is_not_enough_for_hosts(monkeypatch, tmp_path, lacks):
    for program in {"ip", "tc", "taskset"} - {lacks}:
        (tmp_path / program).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: int(lacks == "root"))
    assert not reproduce.NEEDS["root"][0]()
    (tmp_path / lacks).touch(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert reproduce.NEEDS["root"][0]()


# ---- the documents


def parts() -> list[tuple[str, dict]]:
    return [(f"{name}-{part['name']}", part) for name in claims.DOCUMENTS for part in claims.read(name)["parts"]]


def images_of(command: str) -> set[str]:
    """The folders of KASOKU_DATA that a command names, or else that its recipe of a document reads."""
    named = set(re.findall(r"(?:\$KASOKU_DATA/|kasoku\.data\.)([a-z]\w+)", command))
    recipe = next((word for word in command.split() if word.startswith("documents/")), "")
    if named or not recipe or command.startswith("kasoku simulate"):
        return named
    data = toml.read(RECIPES[recipe])["data"]
    return {Path(data["root"]).name or data["use"].rpartition(".")[2]} if "root" in data else set()


@pytest.mark.parametrize("name", claims.DOCUMENTS)
def test_the_page_of_documents_has_a_section_for_each(name):
    assert f"\n## [{name}] " in (ROOT / "docs" / "documents.md").read_text()


@pytest.mark.parametrize("part", [pytest.param(part, id=name) for name, part in parts()])
def test_what_a_part_names_is_there(part):
    assert {"name", "section", "title", "claims"} <= set(part)
    assert set(part.get("needs", [])) <= set(reproduce.NEEDS)
    commands = part.get("commands", {})
    assert not commands or part["set"]
    for texts in commands.values():
        needs = {key: texts[key] for key in texts if key.endswith("needs")}
        assert set(needs) <= {"needs", "full_needs"}
        assert {need for each in needs.values() for need in each} <= set(reproduce.NEEDS)
        lengths = {key: texts[key] for key in texts if key not in needs}
        assert lengths
        assert set(lengths) <= {"short", "long", "full"}
        for length, text in lengths.items():
            named = {*part.get("needs", []), *needs.get(f"{length}_needs", needs.get("needs", []))}
            assert images_of(text) <= {need.removeprefix("data:") for need in named}, text
            verb, *rest = shlex.split(text)
            assert verb == "kasoku" or (ROOT / verb).is_file(), text
            assert all(word in RECIPES for word in rest if word.startswith("documents/")), text
    values = [claim["value"] for claim in part["claims"] if "value" in claim]
    values += [value for figure in part.get("figures", []) for value in figure["lines"].values()]
    for value in values:
        assert claims.value_of(value, {}) is None, value
        assert {key.partition(".")[0] for key in re.split(" [-/] ", value)} <= set(commands), value
    for claim in part["claims"]:
        assert set(claim) <= {"claim", "section", "published", "value", "unit", "holds", "why", "own"}
        assert claim.get("own", True) is True, claim
        assert "value" in claim or "why" in claim, claim  # what is not shown has a reason
        assert re.fullmatch(r"(<=?|>=?) -?[\d.]+|-?[\d.]+ to -?[\d.]+|true|false|", claim.get("holds", "")), claim
