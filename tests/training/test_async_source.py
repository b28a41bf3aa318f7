"""`kasoku train` with asynchronous ranks: each image once an epoch, sync points after whole batches."""

import json
import signal
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers.started import RECIPE, started, stop_by_sigterm, wait_for_checkpoints
from kasoku.config.recipe import Recipe, dumps, load
from kasoku.core import Comm, InputError, Threads, process_start
from kasoku.data.loading.executor import FileExecutor
from kasoku.data.loading.shuffle import order as order_of_epoch
from kasoku.training.batches import AsyncSource
from kasoku.training.control import Request
from kasoku.training.run_folder import run_folder
from kasoku.training.run_state import DivergedError, Result
from kasoku.training.trainer import Trainer, build, fit

OURS = "kasoku.distributed.Asynchronous"
SETTINGS = [
    "model={use='kasoku.models.cifarnet', widths=[4, 8]}",
    "optimizer={use='kasoku.optim.sgd', lr=0.1, momentum=0.9}",
    "loss={use='kasoku.optim.cross_entropy'}",
    "device.precision=fp32",
    "device.threads=1",
    "schedule={use='kasoku.core.Constant'}",
    "evaluate.target=0",
    "epochs=2",
]


def recipe(*settings: str, **technique: Any) -> Recipe:
    keys = "".join(f", {key} = {json.dumps(value)}" for key, value in technique.items())
    return load(RECIPE, [*SETTINGS, f"techniques=[{{use='{OURS}'{keys}}}]", *settings])


def fitted(asked: Recipe, path: Path, *, size: int = 2, resume: bool = False) -> tuple[list[Result], list[list[int]]]:
    """Results, and the images each rank trained on, of ranks that take turns."""
    seen: list[list[int]] = [[] for _ in range(size)]

    def rank(comm: Comm) -> Result:
        training = build(asked, comm)
        plain = training.job.plain_loader
        training.job.before_step(lambda: seen[comm.rank].extend(plain.index_N.tolist()))
        with run_folder(comm, path, resume=resume) as run:
            return fit(training, run, started=process_start(), resume=resume, quiet=True)

    return Threads(size).run(rank), seen


def test_every_image_is_trained_on_once_an_epoch(tmp_path):
    results, seen = fitted(recipe("evaluate.every=0.5", "last_batch=fill", "batch=100", "epochs=1"), tmp_path / "run")
    every = [index for rank in seen for index in rank]
    assert set(every) == set(range(1437))
    assert len(every) == 1500
    assert [r.epochs for r in results] == [1.0, 1.0]
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["steps"] == 15
    stale = json.loads((tmp_path / "run" / "staleness.json").read_text())
    assert sum(stale["updates"].values()) >= 30
    assert stale["mean"] > 0


def images(folder: Path, count: int) -> Path:
    """Image files of two classes, bright and dark."""
    draw = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for label, level in (("bright", 200), ("dark", 20)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 50, (20, 20, 3), generator=draw, dtype=torch.uint8) + level
                Image.fromarray(pixels.numpy()).save(folder / split / label / f"{number}.png")
    return folder


def test_files_that_are_decoded_ahead_are_trained_on_once_an_epoch(tmp_path):
    data = f"data={{use='kasoku.data.folder', root='{images(tmp_path / 'images', 36)}', size=16}}"
    results, seen = fitted(recipe(data, "batch=12", "epochs=2", "evaluate.every=0.5"), tmp_path / "run", size=3)
    every = [index for rank in seen for index in rank]
    assert sorted(every) == sorted([*range(72)] * 2)
    assert results[0].epochs == 2.0


def test_it_learns(tmp_path):
    (result, other), _ = fitted(recipe("epochs=6", "evaluate.every=3", "model.widths=[16, 32]"), tmp_path / "run")
    assert result.top1 == other.top1 > 0.9


