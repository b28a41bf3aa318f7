"""Training on several ranks: the same result as on one, in step to the end, and one voice."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.started import (
    KASOKU,
    RECIPE,
    TORCHRUN,
    ended,
    forked,
    largest_difference,
    options,
    started,
    stop_by_sigterm,
    wait_for_checkpoints,
)
from kasoku.cli import main
from kasoku.config.ranks import can_share, check_share, most_ranks
from kasoku.config.recipe import load
from kasoku.core import InputError, Threads
from kasoku.core.comm import Comm
from kasoku.data import digits, loader
from kasoku.distributed import local_launch as spawn
from kasoku.distributed.consensus import ReportedElsewhereError, run_on_all_ranks
from kasoku.distributed.environment import Place, place
from kasoku.training.control import ControlChannel, Request
from kasoku.training.evaluation import evaluate

SAVING = ("save.every_steps=10", "save.keep=9", "epochs=1.5")  # 33 updates, the second epoch is not ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training, never stopped, on one rank and on two."""
    folder = tmp_path_factory.mktemp("whole")
    one, two = folder / "one", folder / "two"
    assert main(["train", str(RECIPE), *options(*SAVING), "--quiet", "--out", str(one)]) == 0
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2"]
    forked([*local, *options(*SAVING), "--quiet", "--out", str(two)])
    return one, two


def result(run: Path) -> dict[str, object]:
    return json.loads((run / "result.json").read_text())


