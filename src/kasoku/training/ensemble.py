"""Members of an ensemble: trainings that differ in their seed, or in settings of the recipe.

Note: shared batches. If images are decoded from files, the members of a rank take turns, one batch each, so that each
batch is decoded once. All members, also those of other ranks, then have the data order and augmentation of the first
member; they differ in their initial weights and in the random numbers of their models. Images in memory cost nothing to
read again, so these members train one after the other, each with its own data order.

Note: many ranks. Members share nothing, so they train apart: each rank trains whole members, with the bits that they
have on one rank. Only if there are more ranks than members, an equal group of ranks trains each, synchronously. Ranks
meet when all members have ended. A member that fails, or that a signal to its rank stops, stops no other rank's.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from kasoku.config.libraries import normalisation
from kasoku.config.ranks import ranks_of_member
from kasoku.config.recipe import Recipe
from kasoku.core import Comm, CorruptionError, InputError, Solo, Wall, say
from kasoku.core.comm import default_comm
from kasoku.core.files import write_text
from kasoku.data import GoneError, Memory
from kasoku.distributed.consensus import SHARED_ERRORS, raise_on_all_ranks, run_on_all_ranks
from kasoku.training import trained_run
from kasoku.training.checkpoint import set_aside
from kasoku.training.control import signals
from kasoku.training.run_folder import ENSEMBLE, RunFolder, finished, remove_empty_members, run_folder
from kasoku.training.run_state import DivergedError, Training
from kasoku.training.trainer import Trainer, build, fit

Members = list[tuple[Training, RunFolder | None]]  # of this rank; only the first rank of a group has the run folder
_PATIENCE = 60  # an evaluation of all members may take this many times as long as a rank may be without a step
Outcome = tuple[str | None, list[str]]  # of a rank's members: the signal that stopped one, and those that diverged


def varied(load: Callable[[list[str]], Recipe], members: int, vary: Sequence[str]) -> list[Recipe]:
    """The recipes of the members: with consecutive seeds and the settings of `vary`, path=value,value,...

    `load`: settings (path=value) -> the recipe with them, and with all that depends on them. Raises InputError for
    fewer than 2 members, for another number of values than members, and for members with different data.
    """
    if members < 2:
        raise InputError(f"--members {members}: at least 2 make an ensemble")
    seed = load([]).seed
    columns = [[f"seed={seed + i}" for i in range(members)]]
    for setting in vary:
        path, _, values = setting.partition("=")
        columns.append([f"{path}={value}" for value in values.split(",")])
        if len(columns[-1]) != members:
            raise InputError(f"--vary {setting}: {len(columns[-1])} values for {members} members: one for each")
    recipes = [load(list(settings)) for settings in zip(*columns, strict=True)]
    if any(recipe.data != recipes[0].data for recipe in recipes):
        raise InputError("--vary of data: the members of an ensemble see the same data; train them apart")
    if any(normalisation(recipe.model) != normalisation(recipes[0].model) for recipe in recipes):
        raise InputError("--vary of model: the networks normalise images differently; train them apart")
    return recipes


def train(
    recipes: Sequence[Recipe],
    paths: Sequence[Path],
    comm: Comm | None = None,
    *,
    started: float,
    own_modules: Sequence[str] | None = (),
    quiet: bool = False,
) -> str | None:
    """Trains all members; returns the signal that stopped one of them, if any. Collective; drains.

    The members are divided among the ranks, which all see the run folders in `paths`. `started`: when the process
    started, in seconds of the comm's clock. `own_modules`: the folders of the user's modules; None resumes the runs
    that are not finished.

    Raises:
        InputError: if a member cannot be trained; after the start, once the members of the other ranks have ended.
        DivergedError: once all other members have ended.
    """
    comm = comm or default_comm()
    each = run_on_all_ranks(comm, lambda: ranks_of_member(len(recipes), comm.size))
    apart = Solo(comm.clock) if each == 1 else comm.sub([range(i, i + each) for i in range(0, comm.size, each)])
    apart.activity = comm.activity if each > 1 else None  # alone, a rank cannot hang in a collective
    meeting = comm.channel(patient=True)  # ranks that have finished wait there for as long as the others train
    resume = own_modules is None
    own = list(range(comm.rank // each, len(recipes), comm.size // each))
    if resume:
        own = [i for i in own if not finished(paths[i], recipes[i])]
    failure: InputError | None = None
    outcome: Outcome = None, []
    with ExitStack() as stack:
        trainings = run_on_all_ranks(comm, lambda: _build(recipes, [recipes[i] for i in own], apart))
        for training in trainings:
            stack.callback(training.job.plain_loader.close)

        def folders() -> list[RunFolder | None]:
            own_folders = [stack.enter_context(run_folder(apart, paths[i], resume=resume)) for i in own]
            if comm.rank == 0:
                (paths[0].parent / ENSEMBLE).unlink(missing_ok=True)
                if not resume:
                    remove_empty_members(paths[0].parent, paths)
            return own_folders

        members = list(zip(trainings, run_on_all_ranks(comm, folders), strict=True))
        # when all folders are there, and before any member trains
        run_on_all_ranks(comm, lambda: _describe(members, own_modules))
        try:
            alone = len(own) < 2 or isinstance(trainings[0].dataset.train, Memory)
            outcome = (_one_after_the_other if alone else _take_turns)(
                members, started=started, resume=resume, quiet=quiet or comm.rank > 0
            )
        except InputError as error:
            if each > 1 and not isinstance(error, SHARED_ERRORS):
                raise  # the other ranks of the member wait in a collective: the failure detector ends them
            failure = error
        with comm.activity.rest() if comm.activity else nullcontext():
            outcomes = meeting.gather_objects(outcome)
            raise_on_all_ranks(meeting, failure)
    diverged = [name for _, names in outcomes for name in names]
    if diverged:
        raise DivergedError(f"{', '.join(sorted(diverged))} diverged; the other members have ended")
    return next((stopped for stopped, _ in outcomes if stopped), None)


def evaluate(paths: Sequence[Path], comm: Comm, *, quiet: bool = False) -> None:
    """Prints the scores of the members and of the ensemble, and writes those of the ensemble. Collective."""
    with comm.activity.busy(_PATIENCE * comm.activity.limit_s) if comm.activity else nullcontext():
        scores = trained_run.score_runs(paths, comm=comm)
    if comm.rank == 0 and not quiet:
        trained_run.print_scores(scores)
    document = json.dumps({**asdict(scores[-1][1]), "members": len(paths)}, indent=1) + "\n"
    file = paths[0].parent / ENSEMBLE
    run_on_all_ranks(comm, lambda: write_text(file, document) if comm.rank == 0 else None)


def _build(recipes: Sequence[Recipe], own: Sequence[Recipe], comm: Comm) -> list[Training]:
    """Builds the members of this rank. Collective over `comm`."""
    if not own:
        return []
    first = build(recipes[0], comm)
    dataset = first.dataset
    if isinstance(dataset.train, Memory):
        members = [first if recipe is recipes[0] else build(recipe, comm, dataset=dataset) for recipe in own]
        if all(member is not first for member in members):
            first.job.plain_loader.close()
            first.job.close()
        return members
    if any(_batch_settings(other) != _batch_settings(recipes[0]) for other in recipes):
        alike = "batch, accumulate, norm_batch, last_batch and the techniques of kasoku.data"
        raise InputError(f"--vary: members share decoded batches, so {alike} must be the same for all")
    if [*own] == [recipes[0]]:
        return [first]
    first.job.close()
    loader = first.job.plain_loader
    loaders = loader.members(len(own)) if len(own) > 1 else [loader]
    return [build(r, comm, dataset=dataset, train_loader=each) for r, each in zip(own, loaders, strict=True)]


def _describe(members: Members, own_modules: Sequence[str] | None) -> None:
    for training, run in members:
        if run:
            training.describe(run, own_modules)


def _batch_settings(recipe: Recipe) -> tuple[object, ...]:
    """The settings that decide the pixels of a batch."""
    techniques = [t for t in recipe.techniques if t.changes_pixels or t.changes_batch]
    return recipe.batch, recipe.parts(1), recipe.last_batch, techniques


def _turns(trainer: Trainer, caught: list[str]) -> Generator[None]:
    """A member's turns: yields before each one.

    Its ledger has the time between its turns in a row of its own, since other members train then.
    """
    steps = trainer.steps(caught)
    while True:
        with trainer.job.trace.span("other members"):
            yield
        next(steps, None)


@contextmanager
def _noted(run: RunFolder | None, diverged: list[str]) -> Iterator[None]:
    """Notes a member that diverges in the body, and says so, instead of raising: the other members go on."""
    try:
        yield
    except DivergedError as error:
        if run:
            diverged.append(run.path.name)
            say(f"{run.path.name}: {error}; the other members go on")


def _one_after_the_other(members: Members, *, started: float, resume: bool, quiet: bool) -> Outcome:
    diverged: list[str] = []
    for training, run in members:
        with _noted(run, diverged):
            result = fit(training, run, started=started, resume=resume, quiet=quiet)
            if result.stopped:
                return result.stopped, diverged
        started = Wall().now()
    return None, diverged


def _take_turns(members: Members, *, started: float, resume: bool, quiet: bool) -> Outcome:
    """One batch at a time by the member that is furthest behind, so that each batch is decoded once."""
    diverged: list[str] = []
    stopped: str | None = None
    with ExitStack() as stack:
        trainers = []
        for i, (training, run) in enumerate(members):
            if i > 0:
                training.start.note("members before", started, training.start.began)
            trainers.append(Trainer(training, run, started=started, resume=resume, quiet=quiet or i > 0))
            stack.callback(trainers[-1].metrics.close)
        caught = stack.enter_context(signals())
        turns = [_turns(trainer, caught) for trainer in trainers]
        for turn in turns:
            next(turn)
        left = {*range(len(members))}  # without those that have diverged
        while training_members := [i for i in left if not trainers[i].ended]:
            behind = min(training_members, key=lambda i: (trainers[i].images, i))
            left.remove(behind)
            with _noted(members[behind][1], diverged):
                try:
                    next(turns[behind])
                except GoneError as error:
                    saved = [trainers[i] for i in {*left, behind}]
                    for trainer in saved:
                        trainer.checkpointing.save()
                    error.resumable = all(trainer.resumable for trainer in saved)
                    raise
                except CorruptionError as error:
                    if folder := members[behind][1]:
                        set_aside(folder.path, error.trusted)
                    raise
                left.add(behind)
        for i in sorted(left):
            turns[i].close()  # until here its time belonged to other members
            with _noted(members[i][1], diverged):
                stopped = trainers[i].finish().stopped or stopped
    return stopped, diverged
