"""The page of `kasoku report`: opened in a real browser, and what is in it and what is said to be missing."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from contracts import make, train
from helpers import browser, shown
from helpers.browser import Opened
from kasoku.cli import main
from kasoku.commands.report import read
from kasoku.core import Comm, Threads
from kasoku.distributed import OneBucket, Overlap
from kasoku.report.html import RunRecord

HOSTILE = ("<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked=1'>", "</script><b>bold face")
needs_plotly = pytest.mark.usefixtures("figures")


@pytest.fixture(scope="module")
def chromium():
    why = browser.missing()
    if why:
        pytest.skip(why)
    with browser.chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(digits_run, tmp_path_factory) -> Path:
    """A run with a ledger and a timeline of two ranks, and with what tuning found."""
    run = shutil.copytree(digits_run, tmp_path_factory.mktemp("runs") / "digits-1")
    shown.write(run, ledger=shown.ledger(), timeline=shown.timeline(), tuning=shown.tuning())
    return run


@pytest.fixture(scope="module")
def one(trained, figures) -> Path:
    """The page of one run."""
    assert main(["report", str(trained)]) == 0
    return trained / "report.html"


def charts_of(file: Path) -> list[dict]:
    return json.loads(re.search(r'id="charts">(.*?)</script>', file.read_text(), re.S)[1])


@needs_plotly
def test_the_page_shows_the_ledger_and_steps_of_a_training(digits_run, tmp_path):
    out = tmp_path / "page.html"
    assert main(["report", str(digits_run), "--out", str(out)]) == 0
    ledger = json.loads((digits_run / "ledger.json").read_text())
    charts = {chart["key"]: chart for chart in charts_of(out)}
    drawn = {trace["name"]: trace["x"][0] for trace in charts["ledger-0"]["data"]}
    assert drawn["forward"] == ledger["rows"]["forward"] > 0
    assert ledger["verdict"][0]["cause"] in shown.text_of(out)
    spans = json.loads((digits_run / "timeline.json").read_text())["spans"]
    assert {trace["name"] for trace in charts["timeline-0"]["data"]} == {span["kind"] for span in spans} >= {"backward"}


def within(opened: Opened, width: int) -> None:
    """Nothing of the page, and of its charts, is wider than the window."""
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('.main-svg, section, figure')]"
    right = f"Math.max(...{parts}.map(e => e.getBoundingClientRect().right))"
    assert opened.page.evaluate(right) <= width


# ---- in the browser


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_page_is_drawn_whole_without_errors_or_the_network(chromium, one, width, dark):
    with Opened(chromium, one, width=width, dark=dark) as opened:
        for chart in charts_of(one):
            assert opened.page.locator(f"#{chart['key']} .main-svg").count() > 0, chart["key"]
        assert opened.page.locator("#timeline-0 .point").count() == len(shown.timeline()["spans"])
        assert opened.page.locator("#confusion-0 .hm").count() == 1
        drawn = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        assert opened.page.locator(".gallery img").count() == 16
        assert opened.page.evaluate(drawn)
        within(opened, width)
        assert opened.errors == []
        assert {url.split(":")[0] for url in opened.asked} <= {"file", "data", "blob"}


@pytest.mark.browser
def test_the_theme_follows_the_system_until_the_button_is_pressed(chromium, one):
    ink = "getComputedStyle(document.body).color"
    drawn = "getComputedStyle(document.querySelector('#accuracy .xtick text')).fill"
    for dark in (False, True):
        with Opened(chromium, one, dark=dark) as opened:
            before = opened.page.evaluate(ink)
            assert opened.page.evaluate(drawn) == before
            opened.page.click("#theme")
            opened.page.wait_for_function(f"{drawn} === {ink} && {ink} !== '{before}'")
            opened.page.emulate_media(color_scheme="light" if dark else "dark")  # what was pressed stays
            assert opened.page.evaluate(ink) != before
            opened.page.click("#theme")
            opened.page.wait_for_function(f"{drawn} === {ink} && {ink} === '{before}'")
            assert opened.errors == []


@pytest.mark.browser
def test_a_click_on_a_legend_hides_its_line(chromium, one):
    with Opened(chromium, one) as opened:
        hidden = "document.getElementById('accuracy').data.filter(t => t.visible === 'legendonly').length"
        assert opened.page.evaluate(hidden) == 0
        opened.page.locator("#accuracy .legendtoggle").first.click()
        opened.page.wait_for_function(f"{hidden} === 1")
        assert opened.errors == []


@pytest.mark.browser
def test_the_timeline_zooms_and_shows_the_span_under_the_mouse(chromium, one):
    with Opened(chromium, one) as opened:
        place = opened.page.locator("#timeline-0")
        place.scroll_into_view_if_needed()
        bar = opened.page.locator("#timeline-0 .point path").first.bounding_box()
        opened.page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2, steps=3)
        opened.page.wait_for_selector("#timeline-0 .hoverlayer .hovertext")
        assert " ms, from " in opened.page.locator("#timeline-0 .hoverlayer").text_content()
        box = opened.page.locator("#timeline-0 .nsewdrag").first.bounding_box()
        x, y = box["x"], box["y"] + box["height"] / 2
        span = "(r => r[1] - r[0])(document.getElementById('timeline-0').layout.xaxis.range)"
        before = opened.page.evaluate(span)
        opened.page.mouse.move(x + 0.2 * box["width"], y)
        opened.page.mouse.down()
        opened.page.mouse.move(x + 0.4 * box["width"], y, steps=4)
        opened.page.mouse.up()
        opened.page.wait_for_function(f"{span} < {0.3 * before}")
        assert opened.errors == []


@pytest.mark.browser
@pytest.mark.smoke
def test_names_given_by_users_are_shown_and_never_run(chromium, trained, tmp_path, figures):
    run = shown.run_folder(tmp_path / "<b>run & <img src=x onerror='window.hacked=1'>")
    parts = {"ledger": shown.ledger(line=HOSTILE[1]), "timeline": shown.timeline(name=HOSTILE[0])}
    shown.write(run, tuning=shown.tuning(), classes=shown.classes(HOSTILE), **parts)
    out = tmp_path / "page.html"
    assert main(["report", str(run), str(trained), "--out", str(out)]) == 0
    with Opened(chromium, out) as opened:
        assert opened.page.evaluate("window.hacked === undefined")
        ticks = opened.page.locator("#accuracies-0 .ytick text").all_text_contents()
        assert sorted(ticks) == sorted(f"{name[:15]}…" for name in HOSTILE)
        labels = opened.page.locator(".gallery figcaption b:first-child").all_text_contents()[:3]
        assert labels == list(HOSTILE)
        assert "<b>run & <img src=x onerror" in opened.page.locator("main").inner_text()
        legend = "".join(opened.page.locator("#accuracy .legendtext").all_text_contents())
        assert "<b>run & <img src=x" in legend
        assert opened.errors == []
        within(opened, 1280)


# ---- what is in it


@needs_plotly
def test_every_chart_is_one_that_plotly_takes(one, tmp_path):
    from plotly.graph_objects import Figure

    other = shown.run_folder(tmp_path / "other")
    shown.write(other, tuning=shown.tuning())
    both = tmp_path / "both.html"
    assert main(["report", str(one.parent), str(other), "--out", str(both)]) == 0
    found = {chart["key"]: chart for file in (one, both) for chart in charts_of(file)}
    assert set(found) == {
        *("loss", "rate", "accuracy", "accuracy-time", "utilization", "memory", "ledgers", "ledger-0", "timeline-0"),
        *("tuning-0", "tuning-image-0", "tuning-1", "tuning-image-1", "accuracies-0", "confusion-0"),
    }
    for chart in found.values():
        Figure(data=chart["data"], layout=chart["layout"])  # raises on a property it does not know


def test_the_curves_are_those_of_the_log_with_the_target(one):
    lines = [json.loads(line) for line in (one.parent / "metrics.jsonl").read_text().splitlines()]
    tests = [line for line in lines if "test_top1" in line]
    charts = {chart["key"]: chart["data"] for chart in charts_of(one)}
    assert charts["accuracy"][0]["x"] == [line["epoch"] for line in tests]
    assert charts["accuracy"][0]["y"] == [line["test_top1"] for line in tests]
    assert charts["accuracy"][1]["y"] == [0.98, 0.98]
    assert charts["loss"][0]["y"] == [line["loss"] for line in lines if "loss" in line]
    assert charts["rate"][0]["y"] == [line["lr"] for line in lines if "lr" in line]
    assert charts["utilization"][0]["y"] == [line["utilization"] for line in lines if "loss" in line]
    assert [trace["y"][-1] for trace in charts["memory"]] == [
        next(line[name] for line in reversed(lines) if name in line) for name in ("memory_bytes", "memory_peak_bytes")
    ]
    seconds = charts["accuracy-time"][0]["x"]
    result = json.loads((one.parent / "result.json").read_text())
    assert 0 < seconds[0] < seconds[-1] < result["seconds"] + 1


def test_the_chosen_batch_is_marked_with_its_interval(one):
    star = charts_of(one)[[c["key"] for c in charts_of(one)].index("tuning-0")]["data"][2]
    sample = next(s for s in shown.tuning()["samples"] if s["batch"] == 96)
    assert (star["x"], star["y"]) == ([96], [sample["images_per_s"]])
    assert star["error_y"]["array"][0] == pytest.approx(96 / sample["low_s"] - sample["images_per_s"])
    assert star["error_y"]["arrayminus"][0] == pytest.approx(sample["images_per_s"] - 96 / sample["high_s"])
    assert "Chosen by TimeToTarget: batch 96" in shown.text_of(one)
    per_image, used, star = charts_of(one)[[c["key"] for c in charts_of(one)].index("tuning-image-0")]["data"][:3]
    tried = [s for s in shown.tuning()["samples"] if not s["failed"]]
    assert per_image["y"] == pytest.approx([1e3 * s["step_s"] / s["batch"] for s in tried])
    assert used["y"] == [s["utilisation"] for s in tried]
    assert star["y"] == pytest.approx([1e3 * sample["step_s"] / 96])
    assert star["error_y"]["array"][0] == pytest.approx(1e3 * (sample["high_s"] - sample["step_s"]) / 96)


def test_the_verdict_and_the_medians_of_a_step_are_in_words_and_figures(one):
    said = re.sub(r"\s+", " ", shown.text_of(one))
    assert "input-bound (12%): 12 % of a step waits for its images pack the images once" in said
    assert "Overlapped with other work, so not in the bar: compiler 0.80 s." in said
    assert "2.000" in said  # ms of forward


def test_what_a_run_has_damaged_is_left_out_and_said(tmp_path, figures):
    run = shown.run_folder(tmp_path / "bare-1")
    shown.write(run, ledger="{", timeline={"spans": [{"kind": "forward"}]})
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    said = shown.text_of(out)
    assert "ledger.json: damaged" in said
    assert "timeline.json is not as expected (KeyError: 'start')" in said
    assert {chart["key"] for chart in charts_of(out)} == {"loss", "rate", "accuracy", "accuracy-time"}


@pytest.mark.parametrize("damage", [{"chosen": 33}, {"spent_s": 10**400}])
def test_numbers_of_a_tuning_that_cannot_be_are_left_out_and_said(tmp_path, figures, damage):
    run = shown.run_folder(tmp_path / "bare-1")
    shown.write(run, tuning={**shown.tuning(), **damage})
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert "tuning.json is not as expected" in shown.text_of(out)


def test_a_run_that_has_no_result_yet_is_shown(tmp_path, figures):
    run = shown.run_folder(tmp_path / "young-1")
    (run / "result.json").unlink()
    (run / "metrics.jsonl").unlink()
    assert main(["report", str(run)]) == 0
    said = shown.text_of(run / "report.html")
    assert "young-1 (no result yet)" in said


@needs_plotly
def test_the_gradient_buckets_are_shown_as_overlap_prints_them():
    from kasoku.report.html.page import page

    text = "group 0: 1.25 MiB of 3 tensors <x>"
    assert text.replace("<x>", "&lt;x&gt;") in page([RunRecord("r", {}, buckets=text)])


def test_overlap_gives_its_buckets_with_tensor_names_to_the_run_folder(digits_run):
    def rank(comm: Comm) -> tuple[dict, list[str]]:
        job = make(Overlap(OneBucket()), comm=comm)
        train(job, 1)
        names = [name for name, p in job.model.named_parameters() if p.requires_grad]
        return {name: build() for name, build in job.documents.items()}, names

    for documents, names in Threads(2).run(rank):
        text = documents["buckets.json"]["text"]
        assert text.startswith("gradients in this order (buckets: 1, chunks: 1;")
        assert f", tensors: {len(names)} ({names[0]} to {names[-1]})" in text
    assert not (digits_run / "buckets.json").exists()  # one rank


def test_buckets_are_read_from_the_run_folder(tmp_path):
    run = shown.run_folder(tmp_path / "two-1")
    shown.write(run, buckets={"text": "group 0: 1.25 MiB"})
    assert read([run])[0].buckets == "group 0: 1.25 MiB"
    shown.write(run, buckets="{")
    assert read([run])[0].buckets == ""
    assert read([run])[0].damaged[0].startswith("buckets.json: damaged")


@needs_plotly
def test_members_of_an_ensemble_are_shown_as_runs(tmp_path):
    for seed in range(2):
        shown.run_folder(tmp_path / "all" / f"member-{seed + 1}", seed=seed)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "all"), "--out", str(out)]) == 0
    assert "2 runs" in shown.text_of(out)
    assert "member-2" in shown.text_of(out)


def test_many_classes_are_cut_to_those_with_the_most_mistakes(tmp_path, figures):
    run = shown.run_folder(tmp_path / "many-1")
    counts = [*([k, k, 50] for k in range(100)), [70, 30, 25]]
    shown.write(run, classes={"classes": [f"c{i}" for i in range(100)], "confusion": counts, "worst": []})
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    charts = {chart["key"]: chart for chart in charts_of(out)}
    names = charts["confusion-0"]["layout"]["yaxis"]["ticktext"]
    assert len(names) == 40
    assert {"c70", "c30"} <= set(names)
    assert charts["accuracies-0"]["layout"]["yaxis"]["ticktext"][0] == "c70"
    assert "c70 c30 25 of 75" in re.sub(r"\s+", " ", shown.text_of(out))


# ---- what is refused


def test_a_folder_of_tune_is_a_page_of_its_curves(tmp_path, figures):
    shown.write(tmp_path, tuning=shown.tuning())
    assert main(["report", str(tmp_path)]) == 0
    assert [chart["key"] for chart in charts_of(tmp_path / "report.html")] == ["tuning-0", "tuning-image-0"]
    said = shown.text_of(tmp_path / "report.html")
    assert "Chosen by TimeToTarget: batch 96" in said
    run = shown.run_folder(tmp_path / "run")
    assert main(["report", str(run), str(tmp_path), "--out", str(tmp_path / "both.html")]) == 0
    assert "undecided" not in shown.text_of(tmp_path / "both.html"), "tuning is no run to compare"
    shown.write(tmp_path, tuning="{")
    assert main(["report", str(tmp_path)]) == 0
    assert "Left out: tuning.json" in shown.text_of(tmp_path / "report.html")


def test_a_folder_of_profile_shows_idle_gaps_ranks_blocks_and_operators(tmp_path, figures):
    shown.write(tmp_path, profile=shown.profile(), ledger=shown.ledger(), timeline=shown.timeline())
    assert main(["report", str(tmp_path)]) == 0
    charts = {chart["key"]: chart for chart in charts_of(tmp_path / "report.html")}
    assert set(charts) == {"ledger-0", "timeline-0", "gaps-0"}
    (bars,) = charts["gaps-0"]["data"]
    assert bars["base"] == [0.0, 4.0, 0.0, 1.0]  # the gap of rank 0's step is from 1 to 4 ms
    assert bars["x"] == pytest.approx([1.0, 6.0, 1.0, 9.0])
    assert charts["gaps-0"]["layout"]["yaxis"]["ticktext"] == ["rank 0, step 1", "rank 1, step 1"]
    said = re.sub(r"\s+", " ", shown.text_of(tmp_path / "report.html"))
    for row in ("1 9.000 0.500 0.250 5% compute-bound", "stage.0 1.000 2.000 1.0 2.0", "aten::mm 1,000 3.000 4.000"):
        assert row in said
    assert "It is idle for 20%" in said


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    wanted = "the folder of a training, of kasoku tune or of kasoku profile is wanted"
    assert said == f"kasoku: {tmp_path}: no run there (no recipe.toml): {wanted}\n"


def test_without_plotly_the_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("plotly", "kasoku.report.html."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", str(shown.run_folder(tmp_path / "a-1"))]) == 2
    assert capsys.readouterr().err == 'kasoku: the page needs plotly: pip install "plotly>=6"\n'


@needs_plotly
def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    run = shown.run_folder(tmp_path / "a-1")
    assert main(["report", str(run), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "none/page.html: cannot be written" in capsys.readouterr().err
