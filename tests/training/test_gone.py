"""Input that fails on one rank ends all of them after the same step, with nothing lost."""

import gc
import json
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.grids import covering
from helpers.photos import photos_command
from helpers.started import RECIPE, started
from kasoku.cli import main
from kasoku.config.recipe import load
from kasoku.core import Batch, Comm, InputError, Job, Solo, Threads
from kasoku.data import Dataset, GoneError, loader, order
from kasoku.data.loading import executor
from kasoku.distributed.consensus import SharedInputError
from kasoku.distributed.counting_comm import BUSY, STALLED, Activity
from kasoku.optim import sgd
from kasoku.training.batches import BatchBarrier, batches
from kasoku.training.run_folder import run_folder
from kasoku.training.trainer import build, fit


@pytest.fixture(autouse=True)
def _threads_end_with_their_test() -> Iterator[None]:
    yield
    gc.collect()  # an error holds the frames it went through, and those an epoch that was not ended


# ---- the batch barrier


def passed(comm: Comm, fails_at: int, rank: int, ahead: int) -> int:
    """How many of 20 batches a rank took, where the input of one of them fails; each knows some batches ahead."""
    barrier = BatchBarrier(comm)
    for batch in range(20):
        mine = fails_at if comm.rank == rank else 20
        failure = InputError("no batch") if batch == mine else None
        sure = max(0, min(ahead if comm.rank else 3, mine - batch - 1))
        if not barrier.passes(failure, sure):
            return batch
    return 20


@pytest.mark.parametrize(("fails_at", "rank", "ahead"), covering([0, 1, 7, 19, 20], [0, 1, 2], [0, 1, 3]))
def test_all_ranks_stop_before_the_batch_that_one_of_them_lacks(fails_at: int, rank: int, ahead: int) -> None:
    assert Threads(3).run(lambda comm: passed(comm, fails_at, rank, ahead)) == [fails_at] * 3


def test_where_batches_are_made_anew_those_that_were_sure_may_fail() -> None:
    def run(comm: Comm) -> int:
        barrier = BatchBarrier(comm)
        fails = (InputError("no batch") if comm.rank == 0 and batch == 7 else None for batch in range(20))
        return next(batch for batch, failure in enumerate(fails) if not barrier.passes(failure, 10, anew=batch == 7))

    assert Threads(3).run(run) == [7] * 3


class Noted:
    """A rank that notes at which batch a collective was begun, and at which it was waited for."""

    size, rank, batch = 2, 0, 0

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def all_reduce(self, x: torch.Tensor, *, op: str) -> object:
        begun = self.batch

        class Work:
            def wait(work) -> None:  # noqa: N805
                self.waits.append((begun, self.batch))

        return Work()


@pytest.mark.parametrize(("sure", "later"), [(0, {0}), (1, {1}), (3, {1, 3})])
def test_ranks_that_have_batches_in_hand_hear_of_each_other_steps_later(sure: int, later: set[int]) -> None:
    comm = Noted()
    barrier = BatchBarrier(comm)  # type: ignore[arg-type]
    for comm.batch in range(40):
        assert barrier.passes(None, sure)
    assert {heard - begun for begun, heard in comm.waits[1:]} == later


# ---- whole trainings


@dataclass(eq=False)
class Photos:
    """A split made on the spot. `lost`: index -> what reading it raises."""

    images: int
    lost: dict[int, InputError] = field(default_factory=dict)

    @property
    def labels_N(self) -> torch.Tensor:
        return torch.arange(self.images) % 2

    def __len__(self) -> int:
        return self.images

    def read(self, index: int) -> np.ndarray:
        if index in self.lost:
            raise self.lost[index]
        return np.random.default_rng(index).integers(0, 256, (8, 8, 3), np.uint8)

    def name(self, index: int) -> str:
        return f"{index % 2}/{index}.png"


LINE = "far/away: no answer for 60 s"
SETTINGS = (
    "optimizer={use='kasoku.optim.sgd', lr=0.1, momentum=0.9}",
    "model.widths=[8, 8]",
    "device.precision=fp32",
    "device.threads=1",
    "epochs=2",
    "schedule.epochs=2",
    "schedule.warmup=0",
    "evaluate.target=0",
    "batch=8",
)


def made(**more: float) -> Dataset:
    return Dataset("made", ("even", "odd"), Photos(40), Photos(16), 3, (8, 8), (0.5,) * 3, (0.25,) * 3, **more)