def test_a_rule_that_scales_weights_learns_too(tmp_path):
    settings = [f"techniques=[{{use='{OURS}'}}]", "epochs=6", "schedule.epochs=6", "device.threads=1"]
    (result, other), _ = fitted(load(RECIPE, settings), tmp_path / "run")  # its own rule is Muon
    assert result.top1 == other.top1 > 0.9


def test_a_fast_rank_takes_more_of_the_data(tmp_path):
    """Rank 1 gives the turn away three times before each step of its own."""
    counts = [0, 0, 0]

    def rank(comm: Comm) -> None:
        training = build(recipe("epochs=1", "batch=48"), comm)
        job = training.job

        def counted() -> None:
            counts[comm.rank] += 1
            for _ in range(3 * (comm.rank == 1)):
                comm.block("its turn", lambda: True)

        job.after_step(counted)
        with run_folder(comm, tmp_path / "run", resume=False) as run:
            fit(training, run, started=process_start(), quiet=True)

    Threads(3).run(rank)
    assert sum(counts) == 29 * 3
    assert counts[0] > 1.5 * counts[1] < counts[2]


def test_resumed_in_mid_epoch_it_goes_on_with_the_images_that_are_left(tmp_path):
    asked = recipe("save.every_steps=8", "save.keep=9", "evaluate.every=1", "epochs=1")
    run = tmp_path / "run"
    _, first = fitted(asked, run)
    steps = sorted(int(c.name.removeprefix("step-")) for c in (run / "checkpoints").glob("step-*"))
    assert steps == [8, 16, 22]
    for late in [c for n in (16, 22) for c in (run / "checkpoints").glob(f"step-*{n}")]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    (run / "recipe.toml").write_text(dumps(asked))
    results, seen = fitted(asked, run, resume=True)
    assert sum(map(len, seen)) == 14 * 64
    left = {index for rank in seen for index in rank}
    assert len(left) == 14 * 64
    assert left < {index for rank in first for index in rank}
    assert not left & set(order_of_epoch(1437, asked.seed, 0)[: 8 * 64].tolist())
    assert results[0].epochs == 1.0


def test_steps_together_at_first_and_then_apart(tmp_path):
    results, seen = fitted(recipe("epochs=2", warmup=0.5, finish=1.5), tmp_path / "run")
    for rank in seen:  # an equal part of what is trained on together
        assert len(rank[: 11 * 32]) == len(rank[-11 * 32 :]) == 11 * 32
    for one, epoch, place in ((0, 0, slice(0, 11 * 32)), (1, 1, slice(-11 * 32, None))):
        batches = order_of_epoch(1437, 0, epoch)[(0 if not epoch else 11 * 64) : (11 * 64 if not epoch else 22 * 64)]
        own = batches.view(11, 2, 32)[:, one].reshape(-1)
        assert seen[one][place] == own.tolist()
    assert results[0].epochs == 2.0
    assert sum(map(len, seen)) == 44 * 64
    stale = json.loads((tmp_path / "run" / "staleness.json").read_text())
    assert sum(stale["updates"].values()) >= 44  # of the middle epoch


