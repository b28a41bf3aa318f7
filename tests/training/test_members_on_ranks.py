"""Members of an ensemble on several ranks: each apart, with the bits of one rank; stopped, resumed, diverged."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.forked import Forked
from helpers.photos import coloured_photos
from helpers.ranks import on_processes
from helpers.started import (
    RECIPE,
    SETTINGS,
    forked,
    largest_difference,
    options,
    started,
    stop_by_sigterm,
    wait_for_checkpoints,
)
from helpers.virtual_comm import VirtualClock
from kasoku.cli import main
from kasoku.config.from_folder import recipe_for
from kasoku.config.ranks import gpus_for
from kasoku.config.recipe import Recipe, load
from kasoku.core import Comm, InputError, Solo, Threads
from kasoku.distributed.counting_comm import BUSY, RESTING, STALLED, STEPPING, Activity, CountingComm
from kasoku.training import ensemble
from kasoku.training.run_folder import RunFolder, load_recipe, members_of
from kasoku.training.run_state import Training
from kasoku.training.trained_run import score_runs
from kasoku.training.trainer import Trainer

SMALL = ("epochs=2", "data.size=32", "device.threads=1", "model={use='kasoku.models.cifarnet', widths=[8, 8]}")
HALF = ("epochs=0.5", "schedule.warmup=0")  # of an epoch: 11 updates
SHORT = (*SETTINGS, *HALF)


def members_on(comm: Comm, out: Path, count: int, photos: Path | None = None) -> str | None:
    """Trains an ensemble on the digits, or on photos."""

    def recipe(more: list[str]) -> Recipe:
        if photos is None:
            return load(RECIPE, [*SHORT, *more])
        return recipe_for(photos, None, freeze=0, settings=[*SMALL, *more])

    recipes = ensemble.varied(recipe, count, [])
    return ensemble.train(recipes, paths_of(out, count), comm, started=time.perf_counter(), quiet=True)


def resumed(comm: Comm, out: Path) -> str | None:
    paths = members_of(out)
    recipes = [load_recipe(path) for path in paths]
    return ensemble.train(recipes, paths, comm, started=time.perf_counter(), own_modules=None, quiet=True)


def paths_of(out: Path, count: int) -> list[Path]:
    return [out / f"member-{i + 1}" for i in range(count)]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members on the digits."""
    out = tmp_path_factory.mktemp("members") / "one"
    assert members_on(Solo(), out, 3) is None
    return out


def differences(a: Path, b: Path, count: int) -> list[float]:
    return [largest_difference(x, y) for x, y in zip(paths_of(a, count), paths_of(b, count), strict=True)]


def test_a_member_of_one_rank_has_the_bits_it_has_alone(on_one_rank, tmp_path):
    assert Threads(2).run(lambda comm: members_on(comm, tmp_path / "two", 3)) == [None, None]
    assert differences(on_one_rank, tmp_path / "two", 3) == [0, 0, 0]
    alone = tmp_path / "alone"
    assert main(["train", str(RECIPE), *options(*HALF), "--set", "seed=1", "--quiet", "--out", str(alone)]) == 0
    assert largest_difference(alone, tmp_path / "two" / "member-2") == 0


def test_more_ranks_than_members_train_each_together(on_one_rank, tmp_path):
    assert Threads(4).run(lambda comm: members_on(comm, tmp_path / "four", 2)) == [None] * 4
    assert all(0 < difference < 1e-5 for difference in differences(on_one_rank, tmp_path / "four", 2))
    assert all((path / "buckets.json").is_file() for path in paths_of(tmp_path / "four", 2))