@pytest.mark.parametrize("lost", [{}, {5: InputError("5: damaged")}], ids=["whole", "damaged"])
def test_the_parts_of_a_share_pass_through_the_techniques_in_turn(lost: dict[int, InputError]) -> None:
    data = made(max_bad_fraction=0.1)
    data.train.lost = lost

    def run(comm: Comm) -> str:
        parts = (3, 1)[comm.rank]
        images = loader(data, "train", 8, comm=comm, parts=parts, shares=(6, 2), at_once=2, threads=1)
        job = Job(torch.nn.Linear(1, 1), sgd, loader=images, comm=comm, accumulate=parts)
        events = ""

        def noted(inner: Iterable[Batch]) -> Iterator[Batch]:
            nonlocal events
            for batch in inner:
                events += "m"
                yield batch

        job.around_loader(noted)
        for _ in batches(job, Activity(0.0), BatchBarrier(comm)):
            events += "t"
        return events

    assert Threads(2).run(run) == ["mt" * 5 * 3, "mt" * 5]


Lost = dict[str, dict[int, InputError]]  # split -> index -> what reading it raises


def trained(comm: Comm, run: Path, *more: str, lost: Lost | None = None, resume: bool = False) -> InputError | None:
    """A training on made photos, of which those in `lost` are so from the first step on; what ended it early."""
    data = made(max_bad_fraction=0.1)
    training = build(load(RECIPE, [*SETTINGS, *more]), comm, dataset=data)
    for split, images in (lost or {}).items():
        getattr(data, split).lost = images
    with run_folder(comm, run, resume=resume) as held:
        if held:
            held.write("recipe.toml", "")
        try:
            fit(training, held, started=comm.clock.now(), resume=resume, quiet=True)
        except InputError as error:
            return error
        finally:
            training.job.close()
    return None


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def same(a: Path, b: Path) -> bool:
    left, right = (load_file(run / "model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def judged(run: Path) -> list[int]:
    """The steps after which it was evaluated."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "test_top1" in line]


def gone_after(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of all training images goes when so many have been read."""
    source, left = executor._Iteration._source, iter(range(images))

    def failing(run: Any, index: int) -> bytes | np.ndarray:
        if run.pipeline.train and next(left, None) is None:
            raise GoneError(LINE)
        return source(run, index)

    monkeypatch.setattr(executor._Iteration, "_source", failing)


def shown(seed: int, batch: int, place: int) -> int:
    """The index of the image at a place of a batch of the first epoch."""
    return int(order(40, seed, 0)[8 * batch + place])


@pytest.mark.parametrize(("seed", "where"), covering([0, 1], [(1, 5), (2, 4), (2, 7)], together=1))
def test_a_source_gone_on_one_rank_has_all_save_the_last_whole_step(
    tmp_path: Path, seed: int, where: tuple[int, int]
) -> None:
    parts, place = where
    whole, run, more = tmp_path / "whole", tmp_path / "run", (f"accumulate={parts}", f"seed={seed}")
    Threads(2).run(lambda comm: trained(comm, whole, *more))
    lost: list[Lost] = [{}, {"train": {shown(seed, 2, place): GoneError(LINE)}}]
    zero, one = Threads(2).run(lambda comm: trained(comm, run, *more, lost=lost[comm.rank]))
    assert str(zero) == str(one) == f"rank 1: {LINE}"
    assert isinstance(zero, SharedInputError)
    assert not isinstance(one, SharedInputError)
    assert steps_saved(run) == [2]
    Threads(2).run(lambda comm: trained(comm, run, *more, resume=True))
    assert same(whole, run)


@pytest.mark.parametrize("ranks", [{0}, {0, 1}])
def test_it_may_be_gone_on_rank_0_or_on_all_ranks(tmp_path: Path, ranks: set[int]) -> None:
    lost: list[Lost] = [
        {"train": {shown(0, 2, 4 * rank): GoneError(LINE)}} if rank in ranks else {} for rank in range(2)
    ]
    zero, one = Threads(2).run(lambda comm: trained(comm, tmp_path, lost=lost[comm.rank]))
    assert str(zero) == str(one) == LINE
    assert steps_saved(tmp_path) == [2]


def test_it_may_be_gone_in_a_later_epoch(tmp_path: Path) -> None:
    places = zip(*(order(40, 0, epoch).argsort().tolist() for epoch in (0, 1)), strict=True)
    image, place = next((i, b) for i, (a, b) in enumerate(places) if a % 8 < 4 <= b % 8)  # of rank 0, then of rank 1
    lost: list[Lost] = [{}, {"train": {image: GoneError(LINE)}}]
    zero, _ = Threads(2).run(lambda comm: trained(comm, tmp_path, lost=lost[comm.rank]))
    assert str(zero) == f"rank 1: {LINE}"
    assert steps_saved(tmp_path) == [5 + place // 8]


def test_test_images_gone_on_one_rank_have_all_save_the_step_before(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    Threads(2).run(lambda comm: trained(comm, whole))
    lost: list[Lost] = [{}, {"test": {5: GoneError(LINE)}}]  # of a batch of 8 in order, rank 1 has 4 to 7
    zero, one = Threads(2).run(lambda comm: trained(comm, run, lost=lost[comm.rank]))
    assert str(zero) == str(one) == f"rank 1: {LINE}"
    assert steps_saved(run) == [5]
    Threads(2).run(lambda comm: trained(comm, run, resume=True))
    assert same(whole, run)


def test_an_evaluation_that_failed_is_made_up_for(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(Solo(), whole)
    assert isinstance(trained(Solo(), run, lost={"test": {5: GoneError(LINE)}}), GoneError)
    trained(Solo(), run, resume=True)
    epochs = [[step // 5 for step in judged(path)] for path in (whole, run)]  # made up for a step later
    assert epochs == [[1, 2], [1, 2]]


def test_a_resumed_run_evaluates_when_one_that_never_stopped_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("epochs=5", "schedule.epochs=5", "evaluate.every=2", "evaluate.start=3")
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(Solo(), whole, *more)
    gone_after(3 * 40 + 17, monkeypatch)  # in the third batch of the fourth epoch
    assert isinstance(trained(Solo(), run, *more), GoneError)
    assert steps_saved(run)[-1] == 17
    monkeypatch.undo()
    trained(Solo(), run, *more, resume=True)
    assert judged(whole) == judged(run) == [20, 25]


def test_images_gone_while_statistics_are_measured_have_all_save(tmp_path: Path) -> None:
    places = [(shown(0, batch, place), place) for batch in range(5) for place in range(8)]
    image = next(i for i, place in places if place < 4 <= i % 8)  # rank 0 trains on it, rank 1 measures with it
    lost: list[Lost] = [{}, {"train": {image: GoneError(LINE)}}]
    more = "techniques=[{use='kasoku.distributed.Recalibrate'}]"
    zero, one = Threads(2).run(lambda comm: trained(comm, tmp_path, more, lost=lost[comm.rank]))
    assert str(zero) == str(one) == f"rank 1: {LINE}"
    assert steps_saved(tmp_path) == [5]


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_batch_that_fails_while_copied_ahead_is_told_in_its_turn(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = executor._Iteration.__init__

    def as_on_a_gpu(iteration: executor._Iteration, *arguments: Any) -> None:
        init(iteration, *arguments)
        iteration.copies_ahead = True

    monkeypatch.setattr(executor._Iteration, "__init__", as_on_a_gpu)
    monkeypatch.setattr(executor.PendingBatch, "ready", property(lambda batch: bool(wait(batch.chunks))))
    lost: list[Lost] = [{}, {"train": {shown(0, batch, 5): GoneError(LINE)}}]
    zero, one = Threads(2).run(lambda comm: trained(comm, tmp_path, lost=lost[comm.rank]))
    assert str(zero) == str(one) == f"rank 1: {LINE}"
    assert steps_saved(tmp_path) == [batch]


def test_alone_too_a_step_that_was_begun_is_begun_anew(tmp_path: Path) -> None:
    whole, run, more = tmp_path / "whole", tmp_path / "run", ("accumulate=2", "norm_batch=4")
    trained(Solo(), whole, *more)
    ended = trained(Solo(), run, *more, lost={"train": {shown(0, 3, 7): GoneError(LINE)}})
    assert isinstance(ended, GoneError)
    assert steps_saved(run) == [3]
    trained(Solo(), run, *more, resume=True)
    assert same(whole, run)


def test_a_member_of_an_ensemble_saves_when_its_source_is_gone_and_all_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    small = ["--set", "model={use='kasoku.models.cifarnet', widths=[8, 8]}"]
    command = photos_command(tmp_path, "--members", "2", "--quiet", *small)
    assert main([*command, "--out", str(whole)]) == 0
    gone_after(
        36, monkeypatch
    )  # of 40 in the first epoch of the first member: in its fifth batch, in any order of reads
    capsys.readouterr()
    assert main([*command, "--out", str(run)]) == 2
    assert capsys.readouterr().err == f"kasoku: {LINE}; go on with: kasoku train --resume {run}\n"
    steps = [steps_saved(run / member) for member in ("member-1", "member-2")]
    assert steps == [[4], []]
    monkeypatch.undo()
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert all(same(whole / member, run / member) for member in ("member-1", "member-2"))


OWN = """
import os
from pathlib import Path
import numpy as np
import torch
from kasoku.data import Dataset, GoneError

class Photos:
    labels_N = torch.arange(40) % 2

    def __len__(self):
        return 40

    def read(self, index):
        if os.environ["RANK"] == "1" and Path({flag!r}).exists():
            raise GoneError("far/away: no answer for 60 s")
        return np.random.default_rng(index).integers(0, 256, (8, 8, 3), np.uint8)

    def name(self, index):
        return f"{{index}}.png"

def made():
    return Dataset("made", ("even", "odd"), Photos(), Photos(), 3, (8, 8), (0.5,) * 3, (0.25,) * 3)
"""


@pytest.mark.process
def test_the_command_says_so_once_and_ends_with_2_on_every_rank(tmp_path: Path) -> None:
    run, flag, recipe = tmp_path / "run", tmp_path / "gone", tmp_path / "recipe.toml"
    (tmp_path / "own_photos.py").write_text(OWN.format(flag=str(flag)))
    recipe.write_text(RECIPE.read_text().replace("kasoku.data.digits", "own_photos.made"))
    options = [part for setting in (*SETTINGS, "epochs=10000", "schedule.epochs=0") for part in ("--set", setting)]
    ranks = started(["train", str(recipe), *options, "--quiet", "--out", str(run)], 2)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        flag.touch()
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    advice = f"go on with: kasoku train --resume {run} --allow own_photos"
    assert said == [f"kasoku: rank 1: far/away: no answer for 60 s; {advice}\n", ""]
    assert len(steps_saved(run)) == 1


# ---- bad images


def bad(*indices: int) -> Lost:
    return {"train": {index: InputError(f"{index}.png: cannot be decoded") for index in indices}}


def test_too_many_bad_images_on_one_rank_end_all_of_them_with_the_list(tmp_path: Path) -> None:
    lost = [{}, bad(*(shown(0, batch, place) for batch in (0, 1) for place in (4, 5, 6)))]
    zero, one = Threads(2).run(lambda comm: trained(comm, tmp_path / "run", lost=lost[comm.rank]))
    assert str(zero) == str(one)
    assert str(zero).startswith("rank 1: more than 4 of 40 images cannot be decoded (max_bad_fraction=0.1): ")
    assert str(zero).count("png: cannot be decoded") == 5
    assert steps_saved(tmp_path / "run") == []


def checkpoint(run: Path) -> dict[int, str]:
    newest = max((run / "checkpoints").glob("step-*"))
    state = torch.load(newest / "state.pt", weights_only=True)["job"]["loader"]
    skipped: dict[int, str] = state["skipped"]
    return skipped


def test_a_checkpoint_holds_what_both_ranks_skipped_and_resuming_names_it(tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", shown(0, 0, 1), shown(0, 0, 5)  # of rank 0 and of rank 1
    later = shown(0, 3, 6)
    lost: Lost = bad(first, second)
    gone: list[Lost] = [lost, {"train": {**lost["train"], later: GoneError(LINE)}}]
    Threads(2).run(lambda comm: trained(comm, run, lost=gone[comm.rank]))
    assert checkpoint(run) == {index: f"{index}.png: cannot be decoded" for index in sorted((first, second))}
    more = [shown(0, 3, place) for place in (4, 5, 6)]  # three count here; the two from before do not
    assert Threads(2).run(lambda comm: trained(comm, run, lost=bad(*more), resume=True)) == [None, None]
    assert set(checkpoint(run)) == {first, second, *more}


def test_what_was_mended_before_resuming_is_used_again_and_still_named(tmp_path: Path) -> None:
    data, state = made(max_bad_fraction=0.1), None
    for lost in (bad(3)["train"], {}):
        data.train.lost = lost
        batches = loader(data, "train", 8)
        if state:
            batches.load_state_dict(state)
        shown_N = torch.cat([y for _, y in batches])
        state = batches.state_dict()
        assert state["skipped"] == {3: "3.png: cannot be decoded"}
        assert int((shown_N == 1).sum()) == 20 - len(lost)  # 4, an even one, in the place of 3


def test_a_checkpoint_from_before_skipped_images_were_kept_still_loads() -> None:
    batches = loader(made(), "train", 8)
    batches.load_state_dict({"epoch": 1, "position": 2, "parts": 1})
    assert batches.state_dict() == {"epoch": 1, "position": 2, "parts": 1}


# ---- who waits does not hang


@pytest.mark.timing
@pytest.mark.smoke
def test_a_rank_that_waits_for_its_input_hangs_only_after_its_time() -> None:
    activity = Activity(hang_timeout_s=0.05)
    activity.step()
    with activity.busy(0.2):
        time.sleep(0.1)
        assert activity.state() == BUSY
        time.sleep(0.2)
        assert activity.state() == STALLED
    with activity.busy():
        time.sleep(0.1)
        assert activity.state() == BUSY
    assert math.isinf(activity._busy_until)
