"""Records are well-formed, RECORDS.md is written from them, and pages show no figure that differs from its record."""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
import torch

from helpers.figures import figures_in, unproven

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
records = importlib.import_module("records")

WITHOUT_RECORD = {
    "bits": "its figure is the comparison of two checkouts, which is made by hand",
} | dict.fromkeys(
    (
        "batch_sizes",
        "schedules",
        "switched_off",
        "simulate_abci",
        "simulate_k20x",
        "virtual_update",
        "batch_patterns",
        "ensemble",
        "ladder",
        "ring",
        "application",
    ),
    "its figures are claims of a document, which `kasoku reproduce` records",
)
LINES = [line for area in records.AREAS for line in records.newest(records.read(area))]


def names_what_exists(command: str) -> bool:
    """Whether a command begins with a file, `make TARGET` or `kasoku VERB` that is there."""
    first, second = [*command.replace(":", " ").split(), "", ""][:2]
    if first == "make":
        return re.search(rf"^{second}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if first == "kasoku":
        return second == "--help" or (ROOT / "src" / "kasoku" / "commands" / f"{second}.py").is_file()
    return (ROOT / first).is_file()


def mistakes(line: dict) -> Iterator[str]:
    """What is wrong with a measurement."""
    yield from (f"{key} is missing" for key in records.NEEDED if key not in line)
    yield from (f"{key} is unknown" for key in line if key not in records.KEYS)
    if line["better"] not in ("lower", "higher"):
        yield "better is neither lower nor higher"
    for key in ("spread", "earlier"):
        low, high = line.get(key, (0, 0))
        if low > high:
            yield f"{key} is [least, most]"
    low, high = line.get("spread", (line["figure"],) * 2)
    margin = 0.01 * abs(line["figure"])  # a ratio of medians is not the median of ratios
    if not low - margin <= line["figure"] <= high + margin:
        yield "the figure lies outside its spread"
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", line["commit"]):
        yield f"commit {line['commit']}"
    if line["machine"] not in records.machines():
        yield f"machine {line['machine']} is not in machines.json"
    if not date(2026, 11, 1) <= date.fromisoformat(line["date"]) <= date.today():
        yield f"date {line['date']}"
    if not names_what_exists(line["command"]):
        yield f"command {line['command']}"
    records.phrase(line)


def test_every_measurement_is_well_formed():
    assert {file.stem for file in records.FOLDER.glob("*.jsonl")} == {*records.AREAS, *records.OTHER}
    every = [(area, line) for area in records.AREAS for line in records.read(area)]
    wrong = [f"{area}: {line['claim']}: {what}" for area, line in every for what in mistakes(line)]
    areas = {}
    for area, line in every:
        if areas.setdefault(line["claim"], area) != area:
            wrong.append(f"{line['claim']} is in {area} and {areas[line['claim']]}")
    assert not wrong, "\n".join(wrong)


def test_lines_are_only_appended():
    for area in records.AREAS:
        last: dict[tuple[str, str], str] = {}
        for line in records.read(area):
            key = line["claim"], line["machine"]
            assert last.get(key, "") <= line["date"], line
            last[key] = line["date"]


def test_what_did_not_help_is_well_formed():
    needed = {"claim", "subject", "what", "result", "machine", "commit", "date"}
    for line in records.read("did_not_help"):
        assert needed <= line.keys() <= needed | {"n", "command", "note"}, line
        assert line["machine"] in records.machines()
        assert "command" not in line or names_what_exists(line["command"]), line
    assert all(line.keys() == {"what", "state"} for line in records.read("not_seen"))


def test_records_md_is_what_make_records_writes():
    page = records.page()
    assert (ROOT / "RECORDS.md").read_text() == page, "run `make records`"
    assert len(page.splitlines()) <= records.LONGEST_PAGE


def test_each_claim_stands_in_records_md_once_with_what_it_missed():
    page = records.page()
    table = [row.split(" | ") for row in page.splitlines() if re.match(r"\| [\w/]+: ", row)]
    shown = []
    for claim, *_ in table:
        parent, names = claim.removeprefix("| ").split(": ")
        shown += ["/".join(filter(None, (parent, name))) for name in names.split(", ")]
    assert sorted(shown) == sorted({line["claim"] for line in LINES})
    assert page.count(": missed**") == sum(map(records.missed, LINES))


def test_what_falls_short_is_computed():
    line = {"figure": 0.88, "better": "lower", "target": 0.87}
    assert records.missed(line)
    assert records.missed(line | {"better": "higher", "target": 0.89})
    assert not records.missed(line | {"better": "higher"})
    assert not records.missed(line | {"figure": 0.87})
    assert not records.missed({"figure": 1})


# ---- --record


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A records/ of its own with two claims."""
    old = {"claim": "a/b", "text": "the step, {bare} without", "figure": 0.9, "unit": "times", "n": 2, "of": "rounds",
           "better": "lower", "target": 0.8, "beside": {"bare": 3}, "note": "of that run", "machine": "xeon-2c-amx",
           "commit": "c98eac4", "command": "benchmarks/overlap.py", "date": "2026-11-20"}  # fmt: skip
    for area in records.AREAS:
        (tmp_path / f"{area}.jsonl").touch()
    one, two = old, old | {"claim": "a/c", "text": "more", "machine": records.ANY}
    (tmp_path / "tune.jsonl").write_text(f"{json.dumps(one)}\n{json.dumps(two)}\n")
    (tmp_path / "machines.json").write_text((records.FOLDER / "machines.json").read_text())
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return tmp_path


def test_a_recorded_run_replaces_the_newest_figure(folder):
    script = BENCHMARKS / "overlap.py"
    words = [str(script), "--case", "balanced", "--set", "data.root=/where/it/is", "--record"]
    spread = {"median": 0.7, "min": 0.6, "max": 0.75000000012, "n": 4}
    figures = {"ratio": spread, "ms": {"bare": 2, "none": None}, "late": 5, "late_n": 3}
    claims = {"a/b": ("ratio", "ms.bare", "ms.none"), "a/c": "late"}
    first, second = records.append(claims, figures, words, "xeon-2c-amx")
    assert (first["figure"], first["spread"], first["n"], first["beside"]) == (0.7, [0.6, 0.75], 4, {"bare": 2})
    assert (second["figure"], second["n"], second["machine"]) == (5, 3, records.ANY)
    assert first["command"] == "benchmarks/overlap.py --case balanced --set data.root=DIR"
    assert (first["target"], first["text"], first.get("note")) == (0.8, "the step, {bare} without", None)
    assert not list(mistakes(first))
    last, *_ = records.newest(records.read("tune"))
    assert last == first | {"earlier": [0.9, 0.9]}
    records.append({"a/b": ("ratio", "ms.bare")}, figures | {"ratio": 0.95}, words, "epyc-2c-avx2")
    assert [line["figure"] for line in records.newest(records.read("tune"))] == [0.7, 5, 0.95]
    judged = "(**target 0.8: missed**), on A 0.7 (0.6 to 0.75; earlier 0.9; target 0.8)"
    assert f"0.95 times the step, 2 without {judged}" in next(records.rows("tune"))


def test_finish_records_only_with_the_option(folder, monkeypatch, capsys):
    common = importlib.import_module("common")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KASOKU_MACHINE", "epyc-2c-avx512")
    for option, lines in (([], 2), (["--record"], 3)):
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "tune.py"), *option])
        common.parse(argparse.ArgumentParser())
        common.finish("tune", {}, {"late": 7}, {"a/c": "late"})
        assert len(records.read("tune")) == lines
    assert records.read("tune")[-1]["command"] == "benchmarks/tune.py"
    assert "recorded 1 measurements" in capsys.readouterr().err


def test_a_run_without_a_claim_or_a_figure_of_its_sentence_records_nothing(folder):
    before = (folder / "tune.jsonl").read_text()
    with pytest.raises(SystemExit, match="a/unheard: no such claim"):
        records.append({"a/unheard": "x"}, {"x": 1}, ["benchmarks/tune.py"], "epyc-2c-avx2")
    with pytest.raises(KeyError, match="bare"):
        records.append({"a/c": "x", "a/b": "x"}, {"x": 1}, ["benchmarks/tune.py"], "epyc-2c-avx2")
    assert records.append({"a/c": "x"}, {"x": None}, ["benchmarks/tune.py"], "epyc-2c-avx2") == []
    assert (folder / "tune.jsonl").read_text() == before


def test_a_machine_is_known_by_its_processor(monkeypatch):
    info = "processor\t: 0\nmodel name\t: {}\nflags\t\t: fpu {}\n"
    assert records.processor_key(info.format("Intel(R) Xeon(R)", "avx512_bf16 amx_bf16 avx2"), 2) == "xeon-2c-amx"
    assert records.processor_key(info.format("AMD EPYC", "avx2 avx512f avx512_bf16"), 2) == "epyc-2c-avx512"
    assert records.processor_key(info.format("AMD EPYC 7763", "avx2"), 2) == "epyc-2c-avx2"
    assert re.fullmatch(r"[a-z]+-8c-\w+", records.processor_key("", 8))
    monkeypatch.setenv("KASOKU_MACHINE", "of-my-own")
    assert records.machine_key() == "of-my-own"


def claims_of(name: str) -> set[str]:
    """All claims that a benchmark may record."""
    module = importlib.import_module(name)
    found = {key: value for key, value in vars(module).items() if key.endswith("CLAIMS")}
    if name == "overlap":
        cases = [("resnet18", case) for case in module.MODES] + [("alexnet", "balanced"), ("vgg16", "balanced")]
        return {f"overlap/{model}/{case}/{claim}" for model, case in cases for claim in module.CLAIMS}
    if name == "memory":
        return {claim for case in module.CASES for claim in case.claims} | set(module.FORESEEN)
    if name == "time_to_accuracy":
        return set(module.claims("recipes/cifar10_cifarnet_94.toml", rival=True)).union(
            *(module.claims(recipe, rival=False) for recipe in module.SUBJECTS)
        )
    if name.startswith("asynchronous"):
        return {claim for claims in module.CLAIMS.values() for claim in claims}
    return {claim for claims in found.values() for claim in claims}


def test_every_benchmark_records_claims_that_are_there(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    known = {line["claim"] for line in LINES}
    for script in BENCHMARKS.glob("*.py"):
        text = script.read_text()
        if not re.search(r"^    +finish\(", text, re.MULTILINE):
            continue
        can = " parse(" in text or script.stem == "asynchronous_hosts"  # which asynchronous.py calls
        assert can != (script.stem in WITHOUT_RECORD), script.name
        if can and script.stem != "gpu":  # whose benchmarks record for themselves
            claims = claims_of(script.stem)
            assert claims, script.name
            assert claims <= known, (script.name, claims - known)


# ---- pages


def measured(line: str) -> list[str]:
    return [f"{number} {unit}".strip() for number, unit, looks_measured in figures_in(line) if looks_measured]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("| CIFAR-10 | 408 s; 94.28 % |", ["408 s", "94.28 %"]),
        ("trains 1.85 times as fast, 25 to 29 times over gloo", ["1.85 times", "25 times", "29 times"]),
        ("takes 0.80 to 0.96 of DDP's step", ["0.80", "0.96"]),
        (
            "2x the images/s, 16.67 images/s, 0.3 points, 51.4 us",
            ["2 times", "16.67 images/s", "0.3 points", "51.4 us"],
        ),
        ("-0.04 points, 1,131 ms", ["-0.04 points", "1,131 ms"]),
        ("torch 2.13.0 of 2026-11-20 on Python 3.11, version 1.25, Apache-2.0, v0.6, 8x8 digits", []),
        ("3 seeds, 2 cores, batch 4,096, 224 pixels, ResNet-50, [a](https://a.b/1.07 s)", []),
        ("saves every 300 s (`save.every_s`, 300 s), `--deadline 10min` 10 min, at a rate of 0.05", []),
        ("`lr` is `0.05`, momentum 0.99, `norm_batch=32`: 0.25", []),
        ("`kasoku.memory.SavedMemory`: 2.1 times the batch; `resnet50` 5.1 times", ["2.1 times", "5.1 times"]),
    ],
)
def test_what_looks_measured(line, found):
    assert measured(line) == found


RECORD = {"claim": "a/b/over", "figure": 5.087, "unit": "times", "spread": [5.022, 5.507], "target": 4,
          "text": "the images/s of PyTorch's defaults", "beside": {"images_per_s": {"ours": 16.67}}}  # fmt: skip
SLOWER = {"claim": "a/b/slower", "figure": 1.0246, "unit": "times", "text": "a bare loop", "earlier": [0.93, 0.93]}


@pytest.mark.parametrize(
    "line",
    [
        "5.1 times the images/s (16.67 images/s) <!-- record: a/b/over -->",
        "5.09 (5.02 to 5.51), where 4 times was wanted <!-- record: a/b/over -->",
        "| overhead | 2.5 % | <!-- record: a/b/slower --> |",
        "5.1 times, 1.02 times <!-- record: a/b/over, a/b/slower -->",
        "5.1 times, 1.02 times <!-- record: a/b -->",
        "2.59 s on an A100 <!-- not measured: by its author -->",
        "no figure",
        "```\n6.1 times\n```",
    ],
)
def test_a_figure_that_is_its_record_passes(line):
    assert unproven(line, [RECORD, SLOWER]) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("5.2 times <!-- record: a/b/over -->", "5.2 times is no figure of a/b/over"),
        ("5.0 times <!-- record: a/b/over -->", "5.0 times is no figure"),
        ("up to 5.5 times <!-- record: a/b/over -->", "5.5 times is no figure"),
        ("4 times the images/s <!-- record: a/b/over -->", "4 times is no figure"),
        ("0.93 times <!-- record: a/b/slower -->", "0.93 times is no figure"),
        ("5.087 s <!-- record: a/b/over -->", "5.087 s is no figure"),
        ("5.1 times, 17.67 images/s <!-- record: a/b/over -->", "17.67 images/s is no figure"),
        ("2.4 % <!-- record: a/b/slower -->", "2.4 % is no figure"),
        ("5.1 times <!-- record: a/b/slower -->", "5.1 times is no figure"),
        ("5.1 times <!-- record: a/unheard -->", "no claim a/unheard in records/"),
        ("5.1 times <!-- record: a/b/ov -->", "no claim a/b/ov in records/"),
        ("5.1 times", "5.1 times: of which record"),
        ("takes 0.87 of it", "0.87: of which record"),
        ("5.1 times <!-- not measured: -->", "not measured: why not?"),
        ("```\ncode\n```\n7 s", "line 4: 7 s: of which record"),
    ],
)
def test_a_planted_wrong_figure_is_named(line, wrong):
    found = unproven(line, [RECORD, SLOWER])
    assert len(found) == 1
    assert wrong in found[0]


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))])
def test_every_measured_figure_of_a_page_is_its_newest_record(page):
    wrong = unproven((ROOT / page).read_text(), [*LINES, *records.read("did_not_help")])
    assert not wrong, f"{page}: {len(wrong)} figures\n" + "\n".join(wrong)