def test_ranks_whose_member_has_ended_do_not_hide_a_hang_in_another(tmp_path, monkeypatch):
    """The failure detector judges no hang while a rank is busy."""
    activities: dict[int, Activity] = {}
    states: list[bytes] = []
    fit = ensemble.fit

    def ended(training, run, **how):
        result = fit(training, run, **how)
        if run and run.path.name == "member-2":  # the longer one
            states.extend(activities[rank].state() for rank in range(4))
        return result

    monkeypatch.setattr(ensemble, "fit", ended)

    def rank_main(comm: Comm) -> str | None:
        activities[comm.rank] = Activity(60.0)
        counted = CountingComm(comm, activities[comm.rank])
        recipes = [load(RECIPE, [*SETTINGS, f"epochs={epochs}"]) for epochs in (1, 2)]
        paths = paths_of(tmp_path / "four", 2)
        return ensemble.train(recipes, paths, counted, started=time.perf_counter(), quiet=True)

    assert Threads(4).run(rank_main) == [None] * 4
    assert states[:2] == [RESTING, RESTING]
    assert states[2] == STEPPING


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_busy_while_they_evaluate_an_ensemble_but_not_for_ever(ranks, tmp_path, monkeypatch):
    clocks: list[VirtualClock] = [VirtualClock() for _ in range(ranks)]
    states: list[tuple[bytes, bytes, bytes]] = []
    score = ensemble.trained_run.score_runs

    def scored(paths: list[Path], comm: Comm) -> object:
        before, activity, clock = comm.activity.state(), comm.activity, clocks[comm.rank]
        scores = score(paths, comm=comm)
        clock.until(clock.now() + 1800)
        busy = activity.state()
        clock.until(clock.now() + 1900)
        states.append((before, busy, activity.state()))
        return scores

    monkeypatch.setattr(ensemble.trained_run, "score_runs", scored)

    def rank_main(comm: Comm) -> None:
        counted = CountingComm(comm, Activity(0.0, clocks[comm.rank]))
        assert members_on(counted, tmp_path / "run", 2) is None
        ensemble.evaluate(paths_of(tmp_path / "run", 2), counted, quiet=True)

    Threads(ranks).run(rank_main)
    assert states == [(BUSY, BUSY, STALLED)] * ranks


def sums_on_channels(comm: Comm) -> list[float]:
    """On ten channels of one of two groups, opened while the other group opens its own."""
    group, sums = comm.sub([[0, 1], [2, 3]]), []
    for _ in range(10):
        x = torch.tensor([float(comm.rank)])
        group.channel().all_reduce(x).wait()
        sums.append(x.item())
    return sums


@pytest.mark.process
@pytest.mark.smoke
def test_groups_of_processes_open_their_channels_apart(on_one_rank, tmp_path):
    assert on_processes(4, sums_on_channels) == [[1.0] * 10] * 2 + [[5.0] * 10] * 2
    assert on_processes(4, members_on, tmp_path / "four", 2) == [None] * 4
    assert all(difference < 1e-5 for difference in differences(on_one_rank, tmp_path / "four", 2))


def test_members_on_files_have_the_same_bits_on_any_ranks(tmp_path):
    photos = coloured_photos(tmp_path / "photos")
    members_on(Solo(), tmp_path / "one", 3, photos)
    Threads(2).run(lambda comm: members_on(comm, tmp_path / "two", 3, photos))
    assert differences(tmp_path / "one", tmp_path / "two", 3) == [0, 0, 0]


def cut(member: Path) -> None:
    """As if the training had been killed before it wrote anything but its first files."""
    for name in ("model.safetensors", "best.safetensors", "result.json"):
        (member / name).unlink()
    shutil.rmtree(member / "checkpoints")


def test_only_members_that_are_not_finished_are_resumed(on_one_rank, tmp_path):
    run = shutil.copytree(on_one_rank, tmp_path / "run")
    cut(run / "member-2")
    before = {file: file.read_bytes() for i in (1, 3) for file in (run / f"member-{i}").rglob("*") if file.is_file()}
    assert Threads(3).run(lambda comm: resumed(comm, run)) == [None] * 3
    assert {file: file.read_bytes() for file in before} == before
    assert differences(on_one_rank, run, 3) == [0, 0, 0]


def test_members_on_files_have_the_same_bits_beside_finished_ones(tmp_path):
    photos = coloured_photos(tmp_path / "photos")
    members_on(Solo(), tmp_path / "one", 2, photos)
    run = shutil.copytree(tmp_path / "one", tmp_path / "run")
    cut(run / "member-2")
    resumed(Solo(), run)
    assert differences(tmp_path / "one", run, 2) == [0, 0]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_member_that_diverges_is_named_and_the_rest_trains(in_memory, tmp_path, capsys):
    data = (
        [str(RECIPE)]
        if in_memory
        else ["--data", str(coloured_photos(tmp_path / "photos")), "--set", "data.size=32", "--set", SMALL[-1]]
    )
    rates = ["--members", "3", "--vary", "optimizer.lr=0.05,1e30,0.04", "--set", "device.threads=1"]
    rates += ["--set", "epochs=2", "--set", "schedule={use='kasoku.core.Constant'}", "--set", "evaluate.target=0"]
    out = tmp_path / "run"
    assert main(["train", *data, *rates, "--quiet", "--out", str(out)]) == 3
    first, last = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith("kasoku: member-2: the loss is ")
    assert first.endswith("; the other members go on")
    assert last == "kasoku: member-2 diverged; the other members have ended"
    finished = [json.loads((path / "result.json").read_text()) for path in (out / "member-1", out / "member-3")]
    assert all(result["stopped"] is None and result["epochs"] == 2 for result in finished)
    assert not (out / "ensemble.json").exists()