def test_bound_zero_is_the_run_of_overlap_bit_for_bit(tmp_path):
    def weights(asked: Recipe, name: str) -> dict[str, torch.Tensor]:
        fitted(asked, tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    ours = weights(recipe("epochs=1", max_staleness=0), "ours")
    theirs = weights(
        load(
            RECIPE,
            [
                *SETTINGS,
                "epochs=1",
                "techniques=[{use='kasoku.distributed.Overlap', buckets={use='kasoku.distributed.Graded'}}]",
            ],
        ),
        "theirs",
    )
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_a_loss_that_is_not_finite_ends_all_ranks(tmp_path):
    with pytest.raises(DivergedError, match="last good checkpoint"):
        fitted(recipe("optimizer.lr=1e30", "epochs=4"), tmp_path / "run")


OVERLAP = "kasoku.distributed.Overlap"


def beside(*techniques: str, **settings: Any) -> str:
    """The setting of the techniques: Asynchronous and these."""
    keys = "".join(f", {key} = {json.dumps(value)}" for key, value in settings.items())
    own = f"{{use='{OURS}'{keys}}}"
    return f"techniques=[{', '.join([own, *techniques])}]"


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (["accumulate=2"], 2),
        (["norm_batch=16"], 2),
        (["norm_batch=16", "accumulate=1"], 4),
        (["norm_batch=16", "norm_average=0.5", beside("{use='kasoku.optim.EMA', decay=0.9}")], 2),
        ([beside("{use='kasoku.device.LossScale'}")], 2),
        ([beside(f"{{use='{OVERLAP}'}}", node=2)], 4),
        ([beside(f"{{use='{OVERLAP}'}}", node=2), "accumulate=2"], 4),
        (["norm_batch=32", "accumulate=1", beside("{use='kasoku.distributed.AllReduce'}", node=2)], 4),
        ([beside(f"{{use='{OVERLAP}'}}", node=2, warmup=0.5, finish=1.5), "norm_batch=16"], 4),
        ([beside(f"{{use='{OVERLAP}'}}")], 2),
    ],
)
def test_what_acts_within_a_step_trains_on_each_image_once_an_epoch(settings: list[str], size: int, tmp_path):
    whole = recipe("evaluate.every=0.5", "save.every_steps=8", "save.keep=9", *settings)
    results, seen = fitted(whole, tmp_path / "run", size=size)
    assert [result.epochs for result in results] == [2.0] * size
    parts = whole.parts(size)
    trained = sum(len(rank) for rank in seen) * parts  # the last part of each step was noted
    assert trained == 44 * 64
    if parts == 1:
        every = [index for rank in seen for index in rank]
        first, second = (set(order_of_epoch(1437, 0, epoch)[: 22 * 64].tolist()) for epoch in (0, 1))
        assert {index for index in every if every.count(index) == 2} == first & second
    assert results[0].top1 == results[-1].top1


@pytest.mark.parametrize("settings", [["accumulate=2"], [beside(f"{{use='{OVERLAP}'}}", node=2), "norm_batch=8"]])
def test_parts_and_nodes_resume_in_mid_epoch(settings: list[str], tmp_path):
    asked, run = recipe("save.every_steps=8", "save.keep=9", "epochs=1", *settings), tmp_path / "run"
    fitted(asked, run, size=4)
    for late in [c for n in (16, 22) for c in (run / "checkpoints").glob(f"step-*{n}")]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    (run / "recipe.toml").write_text(dumps(asked))
    results, seen = fitted(asked, run, size=4, resume=True)
    assert sum(map(len, seen)) * asked.parts(4) == 14 * 64
    left = {index for rank in seen for index in rank}
    assert not left & set(order_of_epoch(1437, asked.seed, 0)[: 8 * 64].tolist())
    assert results[0].epochs == 1.0


def test_a_growing_batch_grows_on_all_ranks(tmp_path):
    grow = "{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[1.0], gamma=2.0}}"
    asked = recipe(beside(grow, warmup=0.5), "evaluate.every=0.5")
    results, seen = fitted(asked, tmp_path / "run")
    assert results[0].epochs == 2.0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 22 + 11
    assert sum(map(len, seen)) == 22 * 64 + 11 * 64  # of a batch in two parts the last was noted


