"""Members of an ensemble: trainings that differ in their seed, or in settings of the recipe.

Note: shared batches. If images are decoded from files, the members take turns, one batch each, so that each batch is
decoded once. All members then have the same data order and augmentation; they differ in their initial weights and in
the random numbers of their models. Images in memory cost nothing to read again, so these members train one after the
other, each with its own data order.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from kasoku.config.recipe import Recipe, dumps
from kasoku.core import InputError, Wall
from kasoku.data import GoneError, Memory
from kasoku.training.control import signals
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import DivergedError, Result, Training
from kasoku.training.trainer import Trainer, build, fit


def varied(load: Callable[[list[str]], Recipe], members: int, vary: Sequence[str]) -> list[Recipe]:
    """The recipes of the members: with consecutive seeds and the settings of `vary`.

    Args:
        load: settings (path=value) -> the recipe with them, and with all that depends on them.
        members: their number.
        vary: path=value,value,...: one value for each member.

    Raises:
        InputError: for fewer than 2 members, for a number of values that is not theirs, and for members with different
            data.
    """
    if members < 2:
        raise InputError(f"--members {members}: at least 2 make an ensemble")
    seed, recipes = load([]).seed, []
    for i in range(members):
        settings = [f"seed={seed + i}"]
        for setting in vary:
            path, _, values = setting.partition("=")
            chosen = values.split(",")
            if len(chosen) != members:
                raise InputError(f"--vary {setting}: {len(chosen)} values for {members} members: one for each")
            settings.append(f"{path}={chosen[i]}")
        recipes.append(load(settings))
    if any(recipe.data != recipes[0].data for recipe in recipes):
        raise InputError("--vary of data: the members of an ensemble see the same data; train them apart")
    return recipes


def train(
    recipes: Sequence[Recipe],
    paths: Sequence[Path],
    *,
    started: float,
    own_modules: Sequence[str] | None = (),
    quiet: bool = False,
) -> list[Result]:
    """Trains all members on one rank. Returns their results; after a signal, those so far, with `stopped` set.

    `own_modules`: the folders of the user's modules; None resumes the runs in `paths`.
    """
    first, resume = build(recipes[0]), own_modules is None
    dataset, recipe = first.dataset, recipes[0]
    in_memory = isinstance(dataset.train, Memory)
    if in_memory:
        trainings = [first, *(build(other, dataset=dataset) for other in recipes[1:])]
    else:
        if any(_batch_settings(other) != _batch_settings(recipe) for other in recipes):
            alike = "batch, accumulate, norm_batch, last_batch and the techniques of kasoku.data"
            raise InputError(f"--vary: members share decoded batches, so {alike} must be the same for all")
        first.job.close()
        loaders = first.job.plain_loader.members(len(recipes))
        trainings = [build(r, dataset=dataset, train_loader=own) for r, own in zip(recipes, loaders, strict=True)]
    with ExitStack() as stack:
        for training in trainings:
            stack.callback(training.job.plain_loader.close)
        runs = [stack.enter_context(closing(RunFolder(path, resume=resume))) for path in paths]
        for run, training in zip(runs, trainings, strict=True):
            if own_modules is not None:
                training.describe(run, own_modules)
            else:
                run.write("recipe.toml", dumps(training.recipe))
        if not in_memory:
            return _take_turns(trainings, runs, started=started, resume=resume, quiet=quiet)
        results = []
        for training, run in zip(trainings, runs, strict=True):
            results.append(fit(training, run, started=started, resume=resume, quiet=quiet))
            if results[-1].stopped:
                break
            started = Wall().now()
        return results


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


def _take_turns(
    trainings: Sequence[Training], runs: Sequence[RunFolder], *, started: float, resume: bool, quiet: bool
) -> list[Result]:
    """One batch at a time by the member that is furthest behind, so that each batch is decoded once."""
    with ExitStack() as stack:
        trainers = []
        for i, (training, run) in enumerate(zip(trainings, runs, strict=True)):
            if i > 0:
                training.start.note("members before", started, training.start.began)
            trainers.append(Trainer(training, run, started=started, resume=resume, quiet=quiet or i > 0))
            stack.callback(trainers[-1].metrics.close)
        caught = stack.enter_context(signals())
        turns = [_turns(trainer, caught) for trainer in trainers]
        for turn in turns:
            next(turn)
        while training_members := [i for i, trainer in enumerate(trainers) if not trainer.ended]:
            behind = min(training_members, key=lambda i: (trainers[i].images, i))
            try:
                next(turns[behind])
            except (DivergedError, GoneError) as error:
                for i, trainer in enumerate(trainers):
                    between_steps = trainer.metrics.images_begun == 0
                    if isinstance(error, GoneError) or (between_steps and i != behind):
                        trainer.checkpointing.save()
                if isinstance(error, GoneError):
                    error.resumable = all(trainer.resumable for trainer in trainers)
                raise
        results = []
        for trainer, turn in zip(trainers, turns, strict=True):
            turn.close()  # until here its time belonged to other members
            results.append(trainer.finish())
        return results
