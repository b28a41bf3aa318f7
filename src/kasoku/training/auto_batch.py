"""The batch of a recipe, chosen by trying sizes: the sizes that can be tried, and the recipe at the best one.

Also how long a training will take, from a few steps on a copy of its job.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kasoku.config.ranks import TEST_PASSES, shares_of, unit_of_shares
from kasoku.config.recipe import Recipe, checked, flat_settings
from kasoku.config.toml import Factory, parameters_of, resolve, table
from kasoku.config.updates import evaluations, images_in_epoch, pixel_share, updates, updates_in_epoch
from kasoku.core import Comm, InputError, say, summary
from kasoku.data import Dataset, by_speed
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.liveness import is_lost_rank
from kasoku.report import print_table
from kasoku.training.run_state import Training
from kasoku.training.trainer import build
from kasoku.tune import BatchSizeResult, Needs, SizeSearch, Strategy, batch_size, tune_batch_size
from kasoku.tune.measurement import BRIEF, extrapolate, out_of_memory

_BUDGET_S = 4.0
_FORWARD = 1 / 3  # of the computing of a step


class TunedRecipe(NamedTuple):
    """A recipe at the batch that tuning chose, the measurements behind the choice, and the data set."""

    recipe: Recipe
    result: BatchSizeResult
    dataset: Dataset


def tune(recipe: Recipe, at: Callable[[int], Recipe], *, comm: Comm, sizes: tuple[int, int] = (0, 0)) -> TunedRecipe:
    """Chooses the batch of a recipe as its table [tune] says; the same on all ranks. Collective.

    A strategy's arguments `epochs` and `scaling` get the recipe's own: epochs for each batch, if they differ.

    `recipe`: with the batch to begin at. `at`: the same recipe at a given batch, with rates that follow it. `sizes`:
    the smallest batch to try, 0: what the ranks can share, from 8 images each; and the largest, 0: the largest that the
    recipe can train with. They are cut to sizes that can be shared and trained with.

    Raises InputError for an empty range of sizes, and where no size can run.
    """

    def at_once(batch: int) -> Recipe:
        """The recipe at a batch; with norm_batch a device takes its share at once.

        Otherwise every batch would run in groups of norm_batch, and no size would be faster than another.
        """
        tried = at(batch)
        return replace(tried, accumulate=1) if tried.norm_batch and tried.accumulate <= 1 else tried

    multiple = comm.size * max(1, recipe.accumulate) * max(1, recipe.norm_batch)
    begin = _begin(at, recipe.batch, multiple)
    training = run_on_all_ranks(comm, lambda: build(at_once(begin), comm))
    job, dataset = training.job, training.dataset
    least, most = limits(at_once, sizes, images=len(dataset.train), multiple=multiple, begin=begin, few=8 * comm.size)
    if comm.rank == 0 and sizes[0] and least <= most and (least, most) != sizes:
        range_ = f"of batches from {sizes[0]:,} to {sizes[1]:,} those from {least:,} to {most:,}"
        say(f"{range_} can be shared by the ranks and trained with")
    factory = recipe.tune.strategy or Factory("kasoku.tune.TimeToTarget")
    kind: type[Strategy] = Strategy  # type: ignore[type-abstract]
    known = {"epochs": curve(at, least, most), "scaling": recipe.scaling}
    strategy = run_on_all_ranks(comm, lambda: checked(factory(**known), kind, "tune.strategy"))

    def search() -> BatchSizeResult:
        try:
            bounds = {"least": least, "most": most, "multiple": multiple}
            return tune_batch_size(job, strategy, budget_s=recipe.tune.budget, **bounds)
        except Exception as error:  # of the user's model, loss or data
            if isinstance(error, InputError) or is_lost_rank(error):
                raise
            advice = "lower batch" if out_of_memory(error) else "mend model, loss or data"
            raise InputError(f"no step can be made ({type(error).__name__}: {summary(error)}): {advice}") from error

    result = run_on_all_ranks(comm, search)
    job.close()
    tuned = at_once(result.batch)
    origin = ", ".join(text for text in (f"tuned by {result.strategy}", tuned.origin) if text)
    return TunedRecipe(replace(tuned, origin=origin), result, dataset)


def _begin(at: Callable[[int], Recipe], batch: int, multiple: int) -> int:
    """The multiple just below `batch`, or above where the recipe has no settings below."""
    below = max(1, batch // multiple) * multiple
    try:
        at(below)
    except InputError:
        return -(-batch // multiple) * multiple
    return below


def limits(
    at: Callable[[int], Recipe], sizes: tuple[int, int], *, images: int, multiple: int, begin: int, few: int
) -> tuple[int, int]:
    """The smallest and the largest batch to try: multiples of `multiple` with which the recipe can be trained.

    `sizes`: those that the user wants, 0: any. `begin`: one that can be trained with. `few`: the smallest worth a try.
    """

    def trains(batch: int) -> bool:
        try:
            return updates(at(batch), images) > 0
        except InputError:  # beyond the recipe's points, or more than there are images when it has grown
            return False

    least = -(-(sizes[0] or max(multiple, min(few, begin))) // multiple) * multiple
    most = min(sizes[1] or images, images) // multiple * multiple
    if least < begin and not trains(least):
        least += multiple * bisect_left(range(least, begin, multiple), True, key=trains)
    if most > begin and not trains(most):
        larger = range(begin + multiple, most, multiple)
        most = begin + multiple * bisect_left(larger, True, key=lambda batch: not trains(batch))
    return least, most or images


def curve(at: Callable[[int], Recipe], least: int, most: int) -> tuple[tuple[int, float], ...]:
    """(batch, epochs) at some sizes, if the recipe's epochs depend on the batch; otherwise empty."""
    sizes = [least * 2**k for k in range(64) if least * 2**k < most]
    try:
        pairs = tuple((batch, at(batch).epochs) for batch in (*sizes, most))
    except InputError:
        return ()
    return pairs if len({epochs for _, epochs in pairs}) > 1 else ()


