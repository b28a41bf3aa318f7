"""What `kasoku tune --what lr` says of a rate range test, in the terms of a recipe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kasoku.config.recipe import Recipe
from kasoku.config.toml import resolve, table
from kasoku.core import InputError

if TYPE_CHECKING:
    from kasoku.tune.lr_range_test import RangeTest

STEPS = 100


def rates_of(recipe: Recipe) -> dict[str, float]:
    """The rates among the settings of the recipe's optimizer, by path: lr, and what ends in _lr."""
    try:
        parameters = inspect.signature(resolve(recipe.optimizer.use, "optimizer.use")).parameters
    except ValueError:  # a builtin without a signature
        parameters = inspect.Signature().parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return dict(_rates({**defaults, **recipe.optimizer.keys}, "optimizer"))


def _rates(settings: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, thing in settings.items():
        value = table(thing)
        if isinstance(value, dict):
            yield from _rates(value, f"{path}.{name}")
        elif (name == "lr" or name.endswith("_lr")) and type(value) in (int, float):
            yield f"{path}.{name}", float(value)


def shown_as(rates: Mapping[str, float], own: Sequence[float]) -> float:
    """The rate that all others are told as multiples of: the recipe's lr, or the largest of its parameter groups'.

    Raises:
        InputError: where that is 0.
    """
    lr = rates.get("optimizer.lr") or max(own)
    if not lr > 0:
        raise InputError(f"optimizer.lr = {lr:g}: the recipe's rates are multiplied, so one above 0 is wanted")
    return lr


def document(found: RangeTest, lr: float, budget_s: float) -> dict[str, Any]:
    """What tuning.json has of a range test: its rates as multiples of `lr`; null where there is none."""

    def at(factor: float | None) -> float | None:
        return None if factor is None else lr * factor

    samples = [{"lr": lr * s.factor, "loss": _finite(s.loss), "smoothed": _finite(s.smoothed)} for s in found.samples]
    return {
        "what": "lr",
        "strategy": "range test",
        "chosen": at(found.suggested),
        "steepest": at(found.steepest),
        "diverged": at(found.diverged),
        "samples": samples,
        "spent_s": round(found.spent_s, 3),
        "budget_s": budget_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show_rates(found: RangeTest, lr: float, rates: Mapping[str, float]) -> None:
    """Prints what a range test found, and the settings it suggests. Raises InputError where no rate is of use.

    Args:
        found: by the test; its factors multiply the rates of the recipe.
        lr: the rate they are shown as multiples of.
        rates: of the recipe, by path.
    """
    from kasoku.report import print_table

    samples = found.samples
    tried = f"{len(samples)} steps, {lr * samples[0].factor:.3g} to {lr * samples[-1].factor:.3g}"
    if not found.in_time:
        tried += f"; time was over after them, of {STEPS}: give more with --budget"
    if found.suggested is None:
        raise InputError(f"no rate lowers the loss ({tried}): try others with --range LOW:HIGH")
    print_table(
        "",
        {
            "rates tried": tried,
            "the loss falls fastest at": f"{lr * found.steepest:.3g}" if found.steepest else "nowhere",
            "it diverges from": f"{lr * found.diverged:.3g}" if found.diverged else "nowhere here",
            "suggested (the smaller of the first and a tenth of the second)": f"{lr * found.suggested:.3g}",
        },
    )
    print(" ".join(f"--set {path}={value * found.suggested:.3g}" for path, value in rates.items()))
