"""What a recipe will do, before it does it: its updates, rates, weight decay and momentum over the epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from kasoku.config.recipe import Recipe, made, optimizer
from kasoku.core import InputError
from kasoku.data import PUBLISHED, Dataset, Facts
from kasoku.distributed.batchnorm.virtual_ranks import momentum
from kasoku.optim import Rate
from kasoku.report.html import Panel

_POINTS = 1000  # of a curve


@dataclass(frozen=True)
class Moment:
    """The settings of the first parameter group (the weights) for one update; `epoch` is where it begins."""

    epoch: float
    batch: int
    lr: float
    weight_decay: float
    momentum: float | None  # as it acts: corrected where the rule corrects it; None: the rule has none


def updates(recipe: Recipe, images: int) -> int:
    """How many updates the training makes on so many images."""
    whole = math.floor(recipe.epochs)
    counts = [_in_epoch(recipe, images, epoch) for epoch in range(math.ceil(recipe.epochs))]
    return sum(counts[:whole]) + (round((recipe.epochs - whole) * counts[-1]) if len(counts) > whole else 0)


def moments(recipe: Recipe, images: int, group: dict[str, Any]) -> list[Moment]:
    """The course of a parameter group's settings, at about 1,000 updates spread over the training.

    Args:
        recipe: the training.
        images: how many there are to train on.
        group: the group's settings as the optimizer was made with.
    """
    rate, total = Rate(recipe.course, recipe.rate_scale), updates(recipe, images)
    if total < 1:
        raise InputError(f"batch={recipe.batch}, epochs={recipe.epochs:g}: not one update of {images:,} images")
    every, made, last, out = max(1, total // _POINTS), 0, 0.0, []
    for epoch in range(math.ceil(recipe.epochs)):
        count = _in_epoch(recipe, images, epoch)
        for i in range(min(count, total - made)):
            at = rate.at(group, epoch + i / count)
            if (made + i) % every == 0 or made + i == total - 1:
                batch = recipe.batch * _growth(recipe, epoch)
                decay = at.get("weight_decay", group.get("weight_decay", 0.0))
                out.append(Moment(epoch + i / count, batch, at["lr"], decay, _momentum(group, at["lr"], last)))
            last = at["lr"]
        made += count
    return out


def table(recipe: Recipe, facts: Facts, course: list[Moment]) -> dict[str, str]:
    """What is printed of a training before it starts."""
    per_epoch, total = _in_epoch(recipe, facts.images, 0), updates(recipe, facts.images)
    top = max(course, key=lambda m: m.lr)
    scaled = f"rates x {recipe.rate_scale:.4g} ({recipe.scaling}, from {recipe.reference_batch:,})"
    whence = "; ".join(text for text in (recipe.origin, scaled if recipe.rate_scale != 1 else "") if text)
    rows = {"batch": f"{recipe.batch:,}" + (f" ({whence})" if whence else "")}
    grown = sorted({m.batch for m in course})
    if len(grown) > 1:
        rows["batch grows to"] = ", ".join(f"{b:,}" for b in grown[1:])
    rows["updates"] = f"{total:,} in {recipe.epochs:g} epochs, {per_epoch:,} in the first, of {facts.images:,} images"
    schedule = type(recipe.course).__name__
    warmup = f", after a warm-up of {recipe.course.warmup:g} epochs" if recipe.course.warmup else ""
    until = getattr(recipe.course, "epochs", recipe.epochs)
    ends = f", made for {until:g} epochs" if until != recipe.epochs else ""
    rows["rate"] = f"{top.lr:.5g} at epoch {top.epoch:.1f} ({schedule}{warmup}{ends}), {course[-1].lr:.3g} at the end"
    decays = max(m.weight_decay for m in course), course[-1].weight_decay
    rows["weight decay"] = f"{decays[0]:.3g}" + (f", {decays[1]:.3g} at the end" if decays[0] != decays[1] else "")
    if top.momentum is not None:
        rows["momentum"] = f"{top.momentum:.4g}"
    if recipe.norm_batch:
        rows["virtual ranks"] = f"{recipe.batch // recipe.norm_batch:,} of {recipe.norm_batch} images"
    if recipe.norm_average:
        rows["BatchNorm momentum"] = f"{momentum(recipe.norm_average, per_epoch):.3g}"
    return rows


def plot(path: Path, title: str, course: list[Moment]) -> None:
    """Writes a page of the rate, weight decay and momentum over epochs, as [000] Fig. 5 draws the rate."""
    from kasoku.report.html.page import draw

    panels = [
        Panel("rate", {"rate": [(m.epoch, m.lr) for m in course]}),
        Panel("weight decay", {"weight decay": [(m.epoch, m.weight_decay) for m in course]}),
    ]
    if course[0].momentum is not None:
        panels.append(Panel("momentum", {"momentum": [(m.epoch, m.momentum or 0.0) for m in course]}))
    if len({m.batch for m in course}) > 1:
        panels.append(Panel("batch", {"batch": [(m.epoch, float(m.batch)) for m in course]}))
    draw(path, title, panels, x_label="epoch")


def facts(dataset: Dataset) -> Facts:
    """The numbers of a data set."""
    return Facts(len(dataset.train), len(dataset.classes), dataset.channels, dataset.image_size[0], len(dataset.test))


def ahead(recipe: Recipe) -> tuple[Facts, str]:
    """The numbers of the recipe's data, and a remark where they are the published ones since the data is not here."""
    try:
        return facts(made(recipe.data(), Dataset, "data")), ""
    except InputError as error:
        known = PUBLISHED.get(recipe.data.use)
        if known is None:
            raise
        known = replace(known, side=recipe.data.keys.get("size", known.side))
        if known.side < 1:
            raise InputError(f"data.size={known.side}: at least 1 pixel") from error
        return known, f"the data is not here ({error}): counted with the published {known.images:,} images"


def first_group(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    """The settings of the optimizer's first parameter group, which holds the weights."""
    return {k: v for k, v in optimizer(recipe, model).param_groups[0].items() if k != "params"}


def _in_epoch(recipe: Recipe, images: int, epoch: int) -> int:
    batch = recipe.batch * _growth(recipe, epoch)
    if batch > images:
        raise InputError(
            f"batch={batch} in epoch {epoch}: at most {images} images, all there are to train on; choose another batch"
        )
    return -(-images // batch) if recipe.last_batch == "fill" else images // batch


def _growth(recipe: Recipe, epoch: int) -> int:
    return math.prod(technique.batch_factor(epoch) for technique in recipe.techniques)


def _momentum(group: dict[str, Any], lr: float, last: float) -> float | None:
    own: float | None = group.get("momentum", group.get("betas", (None,))[0])
    return own * lr / last if own is not None and group.get("form") == "mxnet" and last else own
