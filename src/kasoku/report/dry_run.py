"""A training before it starts: its batch, updates and rates as a table, and drawn over the epochs."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from kasoku.config.recipe import Recipe, network, optimizer
from kasoku.config.updates import Moment, data_info, moments, updates, updates_in_epoch
from kasoku.data import Facts
from kasoku.distributed.batchnorm.virtual_ranks import momentum
from kasoku.report.html import Panel
from kasoku.report.progress_bar import print_table


def preview(
    recipe: Recipe, *, data: Facts | None = None, model: nn.Module | None = None, show: bool = True, plot: Path | None
) -> None:
    """Prints what a training will do, and draws it.

    Args:
        recipe: what is trained.
        data: the numbers of its data set, where it has been read.
        model: its network, where it has been built.
        show: print the table.
        plot: the HTML page to draw; None: none.
    """
    remark = ""
    if data is None:
        data, remark = data_info(recipe)
    model = model or network(recipe, data.classes, data.channels, data.side)
    curve = moments(recipe, data.images, optimizer(recipe, model).param_groups[0])
    if show:
        print_table("", _table(recipe, data, curve))
    if remark:
        print(f"kasoku: {remark}", file=sys.stderr)
    if plot is None:
        return
    from kasoku.report.html.page import draw  # plotly and jinja2 take 0.4 s, and only this page needs them

    panels = [
        Panel("rate", {"rate": [(m.epoch, m.lr) for m in curve]}),  # as [000] Fig. 5 draws it
        Panel("weight decay", {"weight decay": [(m.epoch, m.weight_decay) for m in curve]}),
    ]
    if curve[0].momentum is not None:
        panels.append(Panel("momentum", {"momentum": [(m.epoch, m.momentum or 0.0) for m in curve]}))
    if len({m.batch for m in curve}) > 1:
        panels.append(Panel("batch", {"batch": [(m.epoch, float(m.batch)) for m in curve]}))
    draw(plot, f"batch {recipe.batch:,}, {recipe.epochs:g} epochs", panels, x_label="epoch")


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
    schedule = type(recipe.scaled_schedule).__name__
    warmup = f", after a warm-up of {recipe.scaled_schedule.warmup:g} epochs" if recipe.scaled_schedule.warmup else ""
    rows["rate"] = f"{top.lr:.5g} at epoch {top.epoch:.1f} ({schedule}{warmup}), {curve[-1].lr:.3g} at the end"
    decays = max(m.weight_decay for m in curve), curve[-1].weight_decay
    rows["weight decay"] = f"{decays[0]:.3g}" + (f", {decays[1]:.3g} at the end" if decays[0] != decays[1] else "")
    if top.momentum is not None:
        rows["momentum"] = f"{top.momentum:.4g}"
    if recipe.norm_batch:
        rows["virtual ranks"] = f"{recipe.batch // recipe.norm_batch:,} of {recipe.norm_batch} images"
    if recipe.norm_average:
        rows["BatchNorm momentum"] = f"{momentum(recipe.norm_average, per_epoch):.3g}"
    return rows
