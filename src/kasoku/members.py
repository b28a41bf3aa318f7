"""Members of an ensemble: trainings that differ in their seed, or in settings of the recipe.

Note: what members share. Where images are decoded from files, members train in turns, an update each, on the same
batches, which are decoded once; data order and augmentation are then the same for all, and what differs is the
initial weights and what the models draw. Images in memory cost nothing to read again, so there members train one
after the other and each has an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kasoku.core import InputError, Wall
from kasoku.core.run import RunFolder
from kasoku.core.toml import override, tables
from kasoku.data import Files, loader, shared
from kasoku.recipe import Recipe, from_document
from kasoku.runs import describe
from kasoku.trainer import fit, prepare, signals, steps
from kasoku.watch import Result, Training, Watch

_ENDED = object()


def varied(recipe: Recipe, members: int, vary: Sequence[str]) -> list[Recipe]:
    """The recipe once a member: with the seeds that follow its own, and the settings of `vary`.

    Args:
        recipe: of the first member.
        members: how many.
        vary: path=value,value,...: a value a member.

    Raises:
        InputError: for fewer than 2 members, and for other than one value a member.
    """
    if members < 2:
        raise InputError(f"--members {members}: at least 2 make an ensemble")
    out = []
    for i in range(members):
        document = tables(recipe)
        document["seed"] = recipe.seed + i
        for setting in vary:
            path, _, values = setting.partition("=")
            chosen = values.split(",")
            if len(chosen) != members:
                raise InputError(f"--vary {setting}: {len(chosen)} values for {members} members: one for each")
            override(document, f"{path}={chosen[i]}")
        out.append(from_document(document))
    return out


def folders(folder: Path, members: int) -> list[Path]:
    """Where the members' runs are."""
    return [folder / f"member-{i + 1}" for i in range(members)]


def train(
    recipes: Sequence[Recipe],
    paths: Sequence[Path],
    *,
    started: float,
    own_modules: Sequence[str] | None = (),
    quiet: bool = False,
) -> list[Result]:
    """Trains all members; returns their results, or those so far where a signal stopped it (`stopped` is set).

    `own_modules`: the folders of the user's modules; None: go on with the runs that are there.
    """
    trainings, resume = _prepared(recipes), own_modules is None
    with ExitStack() as stack:
        runs = [stack.enter_context(RunFolder(path, resume=resume)) for path in paths]
        for run, training in zip(runs, trainings, strict=True):
            if own_modules is not None:
                describe(run, training, own_modules)
        if isinstance(trainings[0].dataset.train, Files):
            return _in_turns(trainings, runs, started=started, resume=resume, quiet=quiet)
        results = []
        for training, run in zip(trainings, runs, strict=True):
            results.append(fit(training, run, started=started, resume=resume, quiet=quiet))
            if results[-1].stopped:
                break
            started = Wall().now()
        return results


def _prepared(recipes: Sequence[Recipe]) -> list[Training]:
    first = prepare(recipes[0])
    dataset = first.dataset
    if not isinstance(dataset.train, Files):
        return [first, *(prepare(recipe, dataset=dataset) for recipe in recipes[1:])]
    cuts = {(r.batch, r.parts(1), r.last_batch) for r in recipes}
    if len(cuts) > 1:
        raise InputError("--vary: members that share decoded batches need the same batch, accumulate and last_batch")
    one = loader(dataset, "train", recipes[0].batch, seed=recipes[0].seed, device=first.chosen.device)
    batches = shared(one, len(recipes))
    return [prepare(recipe, dataset=dataset, batches=b) for recipe, b in zip(recipes, batches, strict=True)]


def _in_turns(
    trainings: Sequence[Training], runs: Sequence[RunFolder], *, started: float, resume: bool, quiet: bool
) -> list[Result]:
    """An update each, the one furthest behind first, so that batches are decoded once."""
    with ExitStack() as stack:
        watches = []
        for i, (training, run) in enumerate(zip(trainings, runs, strict=True)):
            watch = Watch(training, run, started=started, resume=resume, quiet=quiet or i > 0)
            watches.append(stack.enter_context(watch))
        caught = stack.enter_context(signals())
        under_way = {i: steps(watch, caught) for i, watch in enumerate(watches)}
        while under_way:
            behind = min(under_way, key=lambda i: (watches[i].job.steps, i))
            if next(under_way[behind], _ENDED) is _ENDED:
                del under_way[behind]
        return [watch.finish(caught[0] if caught and not watch.over else None) for watch in watches]