def free_memory(recipe: Recipe) -> None:
    """Frees the memory and the compiled graphs of the sizes tried, before the model is built that trains."""
    batch_size.free_memory()
    if recipe.device.compile or any(technique.compiles_model for technique in recipe.techniques):
        torch.compiler.reset()


def rates_of(recipe: Recipe) -> dict[str, float]:
    """The rates among the settings of the recipe's optimizer, by path: `lr`, and names that end in `_lr`."""
    optimizer = recipe.optimizer
    defaults = {name: p.default for name, p in parameters_of(resolve(optimizer.use, "optimizer.use")).items()}
    settings = {name: table(value) for name, value in {**defaults, **optimizer.keys}.items()}
    flat = flat_settings(settings, "optimizer.").items()
    return {path: float(x) for path, x in flat if re.search(r"[._]lr$", path) and type(x) in (int, float)}


def show(tuned: TunedRecipe) -> None:
    """Prints the sizes tried with their intervals, the chosen size, and its rates."""
    recipe, result = tuned.recipe, tuned.result
    rows = []
    for i, sample in enumerate(result.samples):
        if sample.failed:
            cells = [sample.failed, "-", "-", "-"]
        else:
            step = f"{1e3 * sample.step_s:.3g} ({1e3 * sample.low_s:.3g} to {1e3 * sample.high_s:.3g})"
            used = f"{sample.utilisation:.0%}" if math.isfinite(sample.utilisation) else "-"
            cells = [step, f"{sample.images_per_s:,.0f}", f"{sample.input_s / sample.step_s:.0%}", used]
        epochs = result.epochs[i] if result.epochs else math.inf
        rows.append([f"{sample.batch:,}", *cells, f"{epochs:.3g}" if math.isfinite(epochs) else "-"])
    print_table("", rows, ("batch", "ms a step", "images/s", "waits for input", "device used", "epochs"))
    rates = ", ".join(f"{path} {rate * recipe.rate_scale:.4g}" for path, rate in rates_of(recipe).items())
    scaled = f"x {recipe.rate_scale:.4g} ({recipe.scaling}, from {recipe.reference_batch:,}): {rates}"
    lines = {
        "batch": f"{result.batch:,}: {result.why}",
        "rates": scaled if recipe.reference_batch else f"{rates} ({recipe.origin})",
        "shares": shares_row(recipe, result.speeds),
        "tuning": f"{result.strategy}, {result.spent_s:.1f} s of {result.budget_s:g}",
    }
    print_table("", {name: text for name, text in lines.items() if text})


def shares_row(recipe: Recipe, speeds: Sequence[float]) -> str:
    """How ranks of unequal speed share the batch; empty for equal speeds."""
    if not speeds or len(set(by_speed(recipe.batch, speeds))) == 1:
        return ""
    if shares := shares_of(recipe, speeds):
        return f'{", ".join(f"{n:,}" for n in shares)} images, by the speed of each rank, where batch = "auto"'
    unit = unit_of_shares(recipe, len(speeds))
    more = "; a smaller accumulate makes them finer" if unit > max(1, recipe.norm_batch) else ""
    return f"equal, though the ranks' speeds differ: a share is a multiple of {unit:,} images (norm_batch, parts){more}"


class _TwoSizes:
    """Times the smallest batch, and one of four times its size, or twice where that would take long."""

    needs = Needs(brief=True)

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        least, _ = tries.least, tries.take(tries.least)
        small = tries.good[0]  # raises where not even it fits
        factor = 4 if 4 * BRIEF * small.step_s < 2 * _BUDGET_S else 2
        larger = [tries.measure(batch) for batch in {min(factor * least, tries.most)} - {least}]
        return BatchSizeResult(small.batch, (small, *larger), "the smallest", tries.clock.now())


def estimated_s(training: Training) -> float:
    """The seconds of training and evaluations, if the target does not end them; nothing in the job changes.

    The time of a step lies on the line through those of an eighth and of half a batch. Collective; drains.
    """
    recipe, data, ranks = training.recipe, training.dataset, training.job.comm.size
    least = min(recipe.batch, max(2 * ranks, recipe.batch // 8))
    result = tune_batch_size(training.job, _TwoSizes(), budget_s=_BUDGET_S, least=least, most=recipe.batch)
    costs = sorted((sample.batch, sample.step_s) for sample in result.samples if not sample.failed)
    costs = costs if len(costs) > 1 else [(0, 0.0), *costs]
    fixed_s = max(0.0, extrapolate(costs, 0))
    image_s = (extrapolate(costs, recipe.batch) - fixed_s) / recipe.batch
    seconds = evaluations(recipe) * len(data.test) * TEST_PASSES[recipe.evaluate.views] * _FORWARD * image_s
    for epoch in range(math.ceil(recipe.epochs)):
        images = images_in_epoch(recipe, len(data.train), epoch) * pixel_share(recipe, epoch, data.image_size[0])
        whole_s = updates_in_epoch(recipe, len(data.train), epoch) * fixed_s + images * image_s
        seconds += min(1.0, recipe.epochs - epoch) * whole_s
    return seconds
