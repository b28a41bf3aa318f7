"""Faster, slower or undecided: the paired test, and which runs it pairs."""

import math
import random
import re

import pytest

from helpers.shown import run_folder
from kasoku.cli import main
from kasoku.commands.report import by_recipe, read, verdicts
from kasoku.report.html import RunRecord
from kasoku.report.significance import compare, interval


def outcome(seed: int, target: float, time_to_target_s: float | None, top1: float | None) -> RunRecord:
    result = {"time_to_target_s": time_to_target_s, "top1": top1}
    return RunRecord(f"run {seed}", {"seed": seed, "evaluate": {"target": target}}, result)


def timed(*seconds: float, first_seed: int = 0) -> list[RunRecord]:
    return [outcome(first_seed + i, 0.98, s, 0.981) for i, s in enumerate(seconds)]


def judged(*accuracies: float) -> list[RunRecord]:
    return [outcome(i, 0.98, None, a) for i, a in enumerate(accuracies)]


def test_a_planted_difference_is_found_in_either_direction_with_its_size():
    slow, fast = timed(100, 110, 90), timed(80, 89, 71.5)  # seeds differ more than the groups do
    figures = "0.801 of its time to 98 % (95 % interval 0.783 to 0.82, 3 seeds)"
    assert compare(slow, fast, names=("old", "new")) == f"new is faster than old: {figures}"
    assert compare(fast, slow).startswith("B is slower than A: 1.25 of its time to 98 % (95 % interval 1.22 to 1.28, ")


def test_what_lies_within_the_noise_is_undecided():
    line = compare(timed(100, 110, 90, 101), timed(90, 121, 85, 108))
    assert line.startswith("B against A: undecided: ")
    low, high = map(float, re.findall(r"interval ([\d.]+) to ([\d.]+)", line)[0])
    assert low < 1 < high


@pytest.mark.parametrize(("second", "pairs"), [(timed(1, 1), 2), (timed(1, 1, 1, first_seed=2), 1), ([], 0)])
def test_fewer_than_three_pairs_of_seeds_decide_nothing(second, pairs):
    figures = f"{pairs} pair{'s' * (pairs != 1)} of equal seeds; at least 3 are wanted"
    assert compare(timed(100, 100, 100), second) == f"B against A: undecided: {figures}"


def test_only_equal_seeds_are_paired_and_runs_of_one_seed_count_once():
    first = [*timed(100, 110, 90), outcome(9, 0.98, 1.0, 0.9)]
    second = [*timed(60, 91, 71.5), outcome(0, 0.98, 100.0, 0.981), outcome(8, 0.98, 1e6, 0.9)]
    line = compare(first, second)
    wanted = math.exp(sum(map(math.log, (80 / 100, 91 / 110, 71.5 / 90))) / 3)
    assert f": {wanted:.3g} of its time" in line
    assert line.endswith(", 3 seeds)")


def test_where_not_all_reach_the_target_accuracy_decides():
    first = judged(0.90, 0.91, 0.92)
    second = [outcome(i, 0.98, 5.0 if i else None, a) for i, a in enumerate((0.951, 0.958, 0.971))]
    assert compare(first, second).startswith("B is more accurate than A: +5.00 points of accuracy at the end (95 % ")
    assert compare(second, first).startswith("B is less accurate than A: -5.00 points of accuracy at the end (95 % ")


def test_other_targets_do_not_compare_in_time():
    second = [outcome(o.seed, 0.9, 1.0, 0.99) for o in timed(1, 1, 1)]
    assert "accura" in compare(timed(100, 110, 90), second)


def test_a_run_without_accuracy_is_said():
    line = compare(judged(0.9, 0.9, 0.9), [outcome(i, 0.98, None, None) for i in range(3)])
    assert line.startswith("B against A: undecided: 3 of the 6 runs have no accuracy yet")


def test_equal_differences_need_six_pairs_and_equal_runs_are_never_decided():
    """Accuracies are whole images: three equal differences happen by chance."""
    for n, verdict in ((3, "against A: undecided"), (5, "against A: undecided"), (6, "is more accurate than A")):
        assert compare(judged(*[0.5] * n), judged(*[0.75] * n)).startswith(f"B {verdict}: ")
    assert compare(judged(*[0.5] * 8), judged(*[0.5] * 8)).startswith("B against A: undecided: ")


