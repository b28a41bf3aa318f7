"""A search: trials are processes, pruned while they run, stopped and gone on with; mistakes are said in one line."""

import json
import os
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from kasoku.config.toml import inline
from kasoku.core import InputError
from kasoku.tune.fork_server import new_process
from kasoku.tune.hyperparameters import SearchSettings, _evaluations, _TrialProcess, _Trials, search
from kasoku.tune.search_space import Between, OneOf, read_space

# Trains nothing: evaluates `evaluations` times, `pause` seconds apart, at accuracy `top1`, less `falls` times the
# number of the trial; says it as training does. `code`: fails, or only the trial `failing` once it is continued.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path

given = sys.argv[1:]
settings = dict(value.split("=", 1) for flag, value in zip(given, given[1:]) if flag == "--set")
top1, pause = float(settings.get("top1", 0.5)), float(settings.get("pause", 0))
evaluations, code = int(settings.get("evaluations", 3)), int(settings.get("code", 0))
out = Path(given[given.index("--out") + 1])
number = out.name.split("-")[-1]
top1 -= float(settings.get("falls", 0)) * int(number)
if code and settings.get("failing", number) == number and ("failing" not in settings or "--continue" in given):
    print("kasoku: batch=0: at least 1 image", file=sys.stderr)
    sys.exit(code)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append("SIGTERM"))
out.mkdir(parents=True, exist_ok=True)
(out / "recipe.toml").write_text("")
with (out / "starts").open("a") as starts:
    starts.write("continued" if "--continue" in given else "new")
    starts.write(f" {os.environ.get('JOB', '')}\\n")
done = 0
log = out / "metrics.jsonl"
if log.exists():
    done = len(log.read_text().splitlines())
with log.open("a") as lines:
    while done < evaluations and not stopped:
        lines.write(json.dumps({"step": done, "loss": 1.0, "test_top1": top1}) + "\\n")
        lines.flush()
        done += 1
        time.sleep(pause)
