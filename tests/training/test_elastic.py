"""A training whose ranks die goes on in place with the others, to the weights of an undisturbed one."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.forked import Forked
from helpers.ranks import on_processes
from helpers.started import KASOKU, RECIPE, clean, ended, forked, kill, largest_difference, options, started
from kasoku.config.ranks import part_of, spread
from kasoku.config.recipe import load
from kasoku.core import Comm, InputError, Job, Solo, Threads
from kasoku.data import Shares
from kasoku.distributed import AllReduce
from kasoku.distributed.election import MEMBERS, Election
from kasoku.distributed.liveness import LostRankError, Watchdog
from kasoku.distributed.membership import Membership
from kasoku.distributed.torch_comm import abort
from kasoku.training.elastic import Snapshots, _copied
from kasoku.training.run_folder import RunFolder
from kasoku.training.trainer import Trainer, build, fit

EXACT = "techniques=[{use='kasoku.data.Augment', translate=1}, {use='kasoku.distributed.AllReduce', exact=true}]"
ASYNCHRONOUS = ("techniques=[{use='kasoku.distributed.Asynchronous'}]", "norm_batch=0", "batch=96", "evaluate.every=99")
EPOCHS = ("epochs=4", "schedule.epochs=4")
TOP1 = 0.9  # of asynchronous ranks; undisturbed: 0.96 to 0.98
LIMIT_S = 200.0


def arguments(run: Path, *more: str) -> list[str]:
    return ["train", str(RECIPE), *options(*EPOCHS, EXACT, *more), "--quiet", "--out", str(run)]


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(run: Path, step: int, ranks: Sequence[Forked]) -> None:
    until = time.monotonic() + LIMIT_S
    while not any(seen >= step for seen in steps_of(run)):
        assert time.monotonic() < until, [rank.poll() for rank in ranks]
        time.sleep(0.02)


def lose(run: Path, size: int, victims: Sequence[int], how: signal.Signals, *more: str) -> list[tuple[int, str]]:
    """Trains on several ranks, of which these are lost one after the other; exit code and stderr of each."""
    ranks = started(arguments(run, *more), size)
    try:
        for number, victim in enumerate(victims):
            wait_for_step(run, 12 + 20 * number, ranks)
            ranks[victim].send_signal(how)
            if how == signal.SIGSTOP:
                time.sleep(12)
                ranks[victim].send_signal(signal.SIGCONT)
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        kill(ranks)
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    ended([*KASOKU, *arguments(run)])
    return run


@pytest.mark.process
@pytest.mark.parametrize(
    ("size", "victims"),
    [
        pytest.param(2, [1], id="one of two"),
        pytest.param(2, [0], id="the one that hosts the rendezvous"),
        pytest.param(4, [0, 2], id="two of four, so one takes more parts than another"),
    ],
)
def test_ranks_that_are_left_end_in_the_undisturbed_weights(
    size: int, victims: list[int], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks = lose(run, size, victims, signal.SIGKILL)
    codes = [code for code, _ in ranks]
    assert codes == [-9 if rank in victims else 0 for rank in range(size)], ranks
    assert largest_difference(undisturbed, run) == 0
    assert steps_of(run) == sorted(steps_of(run)), "metrics of steps that were made again"
    said = "".join(text for _, text in ranks)
    assert f"going on with {size - len(victims)} of" in said
    assert ", from memory" in said
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == json.loads((undisturbed / "result.json").read_text())["steps"]


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_was_stopped_is_not_taken_back_and_changes_nothing(
    victim: int, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks = lose(run, 2, [victim], signal.SIGSTOP)
    assert ranks[victim][0] == 4, ranks
    assert ranks[1 - victim][0] == 0, ranks
    assert largest_difference(undisturbed, run) == 0


class Ranks:
    """The ranks of one training, of which some are killed and started again."""

    def __init__(self, size: int, run: Path, *more: str) -> None:
        self.run, self.size = run, size
        self.words = ["train", str(RECIPE), *options(*more), "--quiet", "--continue", "--out", str(run)]
        self.processes = started(self.words, size)

    def start(self, rank: int) -> Forked:
        """A process that takes the place of a rank; that of the rendezvous may be gone."""
        where = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank)}
        where |= {"LOCAL_WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        return Forked(self.words, clean(where))

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(how)

    def end(self, *codes: int) -> str:
        """Waits for all, which must end with these codes; what they said."""
        try:
            said = [rank.communicate(timeout=LIMIT_S)[1] for rank in self.processes]
        finally:
            kill(self.processes)
        assert [rank.returncode for rank in self.processes] == [*codes], said
        return "".join(said)


def trained(run: Path) -> list[float]:
    """Seconds of forward passes of the ranks at the end."""
    return [float(rank["forward"]) for rank in json.loads((run / "ledger.json").read_text())["ranks"]]


@pytest.mark.process
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_started_again_joins_and_the_weights_stay(victim: int, tmp_path: Path) -> None:
    long = ("epochs=20", "schedule.epochs=20", EXACT)
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    forked(["train", str(RECIPE), *options(*long), "--quiet", "--out", str(undisturbed)])
    ranks = Ranks(2, run, *long)
    try:
        wait_for_step(run, 12, ranks.processes)
        ranks.kill(victim)
        if victim == 0:  # else it comes while the other one still waits
            wait_for_step(run, steps_of(run)[-1] + 20, ranks.processes)
        newcomer = ranks.start(victim)
        assert newcomer.wait(LIMIT_S) == 0
        ranks.processes.append(newcomer)
    finally:
        said = ranks.end(*(0 if rank != victim else -9 for rank in (0, 1)), 0)
    assert f"going on with {2 if victim else 1} of 2 ranks" in said
    assert "going on with 2 ranks from step" in said
    assert largest_difference(undisturbed, run) == 0
    assert all(seconds > 0 for seconds in trained(run))
    assert len(trained(run)) == 2
    late = ranks.start(1)
    assert late.wait(LIMIT_S) == 0
    assert "finished: 20 epochs" in late.communicate()[1]


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [1, 0])
def test_asynchronous_ranks_go_on_without_an_owner(victim: int, how: signal.Signals, tmp_path: Path) -> None:
    run, epochs = tmp_path / "run", 30
    more = (*ASYNCHRONOUS, f"epochs={epochs}", f"schedule.epochs={epochs}", f"techniques.0.finish={epochs - 2}")
    ranks = Ranks(3, run, *more)
    try:
        wait_for_step(run, 12, ranks.processes)
        seen = steps_of(run)[-1]
        ranks.kill(victim, how)
        for rank in {0, 1, 2} - {victim}:
            assert ranks.processes[rank].wait(LIMIT_S) == 0
        ranks.kill(victim)
    finally:
        said = ranks.end(*(0 if rank != victim else -9 for rank in range(3)))
    assert f"rank {victim} " in said
    (step,) = re.findall(r"going on with 2 ranks from step (\d+)", said)
    assert int(step) >= seen  # from where they were
    result = json.loads((run / "result.json").read_text())
    assert result["epochs"] == epochs
    assert result["top1"] > TOP1
    confusion = json.loads((run / "classes.json").read_text())["confusion"]
    assert sum(images for *_, images in confusion) == 360  # all test images, though a rank that had some is dead


@pytest.mark.process
def test_a_rank_joins_asynchronous_ones(tmp_path: Path) -> None:
    run, epochs = tmp_path / "run", 60
    ranks = Ranks(3, run, *ASYNCHRONOUS, f"epochs={epochs}", f"schedule.epochs={epochs}")
    try:
        wait_for_step(run, 12, ranks.processes)
        ranks.kill(1)
        newcomer = ranks.start(1)
        assert newcomer.wait(LIMIT_S) == 0
        ranks.processes.append(newcomer)
    finally:
        said = ranks.end(0, -9, 0, 0)
    assert "going on with 3 ranks from step" in said
    assert len(trained(run)) == 3
    assert all(seconds > 0 for seconds in trained(run))
    result = json.loads((run / "result.json").read_text())
    assert result["epochs"] == epochs
    assert result["top1"] > TOP1


@pytest.mark.process
@pytest.mark.parametrize("more", [(EXACT,), ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_kasoku_launch_local_starts_a_killed_rank_again(more: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*options("epochs=60", "schedule.epochs=60", "device.kind=cpu", *more), "--gpus-per-node", "2"]
    command = [*KASOKU, "launch", "local", str(RECIPE), *words, "--quiet", "--out", str(run)]
    process = subprocess.Popen(command, env=clean(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(run, 12, [])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "going on with 2 ranks from step" in said
    assert len(trained(run)) == 2


@pytest.mark.process
def test_kasoku_launch_local_waits_for_the_ranks_that_go_on(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["launch", "local", str(RECIPE), *options(*EPOCHS, EXACT, "device.kind=cpu"), "--gpus-per-node", "2"]
    process = subprocess.Popen([*KASOKU, *command, "--quiet", "--out", str(run)], env=clean(), stderr=subprocess.PIPE)
    try:
        wait_for_step(run, 12, [])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert largest_difference(undisturbed, run) == 0


@pytest.mark.process
def test_without_elastic_a_death_ends_all_ranks(tmp_path: Path) -> None:
    ranks = lose(tmp_path / "run", 2, [1], signal.SIGKILL, "faults.elastic=false", "faults.dead_s=3", "epochs=400")
    assert [code for code, _ in ranks] == [4, -9], ranks
    assert "start all ranks again" in ranks[0][1]


# ---- its parts


def _aborted(comm: Comm) -> str:
    channel = comm.channel()
    comm.all_reduce(torch.zeros(1)).wait()
    channel.all_reduce(torch.zeros(1)).wait()
    if comm.rank == 0:
        time.sleep(6)  # alive, and not in the collective
        return ""
    timer = threading.Timer(0.5, abort)
    timer.start()
    began = time.monotonic()
    try:
        channel.all_reduce(torch.zeros(1)).wait()
    except RuntimeError:
        return "raised" if time.monotonic() - began < 4 else "late"
    return "went on"


@pytest.mark.process
def test_abort_frees_a_rank_that_waits_for_a_living_one() -> None:
    assert on_processes(2, _aborted) == ["", "raised"]


def _steps(comm: Comm, shares: Shares, groups: int) -> dict[str, torch.Tensor]:
    recipe = load(RECIPE, [EXACT, "norm_batch=8", "device.precision=fp32", "epochs=1", "device.threads=1"])
    job = build(recipe, comm, shares=shares).job
    for step, (x, y) in enumerate(job.loader, 1):
        job.backward(job.loss(job.model(x), y))
        if step % job.accumulate == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        if step == groups * job.accumulate:
            break
    return {name: value.clone() for name, value in job.model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_exact_sums_give_the_same_bits_however_parts_are_spread(size: int) -> None:
    recipe = load(RECIPE, ["norm_batch=8"])
    alone = _steps(Solo(), spread(recipe, 8, 1), 3)
    for mine in Threads(size).run(lambda comm: _steps(comm, spread(recipe, 8, comm.size), 3)):
        assert all(torch.equal(alone[name], value) for name, value in mine.items())


def test_a_gradient_beyond_exact_sums_becomes_nan_and_not_another_number() -> None:
    model = nn.Linear(1, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0)).apply(AllReduce(exact=True))
    job.backward(model(torch.full((1, 1), 1000.0)).sum())
    job.optimizer.step()
    assert model.weight.isnan().all()


def test_a_rank_that_lost_the_run_folder_writes_nothing_into_it(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    first.write("recipe.toml", "x = 1")
    members = Election()
    members.folder, members.token = tmp_path, "0123456789"
    members.claim(1)
    with pytest.raises(InputError, match="another group of ranks goes on"):
        members.claim(1)
    (tmp_path / "lock").unlink()  # as the new rank 0 does
    second = RunFolder(tmp_path, resume=True)
    second.write("data.json", "{}")
    whole = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="other ranks go on with this run"):
        first.write("recipe.toml", "x = 2")
    first.close()
    assert (tmp_path / "recipe.toml").read_text() == "x = 1"
    assert (tmp_path / "manifest.json").read_bytes() == whole
    second.close()


def test_a_rank_that_comes_while_another_leads_is_answered_and_not_counted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").touch()
    election = Election()
    election.folder, election.token = tmp_path, "0123456789"
    election.addresses = [("127.0.0.1", 1), ("127.0.0.1", 2)]
    ours, theirs = socket.socketpair()
    claim = election.claim

    def late(number: int) -> None:
        election._answer(ours, {"kind": "meet", "token": election.token, "number": number, "rank": 1})
        claim(number)

    monkeypatch.setattr(election, "claim", late)
    group = election.elect({1}, 1.0)
    assert (group.rank, group.addresses, group.number) == (0, election.addresses[:1], 1)
    theirs.settimeout(5.0)
    assert json.loads(theirs.recv(1000))["reason"]
    assert not election._waiting
    theirs.close()


def test_parts_are_spread_as_evenly_as_can_be() -> None:
    recipe = load(RECIPE, ["batch=64", "norm_batch=8"])
    assert part_of(recipe, 2) == 8
    assert spread(recipe, 8, 3) == Shares((24, 24, 16), 8)
    with pytest.raises(InputError, match="too few for 9 ranks"):
        spread(recipe, 8, 9)


def test_a_rank_that_starts_is_alone_where_nobody_trains(tmp_path: Path) -> None:
    assert Membership().find(None) is None
    assert Membership().find(tmp_path) is None
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        found = {"token": "x", "first": 2, "addresses": [nobody.getsockname()]}
        (tmp_path / MEMBERS).write_text(json.dumps(found))
        assert Membership().find(tmp_path) is None


@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"), LostRankError, "rank 0 lost another one at the"),
        (RuntimeError("can't start new thread"), RuntimeError, "^can't start new thread$"),
    ],
)
def test_only_a_failed_collective_is_a_lost_rank_at_the_start(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, raised: type[Exception], line: str
) -> None:
    def start(*_: object) -> None:
        raise error

    monkeypatch.setattr(Watchdog, "start", start)
    with pytest.raises(raised, match=line):
        Membership().start(Solo(), ("127.0.0.1", 1))


def test_a_rank_that_comes_when_all_is_over_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / MEMBERS).write_text(json.dumps({"lost": True}))
    election, began = Election(), time.monotonic()
    election.open(tmp_path, "", 2)
    with pytest.raises(InputError, match="the training has ended meanwhile: start it again"):
        election.join()
    assert time.monotonic() - began < 1


def test_a_training_goes_on_from_its_newest_copy(tmp_path: Path) -> None:
    recipe = load(RECIPE, ["epochs=1", "device.threads=1", "device.precision=fp32", "evaluate.target=0"])
    snapshots = Snapshots(Membership())
    whole = fit(build(recipe), None, started=0.0, quiet=True)
    training = replace(build(recipe), snapshots=snapshots)
    trainer = Trainer(training, None, started=0.0, quiet=True)
    for step, _ in enumerate(trainer.steps([]), 1):
        if step == 10:
            break
    snapshots.goes_on = True
    result = fit(replace(build(recipe), snapshots=snapshots), None, started=0.0, quiet=True)
    assert (result.top1, result.loss, result.epochs) == (whole.top1, whole.loss, whole.epochs)


def test_asynchronous_ranks_go_on_from_the_mean_and_a_newcomer_gets_it() -> None:
    def meet(comm: Comm) -> Any:
        model, snapshots = nn.BatchNorm1d(1), Snapshots(Membership())
        for x in (*model.parameters(), *model.buffers()):
            x.data.fill_(4 * comm.rank)
        if comm.rank < 2:
            snapshots._copies = {10 + comm.rank: {"weights": model.state_dict(), "job": f"of {comm.rank}"}}
        return snapshots._means(comm, comm.gather_objects([*snapshots._copies]), model)

    for copies in Threads(3).run(meet):
        ((step, copy),) = copies.items()
        assert (step, copy["job"]) == (11, "of 1")
        assert [x.item() for x in copy["weights"].values()] == [2, 2, 2, 2, 4]  # the last is an integer: the largest


def test_copies_share_no_memory_with_the_training() -> None:
    state = {"w": torch.ones(2), "more": [{"m": torch.ones(1)}], "n": 3}
    copy = _copied(state)
    state["w"] += 1  # type: ignore[operator]
    assert copy["w"].tolist() == [1, 1]
    again = _copied(state, copy)
    assert again["w"] is copy["w"]
    assert again["w"].tolist() == [2, 2]
