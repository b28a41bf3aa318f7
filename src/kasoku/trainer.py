"""Fit: the loop of a training, from a recipe to a run folder with its result.

Exit codes of the command follow from what `fit` does: it returns (0), raises InputError (2), raises DivergedError (3),
or returns with `stopped` set by SIGINT or SIGTERM (75: resume it).
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from kasoku.core import Comm, InputError, Job, Solo
from kasoku.core.run import RunFolder
from kasoku.course import updates
from kasoku.data import Dataset, Loader, loader, sample
from kasoku.device import Seeded, choose
from kasoku.models import check_fits
from kasoku.optim import Rate
from kasoku.parallel import Recalibrate, VirtualRanks
from kasoku.recipe import Recipe, made, optimizer
from kasoku.watch import Result, Training, Watch


def prepare(
    recipe: Recipe, comm: Comm | None = None, *, dataset: Dataset | None = None, batches: Loader | None = None
) -> Training:
    """Builds everything a training needs.

    Args:
        recipe: what to train.
        comm: the ranks; alone by default.
        dataset: the recipe's data, where it was read before.
        batches: the training loader, where several trainings share one.

    Raises:
        InputError: where the parts do not fit each other.
    """
    comm = comm or Solo()
    start = comm.clock.now()
    chosen = choose(recipe.device)
    dataset = dataset or made(recipe.data(), Dataset, "data")
    read = comm.clock.now()
    torch.manual_seed(recipe.seed)
    facts = {"in_channels": dataset.channels, "image_size": dataset.image_size[0]}
    model = made(recipe.model(num_classes=len(dataset.classes), **facts), nn.Module, "model")
    check_fits(model, (dataset.channels, *dataset.image_size), recipe.model.use)
    look_at_data: Any = getattr(model, "prepare", None)
    if look_at_data is not None:
        look_at_data(sample(dataset, 5000))
    model.to(chosen.device)
    parts = recipe.parts(comm.size)
    train = batches or loader(dataset, "train", recipe.batch, seed=recipe.seed, device=chosen.device, comm=comm)
    train.parts, train.fill = parts, recipe.last_batch == "fill"
    test_batch = recipe.evaluate.batch or recipe.batch // parts
    test = loader(dataset, "test", test_batch, device=chosen.device, comm=comm)
    job = Job(model, lambda m: optimizer(recipe, m), loader=train, loss=recipe.loss, comm=comm, accumulate=parts)
    own = [Seeded(recipe.seed), Rate(recipe.course, recipe.rate_scale)]
    if recipe.norm_batch or recipe.norm_average:
        own.append(VirtualRanks(recipe.norm_batch, recipe.norm_average))
    job.apply(*chosen.techniques, *own, *recipe.techniques)
    if recipe.evaluate.stale and not any(isinstance(t, Recalibrate) for t in recipe.techniques):
        raise InputError("evaluate.stale = true: compares with the technique kasoku.parallel.Recalibrate; add it")
    _check_loss(job, len(dataset.classes))
    job.trace.add("data", "read the data set", start=start, stop=read)
    job.trace.add("model", "build the model", start=read, stop=comm.clock.now())
    total = updates(recipe, train.images)
    if total < 1:
        raise InputError(f"epochs={recipe.epochs}, batch={recipe.batch}: not one step in it; raise epochs")
    return Training(recipe, job, dataset, test, chosen, total, began=start)


def fit(training: Training, run: RunFolder, *, started: float, resume: bool = False, quiet: bool = False) -> Result:
    """Trains to the end, the target, or a signal.

    Args:
        training: what `prepare` made.
        run: the run folder, locked.
        started: when the process started, on the job's clock (`process_start()`).
        resume: go on from the newest good checkpoint in the folder.
        quiet: no bar, no lines.

    Raises:
        DivergedError: with the step, the last good checkpoint and the likely cause.
        InputError: when the folder cannot be written any more.
    """
    job = training.job
    if job.comm.size > 1:
        raise InputError(f"fit on {job.comm.size} ranks: one rank only so far; use a loop of your own with AllReduce()")
    with Watch(training, run, started=started, resume=resume, quiet=quiet) as watch, signals() as caught:
        for _ in steps(watch, caught):
            pass
        return watch.finish(caught[0] if caught and not watch.over else None)


def steps(watch: Watch, caught: list[str]) -> Iterator[None]:
    """The loop: gives the turn away after each batch, and ends when the training is over or a signal was caught."""
    job = watch.job
    while not watch.over and not caught:
        for x_NCHW, y_N in job.loader:
            loss = job.loss(job.model(x_NCHW), y_N)
            (loss / job.accumulate if job.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
            if not watch.whole(loss, len(y_N)):
                yield
                continue
            job.optimizer.step()
            job.optimizer.zero_grad()
            if watch.after_step() or caught:
                break
            yield


def _check_loss(job: Job, classes: int) -> None:
    """One try on made-up outputs, so that a wrong setting is found before anything is written."""
    outputs_NK, labels_N = torch.zeros(2, classes), torch.zeros(2, dtype=torch.long)
    try:
        loss = job.loss(outputs_NK, labels_N)
    except InputError as error:
        raise InputError(f"loss: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError("loss.use: a function (outputs, labels) -> one number is wanted")


@contextmanager
def signals() -> Iterator[list[str]]:
    """Collects SIGINT and SIGTERM, so that the step is finished and saved; the second one interrupts at once."""
    caught: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    try:
        old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller's business
        old = {}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
