"""The updates of a training, and its rates, weight decay and momentum over the epochs."""

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from kasoku.config.recipe import Recipe, checked
from kasoku.core import InputError
from kasoku.data import PUBLISHED, Dataset, Facts
from kasoku.optim import Rate

_POINTS = 1000  # of a curve
_MISFIT, _NO_RATE, _PARTS = 0.05, 1e-5, 200  # the share of a training, and of the top rate, that do not matter


@dataclass(frozen=True)
class Moment:
    """The settings of the first parameter group (the weights) for one update; `epoch` is where it begins."""

    epoch: float
    batch: int
    lr: float
    weight_decay: float
    momentum: float | None  # as it acts: corrected where the rule corrects it; None: the rule has none


def updates(recipe: Recipe, images: int, since: float = 0.0) -> int:
    """The updates of a training on this number of images, from the epoch `since` on; 0 or less if that is its end."""
    counts = [updates_in_epoch(recipe, images, epoch) for epoch in range(math.ceil(recipe.epochs))]

    def until(epoch: float) -> int:
        whole = math.floor(epoch + 1e-9)
        return sum(counts[:whole]) + (round((epoch - whole) * counts[whole]) if whole < len(counts) else 0)

    return until(recipe.epochs) - until(since)


def moments(recipe: Recipe, images: int, group: dict[str, Any]) -> list[Moment]:
    """The settings of a parameter group, as it was built, at about 1,000 updates spread over the training."""
    rate, total = Rate(recipe.scaled_schedule, recipe.rate_scale), updates(recipe, images)
    if total < 1:
        raise InputError(f"batch={recipe.batch}, epochs={recipe.epochs:g}: not one update of {images:,} images")
    counts = [updates_in_epoch(recipe, images, epoch) for epoch in range(math.ceil(recipe.epochs))]
    begins = [*itertools.accumulate(counts, initial=0)]  # the first update of each epoch

    def time(update: int) -> float:
        epoch = bisect.bisect(begins, update) - 1
        return epoch + (update - begins[epoch]) / counts[epoch]

    out = []
    for update in sorted({*range(0, total, max(1, total // _POINTS)), total - 1}):
        epoch = time(update)
        at, last = rate.at(group, epoch), rate.at(group, time(max(0, update - 1)))
        momentum = group.get("momentum", group.get("betas", (None,))[0])
        if momentum is not None and group.get("form") == "mxnet" and update and last["lr"]:
            momentum = momentum * at["lr"] / last["lr"]
        decay = at.get("weight_decay", group.get("weight_decay", 0.0))
        out.append(Moment(epoch, recipe.batch * growth(recipe, int(epoch)), at["lr"], decay, momentum))
    return out


def schedule_warning(recipe: Recipe) -> str:
    """How a schedule of ours with times of its own does not fit the training; empty where it does."""
    schedule, epochs, kind = recipe.scaled_schedule, recipe.epochs, type(recipe.schedule)
    if not kind.__module__.startswith("kasoku."):
        return ""
    if 0.25 <= recipe.schedule.warmup < 1:
        share = f"a share of the training, {schedule.warmup_epochs:g} of {schedule.epochs:g} epochs"
        return f"schedule.warmup={recipe.schedule.warmup:g}: {share}; for part of an epoch give a smaller share"
    if not recipe.schedule.epochs and hasattr(schedule, "passed"):  # its curve ends with the training
        return ""
    idle = next((i for i in range(_PARTS) if schedule(epochs * (1 - (i + 1) / _PARTS)) > _NO_RATE), _PARTS) / _PARTS
    left = schedule(epochs) - schedule(100 * epochs)
    if idle <= _MISFIT >= left:
        return ""
    wrong = f"still has {left:.0%} to fall at the end" if left > _MISFIT else f"is 0 for the last {idle:.0%}"
    mend = "--set schedule.epochs=0" if recipe.schedule.epochs else "change its times (below 1: shares of it)"
    return f"schedule {kind.__name__}: the rate {wrong} of the training ({epochs:g} epochs); to mend it: {mend}"


def evaluations(recipe: Recipe) -> int:
    """The number of evaluations of a training, the one at the end included."""
    every, start = recipe.evaluate.every, recipe.evaluate.start
    return 1 + sum(start <= k * every < recipe.epochs for k in range(1, int(recipe.epochs / every) + 1))


def info_of(dataset: Dataset) -> Facts:
    """The numbers of a data set."""
    return Facts(len(dataset.train), len(dataset.classes), dataset.channels, dataset.image_size[0], len(dataset.test))


def data_info(recipe: Recipe) -> tuple[Facts, str]:
    """The numbers of the recipe's data set; if its files are missing, the published ones and a remark."""
    try:
        return info_of(checked(recipe.data(), Dataset, "data")), ""
    except InputError as error:
        if (known := PUBLISHED.get(recipe.data.use)) is None:
            raise
        keys = recipe.data.keys
        known = replace(known, side=keys.get("size", known.side + 2 * keys.get("pad", 0)))
        if known.side < 1:
            raise InputError(f"data.size={known.side}: at least 1 pixel") from error
        return known, f"the data is not here ({error}): counted with the published {known.images:,} images"


def updates_in_epoch(recipe: Recipe, images: int, epoch: int) -> int:
    """The updates of one epoch."""
    images = images_in_epoch(recipe, images, epoch)
    batch = recipe.batch * growth(recipe, epoch)
    if batch > images:
        limit = f"at most {images} images, all that it trains on"
        raise InputError(f"batch={batch} in epoch {epoch}: {limit}; choose another batch")
    return -(-images // batch) if recipe.last_batch == "fill" else images // batch


def images_in_epoch(recipe: Recipe, images: int, epoch: int) -> int:
    """The images that an epoch takes of so many."""
    return round(images * math.prod(technique.image_share(epoch) for technique in recipe.scaled_techniques))


def pixel_share(recipe: Recipe, epoch: float, side: int) -> float:
    """The share of the pixels of images of this side that a step computes with."""
    return math.prod(technique.pixel_share(epoch, side) for technique in recipe.scaled_techniques)


def growth(recipe: Recipe, epoch: int) -> int:
    """The batch of an epoch's updates, in batches of the recipe."""
    return math.prod(technique.batch_factor(epoch) for technique in recipe.scaled_techniques)