def test_ranks_of_a_node_take_the_parts_of_its_shares(tmp_path):
    data = f"data={{use='kasoku.data.folder', root='{images(tmp_path / 'images', 36)}', size=16}}"
    asked = recipe(data, "batch=12", "epochs=2", beside(f"{{use='{OVERLAP}'}}", node=2))
    _, seen = fitted(asked, tmp_path / "run", size=4)
    assert sorted(index for rank in seen for index in rank) == sorted([*range(72)] * 2)
    shares = [order_of_epoch(72, 0, epoch).view(6, 2, 2, 3) for epoch in range(2)]  # batch, share, rank, image
    dealt = {
        (rank, *part.tolist()) for share in shares for rank in range(2) for part in share[:, :, rank].reshape(-1, 3)
    }
    for rank, own in enumerate(seen):
        assert {(rank % 2, *own[at : at + 3]) for at in range(0, len(own), 3)} <= dealt
    assert [len(rank) for rank in seen[::2]] == [len(rank) for rank in seen[1::2]]


def test_no_rank_waits_for_another_between_sync_points(tmp_path, monkeypatch):
    """Between two sync points no collective is called: neither for requests, nor losses, nor statistics."""
    inside, called = [False, False], []
    whole = AsyncSource.batches

    def batches(self):
        inside[self.job.comm.rank] = True
        yield from whole(self)
        inside[self.job.comm.rank] = False

    def noted(rank, join, what, *rest):
        if inside[rank]:
            called.append(what)
        return join(what, *rest)

    def rank(comm: Comm) -> None:
        training = build(recipe("epochs=1"), comm)
        for one in (comm, training.job.kept("asynchronous").comm):
            join = one._start
            one._start = partial(noted, comm.rank, join)
        with run_folder(comm, tmp_path / "run", resume=False) as run:
            fit(training, run, started=process_start(), quiet=True)

    monkeypatch.setattr(AsyncSource, "batches", batches)
    Threads(2).run(rank)
    assert called == []
    assert inside == [False, False]


@pytest.mark.parametrize("size", [2, 4])
def test_a_signal_to_one_rank_stops_all_and_resuming_goes_on(tmp_path, monkeypatch, size: int):
    """Four are two nodes of two."""
    nodes = [beside(f"{{use='{OVERLAP}'}}", node=2)] * (size > 2)
    own_request, run, asked = Trainer.own_request, tmp_path / "run", recipe("epochs=1", *nodes)

    def signalled(self: Trainer) -> Request:
        late = self.job.comm.rank == size - 1 and self.job.plain_loader.last_share >= 5 * size
        return Request(stop=signal.SIGTERM) if late else own_request(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "own_request", signalled)
        stopped, first = fitted(asked, run, size=size)
    assert [result.stopped for result in stopped] == ["SIGTERM"] * size
    (run / "recipe.toml").write_text(dumps(asked))
    results, rest = fitted(asked, run, size=size, resume=True)
    assert [result.epochs for result in results] == [1.0] * size
    every = [index for rank in (*first, *rest) for index in rank]
    assert 5 * 64 <= sum(map(len, first)) < 22 * 64
    assert len(every) == len(set(every)) == 22 * 64


@pytest.mark.process
def test_a_signal_to_the_process_of_one_rank_stops_all(tmp_path):
    run = tmp_path / "run"
    settings = [s for x in (*SETTINGS, f"techniques=[{{use='{OURS}'}}]") for s in ("--set", x)]
    endless = [*settings, "--set", "epochs=10000", "--set", "evaluate.every=1", "--set", "save.every_steps=5"]
    ranks = started(["train", str(RECIPE), *endless, "--quiet", "--out", str(run)], 2)
    wait_for_checkpoints(ranks, run)
    asked = time.monotonic()
    stop_by_sigterm(ranks, run, 1)
    assert time.monotonic() - asked < 30
    step = json.loads((run / "result.json").read_text())["steps"]
    epochs = f"epochs={(step + 22) / 22:.3f}"
    again = started(["train", "--resume", str(run), "--set", epochs, "--quiet"], 2)
    try:
        said = [rank.communicate(timeout=60)[1] for rank in again]
    finally:
        for rank in again:
            rank.kill()
    assert [rank.returncode for rank in again] == [0, 0], said
    assert json.loads((run / "result.json").read_text())["steps"] == step + 22