def cut(run: Path, to: Path) -> Path:
    """A copy of a run as it was after step 30, in the middle of its second epoch."""
    shutil.copytree(run, to)
    for checkpoint in (to / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000000030":
            shutil.rmtree(checkpoint)
    (to / "model.safetensors").unlink()
    return to


@pytest.mark.process
@pytest.mark.smoke
def test_two_ranks_train_to_the_weights_of_one(whole):
    one, two = whole
    assert largest_difference(one, two) < 1e-5
    for name in ("top1", "top5"):
        assert result(one)[name] == result(two)[name]
    assert result(one)["loss"] == pytest.approx(result(two)["loss"], rel=1e-5)
    assert result(one)["epochs"] == result(two)["epochs"]
    assert "gradients in this order" in json.loads((two / "buckets.json").read_text())["text"]


@pytest.mark.process
@pytest.mark.smoke
def test_the_loss_that_is_logged_is_that_of_the_whole_batch(whole):
    logged = [
        {
            line["step"]: line["loss"]
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            if "loss" in line
        }
        for run in whole
    ]
    shared = set(logged[0]) & set(logged[1])
    assert shared
    assert all(logged[0][step] == pytest.approx(logged[1][step], rel=1e-4) for step in shared)


@pytest.mark.process
@pytest.mark.smoke
def test_stopped_on_two_ranks_and_resumed_on_one(whole, tmp_path):
    run = cut(whole[1], tmp_path / "run")
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert largest_difference(whole[0], run) < 1e-5
    assert result(run)["top1"] == result(whole[0])["top1"]


@pytest.mark.process
def test_stopped_on_one_rank_and_resumed_on_two_by_torchrun(whole, tmp_path):
    run = cut(whole[0], tmp_path / "run")
    ended([*TORCHRUN, "--resume", str(run), "--quiet"])
    assert largest_difference(whole[0], run) < 1e-5
    assert result(run)["top1"] == result(whole[0])["top1"]


@pytest.mark.process
def test_two_ranks_resumed_on_two_give_the_same_bits(whole, tmp_path):
    run = cut(whole[1], tmp_path / "run")
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", "--continue", "--quiet"]
    said = forked([*local, "--out", str(run)])
    assert said.count("going on from step 30 of 33") == 1
    assert largest_difference(whole[1], run) == 0


ENDLESS = ("epochs=10000", "save.every_steps=5")


@pytest.mark.process
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    run = tmp_path / "run"
    ranks = started(["train", str(RECIPE), *options(*ENDLESS), "--quiet", "--out", str(run)], 2)
    wait_for_checkpoints(ranks, run)
    stop_by_sigterm(ranks, run, 1)
    steps = max(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*"))
    assert (result(run)["stopped"], result(run)["steps"]) == ("SIGTERM", steps)


@pytest.mark.process
def test_a_signal_to_the_launcher_reaches_its_ranks(tmp_path):
    run = tmp_path / "run"
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", *options(*ENDLESS), "--quiet"]
    process = subprocess.Popen([*KASOKU, *local, "--out", str(run)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for_checkpoints([process], run)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert said.count("stopped by SIGINT") == 1


@pytest.mark.process
@pytest.mark.timing
def test_saving_by_time_is_rank_0s_word(tmp_path):
    run = tmp_path / "run"
    ranks = started(
        ["train", str(RECIPE), *options("epochs=10000", "save.every_s=0.5"), "--quiet", "--out", str(run)], 2
    )
    wait_for_checkpoints(ranks, run)
    stop_by_sigterm(ranks, run, 0)


OWN = """
import os
from torch import nn

def odd(outputs, labels):
    if outputs.requires_grad and os.environ["RANK"] == "1":
        {what}
    return nn.functional.cross_entropy(outputs, labels)
"""


@pytest.fixture
def with_own_loss(tmp_path):
    """The digits with a loss of the user's own that does something on rank 1."""

    def recipe(what: str) -> str:
        (tmp_path / "odd_loss.py").write_text(OWN.format(what=what))
        path = tmp_path / "recipe.toml"
        path.write_text(
            RECIPE.read_text().replace("kasoku.optim.cross_entropy", "odd_loss.odd").replace("smoothing = 0.1", "")
        )
        return str(path)

    return recipe


def launched_on_two(recipe: str, tmp_path: Path, *, code: int) -> str:
    """What `kasoku launch local` prints as an error on two ranks that end with this code."""
    local = ["launch", "local", recipe, "--gpus-per-node", "2", "--quiet", "--out", str(tmp_path / "run")]
    return forked(local, code=code)


@pytest.mark.process
def test_a_rank_that_dies_ends_all_and_its_code_comes_back(with_own_loss, tmp_path):
    recipe = with_own_loss("os._exit(7)")
    began = time.monotonic()
    assert "Traceback" not in launched_on_two(recipe, tmp_path, code=7)
    assert time.monotonic() - began < 100


@pytest.mark.process
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_and_is_told_once(with_own_loss, tmp_path):
    recipe = with_own_loss("return nn.functional.cross_entropy(outputs, labels) * float('nan')")
    said = launched_on_two(recipe, tmp_path, code=3)
    assert said.count("kasoku: ") == 1
    assert "the loss is nan at step 1" in said


@pytest.mark.process
def test_an_error_in_the_users_code_on_all_ranks_is_told_once(with_own_loss, tmp_path):
    recipe = with_own_loss("raise KeyError('planted')")
    module = tmp_path / "odd_loss.py"
    module.write_text(module.read_text().replace('== "1"', 'in "01"'))
    said = launched_on_two(recipe, tmp_path, code=2)
    assert said.count("\n") == 1
    assert "kasoku: odd_loss.odd: KeyError: 'planted' (at " in said


@pytest.mark.process
def test_an_error_in_the_users_code_on_one_rank_ends_the_other_with_its_name(with_own_loss, tmp_path):
    recipe = with_own_loss("raise KeyError('planted')")
    ranks = started(["train", recipe, "--quiet", "--out", str(tmp_path / "run")], 2)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [4, 2]
    assert said[1].startswith("kasoku: odd_loss.odd: KeyError: 'planted' (at ")
    assert re.match(r"kasoku: rank 1 \(.*\) failed: odd_loss\.odd: KeyError: 'planted'", said[0])


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        (("--resume", "nowhere"), "nowhere: no run there"),
        (("--resume", "nowhere", "--data", "x"), "one of RECIPE"),
    ],
)
def test_a_mistake_is_told_once_for_all_ranks(more, pattern):
    ranks = started(["train", *more], 2)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert pattern in said[0]
    assert said[0].count("\n") == 1
    assert said[1] == ""


# ---- without processes


def test_every_launcher_says_the_place():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert place(torchrun) == Place(5, 8, 1, 4, launched=True)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    assert place(slurm) == Place()  # a batch script without srun's MASTER_ADDR is one process
    assert place({**slurm, "SLURM_STEP_ID": "0"}).size == 8  # by srun: joining asks for MASTER_ADDR
    assert place({**slurm, "MASTER_ADDR": "a"}) == Place(5, 8, 1, 4, launched=True)
    assert place({**slurm, "MASTER_ADDR": "a", "SLURM_CPUS_PER_TASK": "4096"}).ranks_on_its_cores == 1
    assert place({}) == Place(0, 1, 0, 1)
    assert place(Place(5, 8, 1, 4).environment) == Place(5, 8, 1, 4, launched=True)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "MASTER_ADDR": "a"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_half_of_a_launchers_word_is_refused(environment):
    with pytest.raises(InputError):
        place(environment)


def test_an_error_on_one_rank_is_raised_on_all_and_told_by_one():
    def rank_main(comm: Comm) -> str:
        def f() -> int:
            if comm.rank == 2:
                raise InputError("the disk is full")
            return comm.rank

        try:
            run_on_all_ranks(comm, f)
        except ReportedElsewhereError:
            return "silent"
        except InputError as error:
            return str(error)
        return "went on"

    assert Threads(3).run(rank_main) == ["rank 2: the disk is full", "silent", "silent"]


class Ticks:
    """A clock that steps take a while on."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t


@pytest.mark.parametrize("step_s", [0.001, 0.1, 10.0])
def test_what_one_rank_says_all_hear_after_the_same_step_and_soon(step_s):
    clock = Ticks()

    def rank_main(comm: Comm) -> tuple[int, float, int]:
        channel, told = ControlChannel(comm), 0
        said_at = 700 if step_s < 1 else 7
        for step in range(10_000):
            if comm.rank == 0:
                clock.t += step_s
            heard = channel.exchange(Request(stop=signal.SIGTERM if comm.rank == 1 and step >= said_at else 0))
            told += heard is not None
            if heard and heard.stop:
                assert heard == Request(stop=signal.SIGTERM)
                return step, step - said_at, told
        raise AssertionError("never heard")

    heard = Threads(3, clock).run(rank_main)
    assert len({step for step, _, _ in heard}) == 1
    step, late, told = heard[0]
    assert late <= max(2, 0.75 / step_s)
    assert told <= 4 + step * step_s / 0.2 or step_s > 1


def test_alone_a_request_is_answered_at_every_step():
    from kasoku.core import Solo

    channel, request = ControlChannel(Solo()), Request(save=True)
    assert channel.exchange(request) == request


def test_the_requests_of_all_ranks_are_merged_as_their_largest_numbers():
    requests = [
        Request(),
        Request(save=True),
        Request(stop=signal.SIGINT),
        Request(stop=signal.SIGTERM),
        Request(failed=True),
    ]
    assert Request.merge(requests) == Request(save=True, stop=signal.SIGTERM, failed=True)
    for request in requests:
        assert Request.merge([Request(), request]) == request


@pytest.mark.parametrize(("ranks", "batch"), [(3, 60), (4, 48), (7, 357)])
def test_scores_over_ranks_are_those_of_one_though_images_do_not_divide(ranks, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    data = digits()

    def rank_main(comm: Comm) -> tuple[float, ...]:
        with torch.no_grad():
            scores = evaluate(model, loader(data, "test", batch, comm=comm), comm=comm)
        return scores.top1, scores.top5, scores.loss, scores.images

    with torch.no_grad():
        alone = evaluate(model, loader(data, "test", 360))
    for scores in (every := Threads(ranks).run(rank_main)):
        assert scores == every[0]
        assert scores[:2] == (alone.top1, alone.top5)
        assert scores[2] == pytest.approx(alone.loss, rel=1e-6)
        assert scores[3] == 360


def test_a_loaders_place_is_kept_in_other_parts():
    one, two = loader(digits(), "train", 64, parts=4), loader(digits(), "train", 64, parts=2)
    one.load_state_dict({"epoch": 1, "position": 12})  # as written before parts were
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == {"epoch": 1, "position": 6, "parts": 2}
    one.seek(1, 13)
    with pytest.raises(InputError, match="within a batch"):
        two.load_state_dict(one.state_dict())


def test_how_many_ranks_can_share_a_batch():
    recipe = load(RECIPE)
    assert [most_ranks(recipe, n) for n in (1, 2, 3, 7, 8)] == [1, 2, 2, 4, 8]
    assert most_ranks(load(RECIPE, ["norm_batch=32"]), 8) == 8  # a group spans four
    with pytest.raises(InputError, match="batch=64: 3 ranks cannot share it evenly; 2 could"):
        check_share(recipe, 3)
    in_parts, wide = (load(RECIPE, ["batch=96", "accumulate=2", f"norm_batch={n}"]) for n in (32, 48))
    assert not any(can_share(in_parts, n) for n in (2, 3, 6, 12))
    assert all(can_share(wide, n) for n in (2, 3, 6, 12))
    with pytest.raises(InputError, match="batch=96: 6 ranks x 2 parts cannot share it evenly, in groups of norm_batch"):
        check_share(in_parts, 6)  # 8 images at once: a group would be of 4 of the 6


def test_without_a_launcher_all_gpus_are_used(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(spawn, "spawn", lambda given, places, **more: calls.append(([*given], places)) or 75)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    given = ["train", str(RECIPE), "--set", "epochs=1"]
    assert main(given) == 75
    assert calls == [(given, [Place(i, 4, i, 4) for i in range(4)])]
    assert "4 of 6 GPUs used: batch=64" in capsys.readouterr().err


def test_a_mistake_is_found_before_gpus_are_used(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(spawn, "spawn", lambda *given, **more: pytest.fail("started"))
    assert main(["train", "nowhere.toml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.process
def test_a_recipe_whose_shares_follow_the_ranks_trains_and_resumes_on_two_ranks_and_on_one(tmp_path):
    run = tmp_path / "run"
    techniques = [
        'techniques.1={use="kasoku.distributed.Overlap", retune=true}',
        'techniques.2={use="kasoku.data.Shares", follow=true}',
    ]
    settings = [part for setting in (*techniques, "epochs=1", "evaluate.target=0") for part in ("--set", setting)]
    forked(["launch", "local", str(RECIPE), "--gpus-per-node", "2", *settings, "--quiet", "--out", str(run)])
    assert "retuned" in json.loads((run / "buckets.json").read_text())
    ended([*TORCHRUN, "--resume", str(run), "--set", "epochs=2", "--quiet"])
    assert main(["train", "--resume", str(run), "--set", "epochs=3", "--quiet"]) == 0
    assert result(run)["epochs"] == 3.0