def test_a_mistake_of_one_ranks_member_waits_for_the_others(on_one_rank, tmp_path, monkeypatch):
    whole = ensemble.fit

    def fit(training, run, **how):
        if run.path.name == "member-2":
            raise InputError("the disk is full")
        return whole(training, run, **how)

    monkeypatch.setattr(ensemble, "fit", fit)
    errors = Threads(2).run(lambda comm: caught(comm, tmp_path / "run"))
    assert errors == ["rank 1: the disk is full"] * 2
    assert largest_difference(on_one_rank / "member-3", tmp_path / "run" / "member-3") == 0


def caught(comm: Comm, out: Path) -> str:
    with pytest.raises(InputError) as error:
        members_on(comm, out, 3)
    return str(error.value)


def test_a_mistake_on_one_rank_of_a_member_is_raised_at_once(tmp_path, monkeypatch):
    def steps(trainer: Trainer, caught: list[str]) -> Iterator[None]:
        if trainer.job.comm.rank == 1:
            raise InputError("broken on this rank")
        yield from of_all(trainer, caught)

    of_all = Trainer.steps
    monkeypatch.setattr(Trainer, "steps", steps)
    with pytest.raises(InputError, match="broken on this rank"):
        Threads(4).run(lambda comm: members_on(comm, tmp_path / "four", 2))


def test_ranks_that_members_cannot_share_equally_are_refused(tmp_path):
    wanted = "2 members on 3 ranks: each takes the same number of ranks; start 2 or 4 ranks, or train 3 members"

    def refused(comm: Comm) -> str:
        with pytest.raises(InputError) as error:
            members_on(comm, tmp_path / "run", 2)
        return str(error.value)

    assert Threads(3).run(refused)[0] == wanted
    assert not (tmp_path / "run").exists()


def test_members_take_as_many_gpus_as_they_can_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    recipe = load(RECIPE)  # batch 64
    assert [gpus_for(recipe, members) for members in (1, 2, 3, 4, 6, 7)] == [4, 4, 6, 4, 6, 6]


def test_ranks_share_the_evaluation_of_an_ensemble(on_one_rank):
    alone = score_runs([on_one_rank])
    for scores in Threads(3).run(lambda comm: score_runs([on_one_rank], comm=comm)):
        assert [name for name, _ in scores] == [name for name, _ in alone]
        for (_, ours), (_, theirs) in zip(scores, alone, strict=True):
            assert (ours.top1, ours.top5, ours.images) == (theirs.top1, theirs.top5, 360)
            assert ours.loss == pytest.approx(theirs.loss)