@pytest.mark.process
@pytest.mark.parametrize(
    ("size", "techniques"), [(2, beside("{use='kasoku.optim.EMA'}")), (4, beside(f"{{use='{OVERLAP}'}}", node=2))]
)
def test_the_command_trains_groups_in_parts_on_processes_and_resumes(size: int, techniques: str, tmp_path):
    run, asked = tmp_path / "run", (*SETTINGS, techniques, "norm_batch=8", "norm_average=1", "epochs=1")
    settings = [s for setting in asked for s in ("--set", setting)]
    for arguments in (["train", str(RECIPE), *settings, "--out", str(run)], ["train", "--resume", str(run)]):
        more = ["--set", "epochs=1.5"] * ("--resume" in arguments)
        ranks = started([*arguments, *more, "--quiet"], size)
        try:
            said = [rank.communicate(timeout=120)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * size, said
    assert json.loads((run / "result.json").read_text())["steps"] == 33


def test_steps_together_may_begin_off_the_grid_of_batches(tmp_path):
    results, seen = fitted(recipe("epochs=2", finish=1.2), tmp_path / "run")
    assert results[0].epochs == 2.0
    assert sum(map(len, seen)) == 44 * 64


def test_a_rank_that_gets_no_share_ends_nothing(tmp_path):
    """Rank 1 asks only when a round of two shares is given away."""

    def rank(comm: Comm) -> tuple[Result, int]:
        training = build(recipe("epochs=0.1363636", "evaluate.every=1", "save.every_steps=1"), comm)
        exchange, plain, steps = training.job.kept("asynchronous"), training.job.plain_loader, []
        ask = exchange.share_of_data

        def late(*batches: int, stop: bool = False) -> int | None:
            if comm.rank == 1:
                server = exchange.transport._servers[0]
                comm.block("all shares are dealt", lambda: server.dealt is not None and len({*server.dealt}) == 1)
            return ask(*batches, stop=stop)

        exchange.share_of_data = late
        training.job.before_step(lambda: steps.append(plain.last_share))
        with run_folder(comm, tmp_path / "run", resume=False) as run:
            return fit(training, run, started=process_start(), quiet=True), len(steps)

    (result, all_of_them), (_, none) = Threads(2).run(rank)
    assert (all_of_them, none) == (6, 0)
    assert result.epochs == pytest.approx(3 / 22, abs=1e-3)
    assert sorted(c.name for c in (tmp_path / "run" / "checkpoints").glob("step-*"))[-1].endswith("3")


def test_losses_are_written_at_every_sync_point(tmp_path):
    fitted(recipe("epochs=2", "evaluate.every=0.5"), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [11, 22, 33, 44]


@pytest.mark.parametrize(
    ("size", "technique"), [(3, ""), (3, ", warmup=1.0"), (4, ", node=2"), (4, ", node=2, warmup=1.0")]
)
def test_a_source_that_fails_for_one_rank_ends_all(tmp_path, monkeypatch, size: int, technique: str):
    data = f"data={{use='kasoku.data.folder', root='{images(tmp_path / 'images', 36)}', size=16}}"
    monkeypatch.setattr(FileExecutor, "safe_batches", property(lambda _: 0, lambda *_: None), raising=False)

    def failing(batches):
        yield from islice(batches, 2)
        raise InputError("the source is gone")

    def rank(comm: Comm) -> None:
        inside = f", {{use='{OVERLAP}'}}" if "node" in technique else ""
        training = build(recipe(data, "batch=12", f"techniques=[{{use='{OURS}'{technique}}}{inside}]"), comm)
        if comm.rank == 1:
            training.job.around_loader(failing)
        with run_folder(comm, tmp_path / "run", resume=False) as run:
            fit(training, run, started=process_start(), quiet=True)

    with pytest.raises(InputError, match="rank 1: the source is gone"):
        Threads(size).run(rank)
