"""Members of an ensemble: trainings that differ in their seed, or in settings of the recipe.

Note: many ranks. Members share nothing but the data set, so each rank trains whole members, one after the other, and a
member has the bits that it has alone. Only if there are more ranks than members, an equal group of ranks trains each,
synchronously. Ranks meet when all members have ended. A member that fails, or that a signal to its rank stops, stops no
other rank's.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

from kasoku.config.libraries import normalisation
from kasoku.config.ranks import ranks_of_member
from kasoku.config.recipe import Recipe
from kasoku.core import Comm, InputError, Solo, Wall, say
from kasoku.core.files import json_text, write_text
from kasoku.distributed.consensus import SHARED_ERRORS, raise_on_all_ranks, run_on_all_ranks
from kasoku.training import trained_run
from kasoku.training.run_folder import ENSEMBLE, RunFolder, finished, remove_empty_members, run_folder
from kasoku.training.run_state import DivergedError, Training
from kasoku.training.trainer import build, fit

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
    comm: Comm,
    *,
    started: float,
    own_modules: Sequence[str] | None = (),
    quiet: bool = False,
) -> str | None:
    """Trains all members; returns the signal that stopped one of them, if any. Collective; drains.

    The members are divided among the ranks, which all see the run folders in `paths`. `started`: when the process
    started, in seconds of the comm's clock. `own_modules`: folders of the user's modules; None resumes unfinished runs.

    Raises:
        InputError: if a member cannot be trained; after the start, once the members of the other ranks have ended.
        DivergedError: once all other members have ended.
    """
    each = run_on_all_ranks(comm, lambda: ranks_of_member(len(recipes), comm.size))
    apart = Solo(comm.clock) if each == 1 else comm.sub([range(i, i + each) for i in range(0, comm.size, each)])
    apart.activity = comm.activity if each > 1 else None  # alone, a rank cannot hang in a collective
    meeting = comm.channel(patient=True)  # ranks that have finished wait there for as long as the others train
    resume = own_modules is None
    mine = range(comm.rank // each, len(recipes), comm.size // each)
    own = [i for i in mine if not (resume and finished(paths[i], recipes[i]))]
    failure: InputError | None = None
    outcome: Outcome = None, []
    with ExitStack() as stack:

        def trainings() -> list[Training]:
            first = [build(recipes[i], apart) for i in own[:1]]
            return first + [build(recipes[i], apart, dataset=first[0].dataset) for i in own[1:]]

        def folders() -> list[RunFolder | None]:
            own_folders = [stack.enter_context(run_folder(apart, paths[i], resume=resume)) for i in own]
            if comm.rank == 0:
                (paths[0].parent / ENSEMBLE).unlink(missing_ok=True)
                remove_empty_members(paths[0].parent, paths)
            return own_folders

        def describe() -> None:
            for training, run in members:
                if run:
                    training.describe(run, own_modules)

        members = list(zip(run_on_all_ranks(comm, trainings), run_on_all_ranks(comm, folders), strict=True))
        run_on_all_ranks(comm, describe)  # when all folders are there, and before any member trains
        try:
            outcome = _one_after_the_other(members, started=started, resume=resume, quiet=quiet or comm.rank > 0)
        except InputError as error:
            if each > 1 and not isinstance(error, SHARED_ERRORS):
                raise  # the other ranks of the member wait in a collective: the failure detector ends them
            failure = error
        with comm.activity.rest() if comm.activity else nullcontext():
            outcomes = meeting.gather_objects(outcome)
            raise_on_all_ranks(meeting, failure)
    if diverged := [name for _, names in outcomes for name in names]:
        raise DivergedError(f"{', '.join(sorted(diverged))} diverged; the other members have ended")
    return next((stopped for stopped, _ in outcomes if stopped), None)


def evaluate(paths: Sequence[Path], comm: Comm, *, quiet: bool = False) -> None:
    """Prints the scores of the members and of the ensemble, and writes those of the ensemble. Collective."""
    with comm.activity.busy(_PATIENCE * comm.activity.limit_s) if comm.activity else nullcontext():
        scores = trained_run.score_runs(paths, comm=comm)
    if comm.rank == 0 and not quiet:
        trained_run.print_scores(scores)
    document = json_text({**asdict(scores[-1][1]), "members": len(paths)})
    run_on_all_ranks(comm, lambda: write_text(paths[0].parent / ENSEMBLE, document) if comm.rank == 0 else None)


def _one_after_the_other(members: Members, *, started: float, resume: bool, quiet: bool) -> Outcome:
    """Trains the members, and takes each off the list, so that its memory is free for the next one.

    One that diverges is noted and named; the others go on.
    """
    diverged: list[str] = []
    while members:
        training, run = members.pop(0)
        gc.collect()
        try:
            result = fit(training, run, started=started, resume=resume, quiet=quiet)
            if result.stopped:
                return result.stopped, diverged
        except DivergedError as error:
            if run:
                diverged.append(run.path.name)
                say(f"{run.path.name}: {error}; the other members go on")
        started = Wall().now()
    return None, diverged