result = {"top1": top1, "best_top1": top1, "seconds": 1.0, "epochs": done, "stopped": (stopped or [None])[0]}
(out / "result.json").write_text(json.dumps(result))
sys.exit(75 if stopped else 0)
"""


@pytest.fixture
def plan(tmp_path):
    """A plan that runs the fake training."""
    pytest.importorskip("optuna", reason="Optuna is not installed")
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def made(space, trials, *settings, pruner="none", **more):
        given = [part for setting in settings for part in ("--set", setting)]
        folder = more.pop("folder", tmp_path / "search")
        return SearchSettings((sys.executable, str(script), *given), space, folder, trials, pruner=pruner, **more)

    return made


def quiet(line: str) -> None:
    """Says nothing."""


ACCURACY = {"top1": Between(0.1, 0.9)}


def test_every_trial_is_a_process_and_the_table_has_the_best_first(plan, tmp_path):
    said: list[str] = []
    outcomes = search(plan(ACCURACY, 4, jobs=2, environment=lambda job: {"JOB": str(job)}), say=said.append)
    assert [one.how for one in outcomes] == ["done"] * 4
    assert [one.top1 for one in outcomes] == sorted((one.top1 for one in outcomes), reverse=True)
    assert len({one.settings["top1"] for one in outcomes}) == 4
    assert all(one.top1 == float(one.settings["top1"]) for one in outcomes)
    assert sorted(path.name for path in tmp_path.glob("search/trial-*") if path.is_dir()) == [
        "trial-1", "trial-2", "trial-3", "trial-4"]  # fmt: skip
    document = json.loads((tmp_path / "search" / "search.json").read_text())
    by_trial = sorted(outcomes, key=lambda one: one.trial)
    assert (document["trials"], document["seconds_a_trial"]) == (4, 1.0)
    top1s = [document[name]["result"]["top1"] for name in ("first", "best")]
    assert top1s == [by_trial[0].top1, outcomes[0].top1]
    assert document["best_by_trial"] == [[i, max(one.top1 for one in by_trial[:i])] for i in (1, 2, 3, 4)]
    lines = {one.trial: str(one) for one in outcomes}
    begun = {one.trial: f"trial {one.trial}: begins (top1={one.settings['top1']})" for one in outcomes}
    assert sorted(said) == sorted([*lines.values(), *begun.values()])
    assert all(said.index(begun[trial]) < said.index(lines[trial]) for trial in lines)
    jobs = {(path / "starts").read_text().split()[1] for path in tmp_path.glob("search/trial-*") if path.is_dir()}
    assert jobs == {"0", "1"}


def test_the_same_search_goes_on_where_it_ended_with_other_proposals(plan, tmp_path):
    first = search(plan(ACCURACY, 2), say=quiet)
    both = search(plan(ACCURACY, 4), say=quiet)
    assert {one.settings["top1"] for one in first} < {one.settings["top1"] for one in both}
    assert len({one.settings["top1"] for one in both}) == 4
    assert all((Path(one.folder) / "starts").read_text() == "new \n" for one in both)
    assert search(plan(ACCURACY, 4), say=quiet) == both  # nothing is left to do


@pytest.mark.process
@pytest.mark.smoke
def test_a_trial_below_the_median_is_ended_by_sigterm_while_it_runs(plan, tmp_path):
    """Five good ones first: fewer make no median."""
    space = {"top1": OneOf((0.9,))}
    about = {"about": "the same", "pruner": "median"}
    search(plan(space, 5, "evaluations=60", **about), say=quiet)
    bad = {"top1": OneOf((0.9,)), "pause": OneOf((0.1,))}
    # the trials are told apart by what stands before their own settings
    outcomes = search(plan({"pause": bad["pause"]}, 6, "evaluations=60", "top1=0.2", **about), say=quiet)
    (pruned,) = [one for one in outcomes if one.how == "pruned"]
    assert pruned.top1 == 0.2
    result = json.loads((Path(pruned.folder) / "result.json").read_text())
    assert result["stopped"] == "SIGTERM"
    assert result["epochs"] < 60
    assert outcomes[-1] == pruned


@pytest.mark.process
def test_halving_ends_trials_outside_the_best_quarter_at_a_rung(plan):
    space, about = {"pause": OneOf((0.05,))}, {"about": "the same", "pruner": "halving"}
    for trials, top1 in enumerate(("0.3", "0.4", "0.5", "0.6"), start=1):  # each the best so far
        outcomes = search(plan(space, trials, "evaluations=5", f"top1={top1}", **about), say=quiet)
        assert {outcome.how for outcome in outcomes} == {"done"}
    outcomes = search(plan(space, 5, "evaluations=60", "top1=0.55", **about), say=quiet)
    assert [outcome.how for outcome in outcomes] == ["done"] * 4 + ["pruned"]
    evaluated = Path(outcomes[-1].folder, "metrics.jsonl").read_text().splitlines()
    assert 1 <= len(evaluated) < 60
    unpruned = search(plan(space, 6, "evaluations=5", "top1=0.2", about="the same"), say=quiet)
    assert [outcome.how for outcome in unpruned] == ["done"] * 5 + ["pruned"]


@pytest.mark.parametrize("evaluations", range(1, 20))
def test_halving_judges_after_1_4_and_16_evaluations(evaluations, plan, tmp_path):
    optuna = pytest.importorskip("optuna")
    (tmp_path / "search").mkdir()
    trials = _Trials(optuna, plan(ACCURACY, 4, pruner="halving"), quiet, new_process)
    for number in range(3):
        better = {"folder": f"trial-{number + 1}"}
        values = dict.fromkeys(range(20), 0.9)
        trials.study.add_trial(optuna.trial.create_trial(value=0.9, intermediate_values=values, user_attrs=better))
    trial = trials.study.ask()
    trial.set_user_attr("folder", "trial-4")
    run = _TrialProcess(trial, None, Path("trial-4"), judged=evaluations - 1)
    for i in range(evaluations):
        trial.report(0.1, i)
    run.reported = evaluations
    assert trials._is_behind(run) == (evaluations in {1, 4, 16})
    assert not trials._is_behind(run)


@pytest.mark.process
def test_a_continued_trial_is_not_judged_at_rungs_it_has_passed(plan, tmp_path):
    """It passed the first one alone, four better ones followed, and it goes on."""
    space, about = {"top1": OneOf((0.3,))}, {"about": "the same", "pruner": "halving"}
    caught: list[str] = []
    log = tmp_path / "search" / "trial-1" / "metrics.jsonl"

    def when_begun() -> None:
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        caught.append("SIGINT")

    other = threading.Thread(target=when_begun)
    other.start()
    assert search(plan(space, 1, "evaluations=200", "pause=0.3", **about), caught=caught, say=quiet) == []
    other.join()
    evaluated = len(log.read_text().splitlines())
    optuna = pytest.importorskip("optuna")
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "search" / "search.journal"))
    study = optuna.load_study(study_name="kasoku", storage=optuna.storages.JournalStorage(journal))
    for number in range(4):
        values, attributes = dict.fromkeys(range(evaluated), 0.9), {"folder": f"trial-{number + 2}"}
        study.add_trial(optuna.trial.create_trial(value=0.9, intermediate_values=values, user_attrs=attributes))
    (outcome,) = search(plan(space, 5, f"evaluations={evaluated + 1}", "pause=0.3", **about), say=quiet)
    assert outcome.how == "done"


@pytest.mark.process
def test_once_all_have_begun_the_best_quarter_at_each_stage_continues(plan, tmp_path):
    said: list[str] = []
    space = {"pause": OneOf((0.05,))}
    outcomes = search(plan(space, 8, "evaluations=20", "falls=0.01", pruner="halving"), say=said.append)
    assert [(one.trial, one.how) for one in outcomes] == [(1, "done"), *((n, "pruned") for n in range(2, 9))]
    begun = [f"trial {n}: begins" for n in range(1, 9)]
    continued = ["trial 1: continues", "trial 2: continues", "trial 1: continues"]
    assert [line.split(" (")[0] for line in said if "pruned" not in line and "done" not in line] == begun + continued
    evaluated = {one.trial: len(Path(one.folder, "metrics.jsonl").read_text().splitlines()) for one in outcomes}
    assert evaluated[1] == 20
    assert 4 <= evaluated[2] < 16
    assert (tmp_path / "search" / "trial-1" / "starts").read_text() == "new \ncontinued \ncontinued \n"


@pytest.mark.process
def test_with_several_jobs_no_more_trials_continue(plan):
    outcomes = search(
        plan({"pause": OneOf((0.5,))}, 7, "evaluations=4", "falls=0.01", jobs=4, pruner="halving"), say=quiet
    )
    evaluated = {one.trial: len(Path(one.folder, "metrics.jsonl").read_text().splitlines()) for one in outcomes}
    whole = [n for n, count in evaluated.items() if count == 4]
    assert 1 in whole
    assert len(whole) <= 2, "another only where it came first"


@pytest.mark.process
@pytest.mark.parametrize("code", [2, 3])
def test_the_next_best_continues_where_the_best_fails(code, plan):
    space = {"pause": OneOf((0.05,))}
    settings = ("evaluations=6", "falls=0.01", f"code={code}", "failing=1")
    outcomes = {one.trial: one for one in search(plan(space, 5, *settings, pruner="halving"), say=quiet)}
    assert outcomes[1].how in ("diverged", "failed: batch=0: at least 1 image")
    assert outcomes[1].top1 == 0.0, "not that of its first part"
    assert outcomes[2].how == "done"
    assert {outcomes[n].how for n in (3, 4, 5)} == {"pruned"}


def test_a_signal_ends_the_trials_under_way_which_are_gone_on_with_later(plan, tmp_path):
    space = {"top1": Between(0.1, 0.9)}
    caught: list[str] = []

    def when_begun() -> None:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("search/trial-*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.01)
        caught.append("SIGINT")

    other = threading.Thread(target=when_begun)
    other.start()
    outcomes = search(plan(space, 1, "evaluations=40", "pause=0.1"), caught=caught, say=quiet)
    other.join()
    assert outcomes == []
    stopped = json.loads((tmp_path / "search" / "trial-1" / "result.json").read_text())
    assert stopped["stopped"] == "SIGTERM"
    (one,) = search(plan(space, 1, "evaluations=40", "pause=0.01"), say=quiet)
    assert one.how == "done"
    assert (tmp_path / "search" / "trial-1" / "starts").read_text() == "new \ncontinued \n"
    assert json.loads((Path(one.folder) / "result.json").read_text())["top1"] == stopped["top1"] == one.top1


def test_a_search_that_was_killed_goes_on(plan, tmp_path):
    """Half a line at the journal's end, Optuna's lock, and a trial that runs for ever by what the journal says."""
    optuna = pytest.importorskip("optuna")
    search(plan(ACCURACY, 1), say=quiet)
    journal = tmp_path / "search" / "search.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    optuna.load_study(study_name="kasoku", storage=storage).ask()
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 8, "wor')
    os.symlink(journal, f"{journal}.lock")
    outcomes = search(plan(ACCURACY, 2), say=quiet)
    assert [one.how for one in outcomes] == ["done", "done"]


@pytest.mark.process
def test_a_trial_whose_search_was_killed_is_judged_at_the_rung_that_it_had_reached(plan, tmp_path):
    optuna = pytest.importorskip("optuna")
    search(plan(ACCURACY, 1), say=quiet)
    folder = tmp_path / "search" / "trial-2"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0, "test_top1": 0.1}) + "\n")
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "search" / "search.journal"))
    study = optuna.load_study(study_name="kasoku", storage=optuna.storages.JournalStorage(journal))
    study.ask({"top1": optuna.distributions.FloatDistribution(0.1, 0.9)}).set_user_attr("folder", str(folder))
    said: list[str] = []
    search(plan(ACCURACY, 3, "evaluations=9", "pause=0.5", pruner="halving"), say=said.append)
    events = [line.split(" (")[0].split(",")[0] for line in said]
    assert events.index("trial 2: continues") < events.index("trial 2: pruned") < events.index("trial 3: begins")


def test_the_search_goes_on_after_a_trial_that_diverges_or_cannot_run(plan):
    search(plan(ACCURACY, 1, about="a"), say=quiet)
    search(plan(ACCURACY, 2, "code=3", about="a"), say=quiet)
    outcomes = search(plan(ACCURACY, 3, "code=2", about="a"), say=quiet)
    assert [one.how for one in outcomes] == ["done", "diverged", "failed: batch=0: at least 1 image"]


def test_where_no_trial_can_run_the_search_ends_with_what_they_say(plan):
    with pytest.raises(InputError, match=r"all of the first 3 trials failed: batch=0: at least 1 image"):
        search(plan(ACCURACY, 50, "code=2"), say=quiet)


def test_few_trials_that_all_fail_are_an_error_each_time(plan):
    for _ in range(2):
        with pytest.raises(InputError, match=r"all 2 trials failed: batch=0: at least 1 image: mend that"):
            search(plan(ACCURACY, 2, "code=2", about="a"), say=quiet)
    assert len(search(plan(ACCURACY, 3, about="a"), say=quiet)) == 3, "one that can run is worth all of them"


def test_a_folder_with_another_search_or_in_use_is_refused(plan, tmp_path):
    search(plan(ACCURACY, 1, about="one"), say=quiet)
    with pytest.raises(InputError, match="another recipe or space"):
        search(plan(ACCURACY, 1, about="other"), say=quiet)
    refusals: list[str] = []

    def at_once(line: str) -> None:
        try:
            search(plan(ACCURACY, 2, about="one"), say=quiet)
        except InputError as error:
            refusals.append(str(error))

    search(plan(ACCURACY, 2, about="one"), say=at_once)
    assert len(refusals) == 2  # when its trial began, and when it ended
    assert "in use by a running search" in refusals[0]


def test_no_pickle_is_in_the_folder(plan, tmp_path):
    search(plan(ACCURACY, 1), say=quiet)
    lines = (tmp_path / "search" / "search.journal").read_text().splitlines()
    assert len(lines) > 3
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r'pip install "optuna>=4\.0"'):
        search(SearchSettings(("true",), ACCURACY, tmp_path, 1))


def test_a_space_file_is_read_by_path_whichever_way_it_is_written(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text(
        "optimizer.lr = {low = 0.01, high = 1.0, log = true}\nbatch = {low = 32, high = 128, step = 32}\n"
        '"optimizer.rest.bias_lr" = {choices = [1.0, 2]}\n[techniques.0]\ndecay = {low = 0.9, high = 0.99}\n'
        "[model]\nwidths = {choices = [[8, 16], [16, 32]]}\n"
    )
    assert read_space(file) == {
        "optimizer.lr": Between(0.01, 1.0, log=True),
        "batch": Between(32, 128, step=32),
        "optimizer.rest.bias_lr": OneOf((1.0, 2)),
        "techniques.0.decay": Between(0.9, 0.99),
        "model.widths": OneOf(([8, 16], [16, 32])),
    }


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", "nothing in it"),
        ("batch = 32", r"batch = 32: \{low"),
        ("batch = {low = 64, high = 32}", r"batch: low=64, high=32: an empty range"),
        ("batch = {low = 64, high = 64}", "an empty range"),
        ("batch = {low = 64}", r"batch\.high: missing"),
        ("batch = {low = 1, high = 2, hihg = 3}", r"batch\.hihg: no such key: did you mean high\?"),
        ('batch = {low = "a", high = 2}', r'low, high and step are finite numbers, these are "a", 2'),
        ("batch = {low = true, high = 2}", "numbers"),
        ("batch = {choices = []}", r"batch: choices = \[\]: an empty range"),
        ("lr = {low = 0, high = 1, log = true}", "log = true: needs low above 0"),
        ("lr = {low = 0.1, high = inf}", "lr: low, high and step are finite numbers, these are 0.1, inf"),
        ("lr = {low = nan, high = 1}", "finite numbers, these are nan, 1"),
        ("lr = {low = 0, high = 1, step = 2}", "step=2: above 0, and at most high - low"),
        ("lr = {", "not TOML"),
    ],
)
def test_a_space_file_that_says_nothing_usable_is_refused_in_one_line(tmp_path, text, pattern):
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=pattern) as refusal:
        read_space(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert "\n" not in str(refusal.value)


def test_a_space_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_space(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "value", [True, 3, 1e-5, 0.1, 'a "b" é', [1, [2.5, "x"]], {"use": "a.b", "keys": {"c d": [1]}}]
)
def test_a_value_goes_to_toml_and_back(value):
    assert tomllib.loads(f"value = {inline(value)}")["value"] == value
    assert "\n" not in inline(value)


def test_accuracies_are_read_while_the_log_is_written(tmp_path):
    lines = ['{"step": 1, "loss": 2}', '{"step": 2, "test_top1": 0.5}', '{"step": 3, "test_top1": 0.75}']
    lines.append('{"step": 4, "test_top1": 0.')  # half written
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert _evaluations(tmp_path) == [0.5, 0.75]


def test_less_than_one_trial_or_job_is_refused(tmp_path):
    for trials, jobs, line in ((0, 1, "trials=0: at least 1"), (1, 0, "jobs=0: at least 1")):
        with pytest.raises(InputError, match=line):
            SearchSettings(("true",), ACCURACY, tmp_path, trials, jobs)
