"""Build a training from a recipe, and fit it: the training loop. `fit` says which exit code follows from its end."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from signal import Signals
from typing import Any

import torch
from torch import nn

from kasoku.config import recipe as recipes
from kasoku.config.ranks import check_share, derived_techniques, is_asynchronous
from kasoku.config.recipe import Recipe, optimizer
from kasoku.config.toml import resolve
from kasoku.config.updates import updates
from kasoku.core import Comm, CorruptionError, InputError, Job, attributed
from kasoku.core.comm import default_comm
from kasoku.data import Dataset, Loader, Shares, loader, sample
from kasoku.data.datasets.folder import OneScan
from kasoku.data.remote.store import send
from kasoku.device import Chosen, Seeded, choose
from kasoku.distributed.consensus import SHARED_ERRORS, assert_same_on_all_ranks, model_facts, run_on_all_ranks
from kasoku.distributed.environment import place
from kasoku.distributed.startup import Start
from kasoku.models import check_fits
from kasoku.optim import Rate
from kasoku.report import Timed
from kasoku.training.batches import AsyncSource, SyncSource
from kasoku.training.checkpoint import Checkpointing, resume_from_checkpoint, set_aside
from kasoku.training.control import Request, signals
from kasoku.training.evaluation import Validation
from kasoku.training.metrics import Metrics
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import MeetError, Result, RunState, Training


class Trainer:
    """A training from its first batch, or from a checkpoint, to its result; its `metrics` are to be closed.

    Note: two kinds of training. Synchronous ranks meet after every step, ranks that do not wait for each other
    (Asynchronous) only now and then: each meeting is a sync point. Only the batch source differs.

    Note: many ranks. All ranks average losses, evaluate, save and stop at the same sync point. Only rank 0 writes the
    run folder; an error there is raised on all ranks.

    `run`: the run folder, locked; None on all ranks but 0. `started`: when the process started, in seconds of the job's
    clock (`process_start()`). `resume`: continue from the newest good checkpoint in the folder.
    """

    def __init__(
        self, training: Training, run: RunFolder | None, *, started: float, resume: bool = False, quiet: bool = False
    ) -> None:
        self.job, self.state = training.job, RunState(training, run)
        copies = training.snapshots
        self.goes_on = bool(copies) and copies.goes_on  # with other ranks than before
        if self.goes_on:
            copies.restore(self.state)
        elif resume:
            resume_from_checkpoint(self.state)
        self.metrics = Metrics(self.state, started=started, resumed=resume or self.goes_on, quiet=quiet)
        self.checkpointing = Checkpointing(self.state, self.metrics)
        source = SyncSource if self.job.step_comm is self.job.comm else AsyncSource
        self.source: AsyncSource | SyncSource = source(self.state, self.metrics, self.own_request)
        if copies:
            copies.begin(self.checkpointing, self.source)
        self.validation = Validation(self.state, self.metrics)
        self.caught: Sequence[str] = ()  # names of the signals that this rank caught
        self.stopped: str | None = None  # the signal that ends the training, once all ranks know of it

    @property
    def ended(self) -> bool:
        """Whether the last step or the target is reached, or a signal stops the training."""
        return self.state.over or self.stopped is not None

    def steps(self, caught: Sequence[str]) -> Iterator[None]:
        """The training loop. It yields after each batch. Collective.

        `caught`: the list to which `signals` adds the signals of this process.
        """
        job, source, metrics, self.caught = self.job, self.source, self.metrics, caught
        if self.goes_on:
            self.validation.run_if_due()
        while not self.ended:
            for x_NCHW, y_N in source.batches():
                loss = job.loss(job.model(x_NCHW), y_N)
                job.backward(loss)
                if metrics.add_micro_batch(loss, source.images(y_N)):
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
        """A sync point: evaluates and saves if that is due. Collective; drains if it does either.

        Raises MeetError where the training goes on with other ranks, from a copy of its state.
        """
        request, copies = self.source.sync(), self.state.training.snapshots
        self.validation.run_if_due()
        self.stopped = Signals(request.stop).name if request.stop else None
        if self.checkpointing.is_due_by_steps() or (request.save and not request.stop):
            self.checkpointing.save()
        if copies:
            copies.take_if_due(self.checkpointing)
        if request.join and not self.ended:
            if self.source.syncs_each_step:
                self.source.close()
            copies.take(self.checkpointing)
            self.metrics.outcome = "stopped"  # for trackers, in this group
            raise MeetError

    def own_request(self) -> Request:
        """What this rank asks all ranks to do: save, stop, take in newcomers."""
        copies, stop = self.state.training.snapshots, Signals[self.caught[0]] if self.caught else 0
        return Request(self.checkpointing.is_due_by_time(), stop, join=bool(copies and copies.members.election.joining))

    def finish(self) -> Result:
        """Writes the last checkpoint, the weights as evaluated, and the result. Collective; drains."""
        self.source.close()
        stopped = None if self.state.over else self.stopped
        if stopped is None and self.validation.last_step != self.job.steps:
            self.validation.run()
        self.checkpointing.save()
        self.metrics.say_skipped_images()
        self.validation.write_predictions()
        return self.metrics.finish(stopped)


def fit(
    training: Training,
    run: RunFolder | None,
    *,
    started: float,
    resume: bool = False,
    quiet: bool = False,
    caught: list[str] | None = None,
) -> Result:
    """Trains to the end, the target, or a signal. Collective: all ranks stop after the same step; drains.

    The arguments are those of Trainer, and `caught` of `signals`. On several ranks the job's comm must also take CPU
    tensors (torch.distributed: gloo, on GPUs beside nccl). The command's exit code is 0, or 75 if SIGINT or SIGTERM set
    `stopped` (resume it).

    Raises:
        CorruptionError (exit code 5): by Replay; later checkpoints than the one to resume from are set aside.
        DivergedError (exit code 3): with the step, the last good checkpoint and the likely cause.
        InputError (exit code 2): if the run folder cannot be written; if the data source is gone, after a checkpoint
            (exact, but without virtual ranks BatchNorm's running statistics may include batches of an incomplete step).
    """
    trainer = Trainer(training, run, started=started, resume=resume, quiet=quiet)
    with closing(trainer.metrics), signals(caught) as all_caught:
        try:
            for _ in trainer.steps(all_caught):
                pass
            return trainer.finish()
        except Exception as error:
            failure = attributed(error)
            if isinstance(failure, CorruptionError) and run:
                set_aside(run.path, failure.trusted)
            if isinstance(failure, InputError):
                on_all_ranks = training.job.comm.size == 1 or isinstance(failure, SHARED_ERRORS)
                if failure.gone and on_all_ranks:
                    trainer.checkpointing.save()
                failure.resumable = bool(trainer.state.last_checkpoint and run and run.path.is_dir())
            raise failure  # noqa: B904 - has its cause


def build(
    recipe: Recipe,
    comm: Comm | None = None,
    *,
    dataset: Dataset | None = None,
    start: Start | None = None,
    shares: Shares | None = None,
) -> Training:
    """Builds all that a training needs; independent parts of it run at the same time. Collective; does not drain.

    `comm`: one rank by default. `dataset`: the recipe's data set, if it was read before. `start`: tasks of the start-up
    that already run, e.g. finding the other ranks. `shares`: how many images of a batch each rank takes; None: all the
    same number. The shares of asynchronous ranks, which they take in turn, may be more or fewer than the ranks.

    Raises InputError if the parts do not fit each other.
    """
    comm = comm or default_comm()
    start = start or Start(comm.clock, overlap=None if comm.thread_safe or comm.size == 1 else False)
    if recipe.auto_batch:
        raise InputError('batch = "auto": tuned for a single training only; give the number that kasoku tune finds')
    if recipe.evaluate.stale and not any(technique.renews_statistics for technique in recipe.techniques):
        raise InputError("evaluate.stale = true: compares with the technique kasoku.distributed.Recalibrate; add it")
    shares = shares or Shares()
    in_turn = is_asynchronous(recipe, comm.size) and bool(shares.images)
    takers = len(shares.images) if in_turn else comm.size
    if not shares.at_once:
        check_share(recipe, takers)
    if recipe.save.upload:
        send(recipe.save.upload, {})  # a missing package is noticed now
    device_setup = _start_device_and_data(recipe, comm, start, dataset)
    parts = shares.parts(comm.rank, recipe.parts(takers))

    def network(data: Dataset) -> nn.Module:
        """With its first weights. No other task may draw from torch's global generator meanwhile."""
        torch.manual_seed(recipe.seed)
        return recipes.network(recipe, len(data.classes), data.channels, data.image_size[0])

    def loaders(data: Dataset) -> tuple[Loader, Loader]:
        load = partial(loader, data, device=device_setup.device, comm=comm, cores_shared_by=place().ranks_on_its_cores)
        settings: dict[str, Any] = {"parts": parts, "fill": recipe.last_batch == "fill"}
        if in_turn:
            settings |= {"rank": comm.rank % takers, "size": takers}
        elif shares.at_once:
            settings |= {"at_once": shares.at_once, "shares": shares.images}
        train = load("train", recipe.batch, seed=recipe.seed, **settings)
        test_batch = recipe.evaluate.batch or shares.at_once * comm.size or recipe.batch // parts
        return train, load("test", test_batch + -test_batch % comm.size)

    # the names of a task's parameters are the tasks whose results it takes
    start.add("digest", lambda data: data.index() if comm.size > 1 else {})
    start.add("network", network)
    start.add("model", partial(_model, recipe=recipe, device=device_setup.device), after=("compiler",))
    start.add("loaders", loaders)
    start.add("first batch", lambda loaders: loaders[0].warm())
    results = start.wait()
    tasks = start.do("agreement", lambda: run_on_all_ranks(comm, results))
    dataset, (model, outputs), (train, test) = (tasks[name] for name in ("data", "model", "loaders"))
    facts = {"data": tasks["digest"], "model": model_facts(model)}
    start.do("comparison", lambda: assert_same_on_all_ranks(comm, facts))
    job = Job(model, lambda m: optimizer(recipe, m), loader=train, loss=recipe.loss, comm=comm, accumulate=parts)
    named = any(technique.shares_batch for technique in recipe.techniques)
    uneven = [shares] if shares.images and not (in_turn or named) else []  # in turn: the next part when it is ready
    derived = derived_techniques(recipe, comm.size, uneven=bool(uneven) or named)
    own = [Seeded(recipe.seed), Rate(recipe.scaled_schedule, recipe.rate_scale), *derived, *uneven]
    start.do("techniques", lambda: job.apply(*device_setup.techniques, *own, *recipe.scaled_techniques, Timed()))
    _try_loss(job, recipe.loss.use, len(dataset.classes))
    total = updates(recipe, train.images)
    if total < 1:
        raise InputError(f"epochs={recipe.epochs}, batch={recipe.batch}: not one step in it; raise epochs")
    return Training(recipe, job, dataset, test, device_setup, total, start, outputs)


def _start_device_and_data(recipe: Recipe, comm: Comm, start: Start, dataset: Dataset | None) -> Chosen:
    """Starts to read the data and to connect the ranks; returns this rank's device once all ranks have one.

    The ranks connect while rank 0 lists the files of image folders; then it broadcasts the lists.
    """
    here = place()  # also of a rank that trains alone: it has its own GPU and its share of the cores
    scan = OneScan(comm)

    def data() -> Dataset:
        return scan.build(lambda: dataset or recipes.dataset(recipe))

    def device() -> Chosen:
        choice = partial(choose, recipe.device, local_rank=here.local_rank, local_size=here.ranks_on_its_cores)
        return scan.before_broadcast(lambda: run_on_all_ranks(comm, choice))

    def communicator() -> None:
        """Opens the connections that the training's collectives will use."""
        techniques = (*derived_techniques(recipe, comm.size), *recipe.techniques)
        channels = sum(technique.channels for technique in techniques)
        scan.before_broadcast(lambda: comm.warm(device_setup.device, channels=channels))

    start.import_compiler()
    data_first = start.overlap or comm.rank == 0
    if data_first:
        start.add("data", data)
    imports = recipe.device.deterministic or recipe.device.compile  # import more of torch: not beside another import
    device_setup = start.do("device", device, after=("compiler",) if imports else ())
    if recipe.device.compile:
        start.add("inductor", lambda: import_module("torch._inductor.compile_fx"), after=("compiler",))
    if comm.size > 1:
        start.add("communicator", communicator)
        start.add("index", scan.broadcast, after=("communicator",))
    if not data_first:  # without overlap: by now rank 0 has broadcast its lists
        start.add("data", data)
    return device_setup


def _model(data: Dataset, network: nn.Module, *, recipe: Recipe, device: torch.device) -> tuple[nn.Module, int]:
    """The network on the device, and the number of its outputs, 0 if unknown.

    It fits the shape of the images, and its `prepare`, if any, has seen some of them.
    """
    classes = len(data.classes)

    def at(side: int) -> nn.Module:
        with torch.device("meta"):
            return recipes.network(recipe, classes, data.channels, side, weights=False)

    outputs = check_fits(network, (data.channels, *data.image_size), recipe.model.name, classes=classes, at=at)
    prepare: Any = getattr(network, "prepare", None)
    if prepare is not None:
        prepare(sample(data, 5000))
    return network.to(device), outputs


def _try_loss(job: Job, use: str, classes: int) -> None:
    """Raises InputError for a loss with a wrong setting or result, before anything is written."""
    wanted = "a function (outputs, labels) -> one number is wanted, such as torch.nn.functional.cross_entropy"
    if isinstance(resolve(use, "loss.use"), type):
        raise InputError(f'loss.use = "{use}": {wanted}; this is a class')
    try:
        loss = job.loss(torch.zeros(2, classes), torch.zeros(2, dtype=torch.long))
    except InputError as error:
        raise InputError(f"loss: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise InputError(f'loss.use = "{use}": {wanted}')
