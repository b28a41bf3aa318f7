"""A training before it starts: its batch, updates and rates as a table."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from kasoku.config.recipe import Recipe, network, optimizer
from kasoku.config.updates import Moment, data_info, moments, updates, updates_in_epoch
from kasoku.core import say
from kasoku.core.errors import first_of
from kasoku.data import Dataset, Facts, Files
from kasoku.distributed.batchnorm.virtual_ranks import momentum
from kasoku.report.loggers import print_table

_NAMES = 5  # of classes that are shown


def preview(
    recipe: Recipe, *, data: Facts | None = None, model: nn.Module | None = None, first: Mapping[str, str] | None = None
) -> None:
    """Prints what a training will do, below the rows of `first`.

    `data`, `model`: what has been read and built already.
    """
    data, remark = (data, "") if data else data_info(recipe)
    model = model or network(recipe, data.classes, data.channels, data.side)
    curve = moments(recipe, data.images, optimizer(recipe, model).param_groups[0])
    print_table("", {**(first or {}), **_table(recipe, data, curve)})
    if remark:
        say(remark)


def photo_rows(recipe: Recipe, data: Dataset, model: nn.Module) -> dict[str, str]:
    """What a training on photos has chosen."""
    parts = [part for part in (data.train, data.test) if isinstance(part, Files)]
    # the folders that hold the folders of the classes
    homes = [part.paths[0].rpartition(f"/{data.classes[int(part.labels_N[0])]}/")[0] for part in parts]
    split = f" ({recipe.data.keys.get('validation', 0.1):.0%} of each class)" if data.undivided else ""
    if len(set(homes)) > 1:
        split = f" (those of {Path(homes[1]).name}/)"
    rows: dict[str, list[str]] = {"augmentation": [], "techniques": []}
    for technique in recipe.techniques:
        row = rows["augmentation" if technique.changes_pixels else "techniques"]
        values = ((f.name, getattr(technique, f.name), f.default) for f in fields(technique))
        changed = ", ".join(f"{name}={value}" for name, value, default in values if value != default)
        row.append(f"{type(technique).__name__}({changed})")
    return {
        "network": f"{recipe.model.name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters",
        "classes": f"{len(data.classes)}: {first_of(data.classes, _NAMES)}",
        "images": f"{len(data.train):,} to train, {len(data.test):,} to test{split}",
        "image size": f"{data.image_size[0]} pixels",
        **{name: ", ".join(row) for name, row in rows.items() if row},
    }


def remark(recipe: Recipe, data: Dataset, outputs: int) -> str:
    """The classes with too few images, and outputs of the network without a class; empty if there are none."""
    found = []
    for split, few, line in ((data.train, 1, "one image to train with"), (data.test, 0, "no image to test with")):
        counts = torch.bincount(split.labels_N, minlength=len(data.classes)).tolist()
        names = [name for name, count in zip(data.classes, counts, strict=True) if count <= few]
        if names:
            found.append(f"{len(names)} of {len(data.classes)} classes with {line} ({first_of(names, _NAMES)})")
    if outputs > len(data.classes):
        given = "num_classes" in recipe.model.keys
        got = f"model.num_classes = {outputs}" if given else f"{recipe.model.name} has {outputs} outputs"
        advice = "leave num_classes out" if given else "give it num_classes"
        found.append(f"{got}, and the data has {len(data.classes)} classes: {advice}")
    return "; ".join(found)


def _table(recipe: Recipe, data: Facts, curve: list[Moment]) -> dict[str, str]:
    per_epoch, total = updates_in_epoch(recipe, data.images, 0), updates(recipe, data.images)
    top = max(curve, key=lambda m: m.lr)
    scaled = f"rates x {recipe.rate_scale:.4g} ({recipe.scaling}, from {recipe.reference_batch:,})"
    source = "; ".join(text for text in (recipe.origin, scaled if recipe.rate_scale != 1 else "") if text)
    rows = {"batch": f"{recipe.batch:,}" + (f" ({source})" if source else "")}
    batches = sorted({m.batch for m in curve})
    if len(batches) > 1:
        rows["batch grows to"] = ", ".join(f"{b:,}" for b in batches[1:])
    rows["updates"] = f"{total:,} in {recipe.epochs:g} epochs, {per_epoch:,} in the first, of {data.images:,} images"
    schedule = type(recipe.schedule).__name__
    if recipe.schedule.warmup:
        schedule += f", after a warm-up of {recipe.scaled_schedule.warmup_epochs:g} epochs"
    rows["rate"] = f"{top.lr:.5g} at epoch {top.epoch:.1f} ({schedule}), {curve[-1].lr:.3g} at the end"
    decays = max(m.weight_decay for m in curve), curve[-1].weight_decay
    rows["weight decay"] = f"{decays[0]:.3g}" + (f", {decays[1]:.3g} at the end" if decays[0] != decays[1] else "")
    if top.momentum is not None:
        rows["momentum"] = f"{top.momentum:.4g}"
    if recipe.norm_batch:
        rows["virtual ranks"] = f"{recipe.batch // recipe.norm_batch:,} of {recipe.norm_batch} images"
    if recipe.norm_average:
        rows["BatchNorm momentum"] = f"{momentum(recipe.norm_average, per_epoch):.3g}"
    return rows