def test_continue_starts_an_ensemble_or_goes_on_with_it(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", str(RECIPE), *options("epochs=1"), "--quiet", "--continue", "--out", str(out)]
    assert main([*command, "--members", "2"]) == 0
    scores = json.loads((out / "ensemble.json").read_text())
    assert 0.5 < scores["top1"] <= scores["top5"] <= 1
    assert (scores["images"], scores["members"]) == (360, 2)
    assert main([*command, "--members", "2"]) == 0
    assert f"{out}: 2 members, the first finished" in capsys.readouterr().err
    for members in ([], ["--members", "3"]):
        assert main([*command, *members]) == 2
        assert "a run of 2 members, and --members " in capsys.readouterr().err


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_continue_begins_members_anew_that_were_not_all_described(killed, tmp_path, capsys, monkeypatch):
    """As if the training had been killed while it described its members."""
    out, described = tmp_path / "run", list[Path]()

    def describe(training: Training, run: RunFolder, import_folders: list[str]) -> None:
        if len(described) == killed:
            raise KeyboardInterrupt
        described.append(run.path)
        of_all(training, run, import_folders)

    of_all = Training.describe
    command = ["train", str(RECIPE), *options(*HALF), "--quiet", "--continue", "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(Training, "describe", describe)
        assert main([*command, "--members", "3"]) == 130
    assert members_of(out) == described
    if described:
        assert main(["train", "--resume", str(out)]) == 2
        assert f"{out}: 3 members, of which {killed} were begun: start all of them" in capsys.readouterr().err
    assert main([*command, "--members", "3"]) == 0
    assert all((path / "result.json").is_file() for path in paths_of(out, 3))
    assert main(["train", "--resume", str(out)]) == 0
    assert main([*command, "--members", "4"]) == 2
    assert "a run of 3 members, and --members 4 is given" in capsys.readouterr().err


def test_members_are_not_begun_in_another_run_nor_over_fewer_members(on_one_rank, tmp_path, capsys):
    plain, fewer = tmp_path / "plain", shutil.copytree(on_one_rank, tmp_path / "fewer")
    train = ["train", str(RECIPE), *options(*HALF), "--quiet"]
    assert main([*train, "--out", str(plain)]) == 0
    for member in members_of(fewer):
        cut(member)  # so none of them has a checkpoint
    for out, members in ((plain, 0), (fewer, 3)):
        before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
        assert main([*train, "--continue", "--members", "5", "--out", str(out)]) == 2
        assert f"{out}: a run of {members} members, and --members 5 is given" in capsys.readouterr().err
        assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_members_that_are_begun_anew_lose_their_old_metrics(on_one_rank, tmp_path):
    run = shutil.copytree(on_one_rank, tmp_path / "run")
    for member in members_of(run):
        cut(member)
    (run / "member-3" / "recipe.toml").unlink()
    command = ["train", str(RECIPE), *options(*HALF), "--quiet", "--continue", "--members", "3"]
    assert main([*command, "--out", str(run)]) == 0
    for begun, old in zip(paths_of(run, 2), paths_of(on_one_rank, 2), strict=True):
        lines, gone = ((path / "metrics.jsonl").read_text().splitlines() for path in (begun, old))
        assert lines
        assert not {*lines} & {*gone}


def test_a_copy_of_a_member_is_none_of_the_ensemble(on_one_rank, tmp_path, capsys):
    run = shutil.copytree(on_one_rank, tmp_path / "run")
    shutil.copytree(run / "member-1", run / "member-1.bak")
    assert main(["train", "--resume", str(run)]) == 0
    assert f"{run}: 3 members, the first finished" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--continue"]])
def test_an_ensemble_removes_empty_folders_of_a_larger_one(more, tmp_path):
    """As if a training of five members had been killed before it described one."""
    out = tmp_path / "run"
    for path in paths_of(out, 5):
        RunFolder(path).close()
    (out / "member-4" / "data.json").write_text("{}")
    (out / "member-6").mkdir()
    (out / "member-6" / "notes.txt").write_text("of the user")
    train = ["train", str(RECIPE), *options(*HALF), "--quiet"]
    assert main([*train, "--members", "3", *more, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.glob("member-*")) == ["member-1", "member-2", "member-3", "member-6"]
    shutil.rmtree(out / "member-6")
    assert main(["train", "--resume", str(out)]) == 0


def started_members(out: Path, *more: str) -> list[Forked]:
    """Two ranks with a member each, both of which have written a checkpoint."""
    ranks = started(["train", str(RECIPE), *more, "--members", "2", "--quiet", "--out", str(out)], 2)
    wait_for_checkpoints(ranks, *paths_of(out, 2))
    return ranks


@pytest.mark.process
def test_the_death_of_a_rank_that_trains_apart_is_named(tmp_path):
    ranks = started_members(tmp_path / "run", *options("epochs=10000", "save.every_steps=50"))
    try:
        ranks[1].kill()
        said, _ = (rank.communicate(timeout=60)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 4
    assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) died: " in said


@pytest.mark.process
@pytest.mark.smoke
def test_members_on_ranks_stopped_go_on_to_the_same_bits(tmp_path):
    more = options("norm_batch=0", "epochs=10", "schedule.epochs=10", "save.every_steps=5", "evaluate.every=10")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", str(RECIPE), *more, "--members", "2", "--quiet", "--out", str(whole)]) == 0
    stop_by_sigterm(started_members(parts, *more), parts, 0, 1)
    results = [json.loads((path / "result.json").read_text()) for path in paths_of(parts, 2)]
    assert [result["stopped"] for result in results] == ["SIGTERM"] * 2
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", "--members", "2", "--set", "device.kind=cpu"]
    said_on = forked([*local, "--continue", "--quiet", "--out", str(parts)])
    assert said_on.count("going on from step ") == 2
    assert differences(whole, parts, 2) == [0, 0]
    ours, theirs = (json.loads((run / "ensemble.json").read_text()) for run in (parts, whole))
    assert ours == pytest.approx(theirs)


def test_a_members_recipe_trains_it_again(on_one_rank, tmp_path):
    again = tmp_path / "again"
    assert main(["train", str(on_one_rank / "member-3" / "recipe.toml"), "--quiet", "--out", str(again)]) == 0
    a, b = (load_file(run / "best.safetensors") for run in (again, on_one_rank / "member-3"))
    assert all(a[name].equal(b[name]) for name in b)