def test_the_interval_is_that_of_students_own_example():
    """Additional hours of sleep under two soporifics: Student, Biometrika 6 (1908), p. 20; 0.70 to 2.46."""
    hours = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)
    assert interval(hours) == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-3)
    assert interval(list(range(31))) == pytest.approx((15, 15 - 3.3352, 15 + 3.3352), abs=2e-3)  # t(30) = 2.0423


def test_equal_recipes_are_called_different_in_a_twentieth_of_the_cases():
    rng = random.Random(0)
    wrong = 0
    for _ in range(2000):
        a, b = ([rng.lognormvariate(4, 0.1) for _ in range(5)] for _ in range(2))
        wrong += ": undecided: " not in compare(timed(*a), timed(*b))
    assert 0.03 < wrong / 2000 < 0.075


# ---- runs in folders


def many(tmp_path, name, *, lr, seconds):
    return [
        run_folder(tmp_path / f"{name}-{seed}", seed=seed, lr=lr, top1=0.981, time_to_target_s=s)
        for seed, s in enumerate(seconds)
    ]


def test_runs_are_grouped_by_recipe_whatever_their_order_and_seed(tmp_path):
    slow = many(tmp_path, "a", lr=0.1, seconds=(100, 110, 90))
    fast = many(tmp_path, "b", lr=0.2, seconds=(80, 89, 71.5))
    groups = by_recipe(read([slow[0], fast[2], slow[1], fast[0], fast[1], slow[2]]))
    assert [sorted(run.name for run in runs) for _, runs in groups] == [["a-0", "a-1", "a-2"], ["b-0", "b-1", "b-2"]]
    assert [line.split(": ")[1] for line in verdicts(groups)] == [
        "0.801 of its time to 98 % (95 % interval 0.783 to 0.82, 3 seeds)"
    ]


def test_the_command_says_which_recipe_is_faster_and_what_differs(tmp_path, capsys):
    pytest.importorskip("plotly", reason='needs pip install "plotly>=6"')
    slow = many(tmp_path, "a", lr=0.1, seconds=(100, 110, 90))
    fast = many(tmp_path, "b", lr=0.2, seconds=(80, 89, 71.5))
    out = tmp_path / "page.html"
    runs = [str(path) for path in (*slow, *fast)]
    assert main(["report", "--compare", "--out", str(out), *runs]) == 0
    said = capsys.readouterr().out
    assert said.startswith("digits (optimizer.lr=0.2) is faster than digits (optimizer.lr=0.1): 0.801 of its time")
    assert said.splitlines()[1] == str(out)
    assert "is faster than" in out.read_text()


def test_groups_can_be_given_by_hand(tmp_path, capsys):
    pytest.importorskip("plotly", reason='needs pip install "plotly>=6"')
    slow = many(tmp_path, "a", lr=0.1, seconds=(100, 110, 90))
    same = many(tmp_path, "b", lr=0.1, seconds=(80, 89, 71.5))
    out = ["--out", str(tmp_path / "page.html")]
    assert main(["report", "--compare", *out, *map(str, slow), "--", *map(str, same)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("digits (group 2) is faster than digits (group 1): 0.801")
    assert main(["report", *out, *map(str, slow[:2]), "--", *map(str, same)]) == 0
    assert "undecided: 2 pairs of equal seeds" in capsys.readouterr().out


def test_runs_of_one_recipe_do_not_compare(tmp_path, capsys):
    runs = many(tmp_path, "a", lr=0.1, seconds=(100, 110, 90))
    assert main(["report", "--compare", *map(str, runs)]) == 2
    assert "--compare: these runs are of one recipe; give two groups" in capsys.readouterr().err


def test_runs_of_other_machines_are_told(tmp_path):
    runs = many(tmp_path, "a", lr=0.1, seconds=(100, 110, 90)) + many(tmp_path, "b", lr=0.2, seconds=(80, 89, 71.5))
    told = runs[-1] / "environment.json"
    told.write_text(told.read_text().replace('"cores": 2', '"cores": 64'))
    assert verdicts(by_recipe(read(runs)))[0].endswith("; these runs were made on different machines")
