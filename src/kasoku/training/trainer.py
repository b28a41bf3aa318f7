"""Build a training from a recipe, and fit it: the training loop.

Exit codes of the command follow from what `fit` does: it returns (0), raises InputError (2), raises DivergedError (3),
or returns with `stopped` set by SIGINT or SIGTERM (75: resume it).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from kasoku.config.recipe import Recipe, made, optimizer
from kasoku.config.sharing import check_share
from kasoku.config.technique_choice import derived_techniques, is_asynchronous, techniques_for
from kasoku.config.updates import updates
from kasoku.core import Comm, InputError, Job, Solo
from kasoku.data import Dataset, Loader, Shares, loader, sample
from kasoku.data.datasets.folder_index import OneScan
from kasoku.device import Chosen, Seeded, choose
from kasoku.distributed.consensus import SHARED_ERRORS, assert_same_on_all_ranks, model_facts, run_on_all_ranks
from kasoku.distributed.environment import Place, place
from kasoku.distributed.startup import Start
from kasoku.models import check_fits
from kasoku.optim import Rate
from kasoku.report import Timed
from kasoku.training.async_source import AsyncSource
from kasoku.training.batches import BatchSource, SyncSource
from kasoku.training.checkpointing import Checkpointing, resume_from_checkpoint
from kasoku.training.control import Request, signals
from kasoku.training.metrics import Metrics, skipped_images
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import Result, RunState, Training
from kasoku.training.validation import Validation


class Trainer:
    """A training from its first batch, or from a checkpoint, to its result; a context manager.

    Note: two kinds of training. Ranks that take each batch together have a sync point after every step, ranks that do
    not wait for each other (Asynchronous) only now and then. The batch source is all that differs.

    Note: many ranks. All ranks do what communicates after the same steps: they read losses, evaluate, save and stop at
    a sync point. Rank 0 has the run folder; what fails there, fails on all ranks.

    Args:
        training: the result of `build`.
        run: the run folder, locked; None on all ranks but 0.
        started: when the process started, on the job's clock (`process_start()`).
        resume: continue from the newest good checkpoint in the folder.
        quiet: no bar, no lines.
    """

    def __init__(
        self, training: Training, run: RunFolder | None, *, started: float, resume: bool = False, quiet: bool = False
    ) -> None:
        self.job, self.state = training.job, RunState(training, run)
        if resume:
            resume_from_checkpoint(self.state)
        self.metrics = Metrics(self.state, started=started, resumed=resume, quiet=quiet)
        self.checkpointing = Checkpointing(self.state, self.metrics)
        self.validation = Validation(self.state, self.metrics)
        source = AsyncSource if is_asynchronous(training.recipe, self.job.comm.size) else SyncSource
        self.source: BatchSource = source(self.state, self.metrics, self.own_request)
        self.caught: Sequence[str] = ()  # the signals that this rank caught
        self.stopped: str | None = None  # the signal that ends the training, once all ranks know of it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.metrics.close()

    @property
    def ended(self) -> bool:
        """Whether the last step or the target is reached, or a signal stops the training."""
        return self.state.over or self.stopped is not None

    @property
    def images(self) -> int:
        """Images taken so far, with those of the step under way."""
        return self.state.progress.images + self.metrics.images_begun

    def steps(self, caught: Sequence[str]) -> Iterator[None]:
        """The training loop. It yields after each batch, so that several trainings can take turns. Collective.

        Args:
            caught: collects the signals of this process; see `signals`.
        """
        job, source, metrics, self.caught = self.job, self.source, self.metrics, caught
        while not self.ended:
            for x_NCHW, y_N in source.batches():
                loss = job.loss(job.model(x_NCHW), y_N)
                job.backward(loss)
                if metrics.add(loss, source.images(y_N)):
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                    metrics.end_step()
                    if source.syncs_each_step:
                        self._sync()
                        if self.ended:
                            break
                    elif metrics.is_read_due:
                        metrics.read_own()
                yield
            if not source.syncs_each_step:
                self._sync()

    def _sync(self) -> None:
        """A sync point: evaluates and saves where that is due. Collective; drains if it does either."""
        request = self.source.sync()
        self.validation.run_if_due()
        self.stopped = request.stop or None
        if self.checkpointing.crossed() or (request.save and not request.stop):
            self.checkpointing.save()

    def own_request(self) -> Request:
        """What this rank requests of all ranks."""
        return Request(save=self.checkpointing.is_time(), stop=self.caught[0] if self.caught else "")

    def finish(self) -> Result:
        """Writes the last checkpoint, the weights as evaluated, and the result. Collective; drains."""
        self.source.close()
        stopped = None if self.state.over else self.stopped
        if stopped is None:
            self.validation.run_unless_done()
        self.checkpointing.save()
        for line in skipped_images(self.state):
            self.metrics.bar.say(line)
        self.validation.write_predictions()
        return self.metrics.finish(stopped)


def fit(
    training: Training, run: RunFolder | None, *, started: float, resume: bool = False, quiet: bool = False
) -> Result:
    """Trains to the end, the target, or a signal. Collective: all ranks stop after the same step; drains.

    The arguments are those of Trainer; on several ranks the job's comm takes tensors on the CPU too (torch.distributed:
    with gloo).

    Raises:
        DivergedError: with the step, the last good checkpoint and the likely cause.
        InputError: when the folder cannot be written any more; when a source is gone, after a checkpoint (without
            virtual ranks BatchNorm's running statistics may contain parts of a step that was begun; all else is exact).
    """
    with Trainer(training, run, started=started, resume=resume, quiet=quiet) as trainer, signals() as caught:
        try:
            for _ in trainer.steps(caught):
                pass
        except InputError as error:
            on_all_ranks = training.job.comm.size == 1 or isinstance(error, SHARED_ERRORS)
            if error.gone and on_all_ranks:
                trainer.checkpointing.save()
            raise
        return trainer.finish()


def prepare(
    recipe: Recipe,
    comm: Comm | None = None,
    *,
    dataset: Dataset | None = None,
    batches: Loader | None = None,
    start: Start | None = None,
    shares: Sequence[int] = (),
) -> Training:
    """Builds everything a training needs, what can be at the same time.

    Args:
        recipe: what to train.
        comm: the ranks; alone by default.
        dataset: the recipe's data, where it was read before.
        batches: the training loader, where several trainings share one.
        start: what was begun before, as meeting the other ranks.
        shares: images of a batch that each rank takes, where they are not as many each.

    Raises:
        InputError: where the parts do not fit each other.
    """
    comm = comm or Solo()
    start = start or Start(comm.clock, overlap=None if comm.thread_safe or comm.size == 1 else False)
    if recipe.auto_batch:
        raise InputError('batch = "auto": tuned for a single training only; give the number that kasoku tune finds')
    check_share(recipe, comm.size)
    chosen = _begun(recipe, comm, start, dataset)
    start.add("digest", lambda data: data.index() if comm.size > 1 else {}, after=("data",))
    start.add("network", lambda data: _network(recipe, data), after=("data",))
    start.add("model", lambda data, net, _: _ready(recipe, data, net, chosen), after=("data", "network", "compiler"))
    start.add("loaders", lambda data: _loaders(recipe, data, chosen, comm, batches), after=("data",))
    start.add("first batch", lambda loaders: None if batches else loaders[0].warm(), after=("loaders",))
    ended = start.wait()
    found = start.do("agreement", lambda: run_on_all_ranks(comm, ended))
    dataset, model, (train, test) = (found[name] for name in ("data", "model", "loaders"))
    facts = {"data": found["digest"], "model": model_facts(model)}
    start.do("comparison", lambda: run_on_all_ranks(comm, lambda: assert_same_on_all_ranks(comm, facts)))
    job = Job(
        model,
        lambda m: optimizer(recipe, m),
        loader=train,
        loss=recipe.loss,
        comm=comm,
        accumulate=recipe.parts(comm.size),
    )
    start.do("techniques", lambda: _apply(recipe, job, chosen, len(dataset.classes), shares=shares))
    total = updates(recipe, train.images)
    if total < 1:
        raise InputError(f"epochs={recipe.epochs}, batch={recipe.batch}: not one step in it; raise epochs")
    return Training(recipe, job, dataset, test, chosen, total, start)


def _begun(recipe: Recipe, comm: Comm, start: Start, dataset: Dataset | None) -> Chosen:
    """Begins to make the data and to connect the ranks; returns the device, which all have chosen.

    The connections are made while rank 0 looks into image folders; then it tells the others what it found.
    """
    here = place() if comm.size > 1 else Place()
    scan = OneScan(comm)
    data = partial(start.add, "data", lambda: scan.during(lambda: dataset or made(recipe.data(), Dataset, "data")))
    start.import_compiler()
    early = start.overlap or comm.rank == 0
    if early:
        data()
    more = recipe.device.deterministic or recipe.device.compile  # these import more of torch: one after the other
    alone = ("compiler",) if more else ()
    choice = partial(choose, recipe.device, local_rank=here.local_rank, local_size=here.sharing)
    chosen = start.do("device", lambda *_: scan.needed(lambda: run_on_all_ranks(comm, choice)), alone)
    if recipe.device.compile:
        start.add("inductor", lambda _: import_module("torch._inductor.compile_fx"), after=("compiler",))
    if comm.size > 1:
        start.add("communicator", lambda: scan.needed(lambda: _connected(recipe, comm, chosen)))
        start.add("index", lambda _: scan.broadcast(), after=("communicator",))
    if not early:  # one task after the other: by now rank 0 has told what is waited for
        data()
    return chosen


def _connected(recipe: Recipe, comm: Comm, chosen: Chosen) -> None:
    """Opens the connections that the training's collectives will take."""
    techniques = (*derived_techniques(recipe, comm.size), *recipe.techniques)
    comm.warm(chosen.device, channels=sum(technique.channels for technique in techniques))


def _network(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The network with its first weights. Nothing else may draw from torch's own generator meanwhile."""
    torch.manual_seed(recipe.seed)
    facts = {"in_channels": dataset.channels, "image_size": dataset.image_size[0]}
    return made(recipe.model(num_classes=len(dataset.classes), **facts), nn.Module, "model")


def _ready(recipe: Recipe, dataset: Dataset, model: nn.Module, chosen: Chosen) -> nn.Module:
    """The network as it trains: fit for the images, prepared with them, on the device."""
    check_fits(model, (dataset.channels, *dataset.image_size), recipe.model.use)
    look_at_data: Any = getattr(model, "prepare", None)
    if look_at_data is not None:
        look_at_data(sample(dataset, 5000))
    return model.to(chosen.device)


def _loaders(
    recipe: Recipe, dataset: Dataset, chosen: Chosen, comm: Comm, batches: Loader | None
) -> tuple[Loader, Loader]:
    """The loaders of the training and of the test images."""
    sharing = place().sharing if comm.size > 1 else 1
    parts = recipe.parts(comm.size)
    common: dict[str, Any] = {"device": chosen.device, "comm": comm, "cores_shared_by": sharing}
    fill = recipe.last_batch == "fill"
    train = batches or loader(dataset, "train", recipe.batch, seed=recipe.seed, parts=parts, fill=fill, **common)
    test_batch = recipe.evaluate.batch or recipe.batch // parts
    test_batch += -test_batch % comm.size
    return train, loader(dataset, "test", test_batch, **common)


def _apply(recipe: Recipe, job: Job, chosen: Chosen, classes: int, *, shares: Sequence[int]) -> None:
    """Applies the techniques that were chosen and those asked for; all ranks together."""
    asked = techniques_for(recipe, job.comm.size)
    if is_asynchronous(recipe, job.comm.size):
        shares = ()  # each rank takes the next one when it comes to it
    ranks_own = derived_techniques(recipe, job.comm.size, uneven=bool(shares))
    own = [Seeded(recipe.seed), Rate(recipe.scaled_schedule, recipe.rate_scale), *ranks_own]
    if shares:
        own.append(Shares(tuple(shares)))
    job.apply(*chosen.techniques, *own, *asked, Timed())
    if recipe.evaluate.stale and not any(t.renews_statistics for t in recipe.techniques):
        raise InputError("evaluate.stale = true: compares with the technique kasoku.distributed.Recalibrate; add it")
    _check_loss(job, classes)


def _check_loss(job: Job, classes: int) -> None:
    """One try on made-up outputs, so that a wrong setting is found before anything is written."""
    outputs_NK, labels_N = torch.zeros(2, classes), torch.zeros(2, dtype=torch.long)
    try:
        loss = job.loss(outputs_NK, labels_N)
    except InputError as error:
        raise InputError(f"loss: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError("loss.use: a function (outputs, labels) -> one number is wanted")
