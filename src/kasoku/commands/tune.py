"""kasoku tune: the batch of a recipe, or its rates, found by trying; and batch = "auto", tuned before training."""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kasoku.config.recipe import Recipe, dumps, load, own_folders
from kasoku.config.toml import override
from kasoku.core import Comm, InputError
from kasoku.core.files import write_atomically
from kasoku.training.auto_batch import BUDGET_S, TunedRecipe, TuneSettings, plainly, tune
from kasoku.tune.lr_range_test import RangeTest, range_test, rates_of, reference_rate, try_alone

if TYPE_CHECKING:
    from kasoku.distributed.startup import Start
    from kasoku.tune.measurement import Measurement
    from kasoku.tune.strategies import Strategy

_STRATEGIES = ("TimeToTarget", "Throughput", "EpochTimeMinimize", "GpuUsageMaximize")
_STEPS = 100  # of the range test
_LOW, _HIGH = 1e-3, 1e2  # of the range test: times the recipe's rates


def add_parser(commands: Any) -> None:
    """Adds `tune` to the command's parsers."""
    tune = commands.add_parser("tune", help="find the batch, or the rate, that trains a recipe fastest")
    tune.add_argument("recipe", type=Path, help="a recipe file (TOML)")
    tune.add_argument("--what", choices=("minibatch", "lr"), default="minibatch", help="(default: %(default)s)")
    tune.add_argument(
        "--strategy", default=_STRATEGIES[0], metavar="NAME", help=f"{', '.join(_STRATEGIES)} (default: the first)"
    )
    tune.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="(default: %(default)g)")
    tune.add_argument("--range", metavar="LOW:HIGH", help="of the batch, or of the optimizer's lr")
    tune.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    tune.add_argument("--out", type=Path, metavar="DIR", help="write tuning.json there")
    tune.set_defaults(run=_tune, stays="nothing was changed")


def before_training(
    arguments: argparse.Namespace,
    recipe: Recipe,
    *,
    again: Callable[[argparse.Namespace, Sequence[str]], Recipe],
    comm: Comm,
) -> TunedRecipe:
    """Tunes the batch of a recipe with batch = "auto" for `kasoku train`; all ranks get the same.

    Args:
        arguments: of the command.
        recipe: as it was read.
        again: reads it again, with more settings.
        comm: the ranks.

    Raises:
        InputError: where the run could not be written anyway, and where no batch can run.
    """
    from kasoku.distributed.consensus import run_on_all_ranks

    def check() -> None:
        if arguments.out and (arguments.out / "recipe.toml").exists():
            out = arguments.out
            raise InputError(f"{out}: holds a run already: go on with --resume {out}, or give another --out")

    def at(batch: int) -> Recipe:
        if arguments.data:  # nothing else follows from the batch, so the folder is not looked into again
            return replace(recipe, batch=batch, origin="")
        return again(arguments, [f"batch={batch}"])

    run_on_all_ranks(comm, check)
    tuned = tune(recipe, at, comm=comm, how=TuneSettings(budget_s=BUDGET_S))
    _give_back(recipe)
    if comm.rank == 0 and not arguments.quiet:
        show(tuned)
    return tuned


def _give_back(recipe: Recipe) -> None:
    """What was tried goes before the model that trains comes: its memory, and its compiled forms, which are limited."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if recipe.device.compile or any(technique.compiles_model for technique in recipe.techniques):
        torch.compiler.reset()


def _tune(arguments: argparse.Namespace) -> int:
    from kasoku.distributed.local_launch import on_ranks

    if not 0 < arguments.budget < math.inf:
        raise InputError(f"--budget {arguments.budget:g}: seconds above 0 are wanted")
    sys.path.extend(own_folders(arguments.recipe))
    run = _tune_rate if arguments.what == "lr" else _tune_batch
    return on_ranks(arguments, partial(run, arguments), count=partial(_gpus, arguments))


def _gpus(arguments: argparse.Namespace) -> int:
    from kasoku.commands.launch import gpus_for

    there = torch.cuda.device_count()
    if there < 2:
        return 1
    if arguments.what == "lr":
        return gpus_for(_with_batch(arguments))
    recipe = load(arguments.recipe, arguments.set)
    return there if recipe.device.kind in ("auto", "cuda") else 1  # what is tried can be shared by all


def _with_batch(arguments: argparse.Namespace) -> Recipe:
    """The recipe; with batch = "auto" at the batch where tuning would begin."""
    recipe = load(arguments.recipe, arguments.set)
    return load(arguments.recipe, [*arguments.set, f"batch={recipe.batch}"]) if recipe.auto_batch else recipe


def _loaded(read: Callable[[], Recipe], comm: Comm) -> Recipe:
    """The recipe, the same on all ranks."""
    from kasoku.distributed.consensus import assert_same_on_all_ranks, run_on_all_ranks, version_facts

    recipe = run_on_all_ranks(comm, read)
    if comm.size > 1:
        run_on_all_ranks(comm, lambda: assert_same_on_all_ranks(comm, {"recipe": dumps(recipe), **version_facts()}))
    return recipe


# ---- the batch


def _tune_batch(arguments: argparse.Namespace, comm: Comm, start: Start) -> int:
    from kasoku.distributed.consensus import run_on_all_ranks

    how = run_on_all_ranks(comm, lambda: _how(arguments))
    recipe = _loaded(partial(load, arguments.recipe, arguments.set), comm)
    fixed = _fixed(arguments, recipe)

    def at(batch: int) -> Recipe:
        return load(arguments.recipe, [*arguments.set, f"batch={batch}", *fixed])

    tuned = tune(recipe, at, comm=comm, how=how)
    twice = _twice(tuned, comm)

    def tell() -> None:
        if comm.rank == 0:
            show(tuned, memory=twice)
            settings = [f"batch={tuned.recipe.batch}", *fixed]
            if tuned.recipe.accumulate != recipe.accumulate:
                settings.append(f"accumulate={tuned.recipe.accumulate}")
            print(" ".join(f"--set {setting}" for setting in settings))
            if arguments.out:
                arguments.out.mkdir(parents=True, exist_ok=True)
                tuned.found.save(arguments.out / "tuning.json")

    run_on_all_ranks(comm, tell)
    return 0


def _how(arguments: argparse.Namespace) -> TuneSettings:
    least, most = _range(arguments.range, int) if arguments.range else (0, 0)
    return TuneSettings(_strategy(arguments.strategy), arguments.budget, least, most)


def _fixed(arguments: argparse.Namespace, recipe: Recipe) -> list[str]:
    """What keeps the rates those of the recipe's own batch, where it does not say itself how they follow the batch."""
    document = tomllib.loads(arguments.recipe.read_text())
    for setting in arguments.set:
        override(document, setting)
    known = recipe.reference_batch or document.get("points")
    return [] if known else [f"reference_batch={recipe.batch}"]


def _twice(tuned: TunedRecipe, comm: Comm) -> str:
    """What twice the batch would cost in the same memory, by SavedMemory; empty where that cannot be used."""
    from kasoku.memory import SavedMemory, larger
    from kasoku.training.trainer import prepare

    if comm.size > 1:  # ranks share statistics
        return ""
    job = prepare(tuned.recipe, comm, dataset=tuned.dataset).job
    try:
        if any(SavedMemory.conflict(technique) for technique in job.applied):
            return ""
        with plainly():
            told = larger(job, next(iter(job.loader))[0])
    except InputError:  # a network that SavedMemory cannot look at
        return ""
    finally:
        job.close()
    return f"{told} (kasoku.memory.SavedMemory)" if told else ""


def show(tuned: TunedRecipe, *, memory: str = "") -> None:
    """Prints the sizes tried with their intervals, the one chosen, the rates that follow, and a word on memory."""
    from rich.console import Console
    from rich.table import Table

    from kasoku.config.sharing import shares_of
    from kasoku.report import print_table

    recipe, found = tuned.recipe, tuned.found
    rows = Table()
    for name in ("batch", "ms a step", "images/s", "waits for input", "device used", "epochs"):
        rows.add_column(name, justify="right")
    for i, sample in enumerate(found.samples):
        takes = f"{found.epochs[i]:.3g}" if found.epochs else "-"
        rows.add_row(*_cells(sample), takes, style="bold" if sample.batch == found.batch else "")
    Console(highlight=False).print(rows)
    shares = ", ".join(f"{images:,}" for images in shares_of(recipe, found.speeds))
    rates = ", ".join(f"{path} {rate * recipe.rate_scale:.4g}" for path, rate in rates_of(recipe).items())
    print_table(
        "",
        {
            "batch": f"{found.batch:,}: {found.why}",
            "rates": f"x {recipe.rate_scale:.4g} ({recipe.scaling}, from {recipe.reference_batch:,}): {rates}"
            if recipe.reference_batch
            else f"{rates} ({recipe.origin})",
            **({"memory": memory} if memory else {}),
            **({"shares": f'{shares} images, by the speed of each rank, where batch = "auto"'} if shares else {}),
            "tuning": f"{found.strategy}, {found.spent_s:.1f} s of {found.budget_s:g}",
        },
    )


def _cells(sample: Measurement) -> list[str]:
    if sample.failed:
        return [f"{sample.batch:,}", sample.failed, "-", "-", "-"]
    used = f"{sample.utilisation:.0%}" if math.isfinite(sample.utilisation) else "-"
    step = f"{1e3 * sample.step_s:.3g} ({1e3 * sample.low_s:.3g} to {1e3 * sample.high_s:.3g})"
    return [
        f"{sample.batch:,}",
        step,
        f"{sample.images_per_s:,.0f}",
        f"{sample.input_s / sample.step_s:.0%}",
        used,
    ]


def _strategy(name: str) -> Strategy | None:
    """By its name; None: the default, which looks at the recipe."""
    from kasoku.tune import strategies

    if name not in _STRATEGIES:
        near = difflib.get_close_matches(name.lower(), [known.lower() for known in _STRATEGIES], n=1)
        known = next((known for known in _STRATEGIES if known.lower() in near), "")
        advice = f"did you mean {known}?" if known else f"one of {', '.join(_STRATEGIES)}"
        raise InputError(f"--strategy {name}: no such strategy: {advice}")
    made: Strategy = getattr(strategies, name)()
    return None if name == _STRATEGIES[0] else made


def _range(text: str, kind: type[Any]) -> tuple[Any, Any]:
    low, _, high = text.partition(":")
    try:
        least, most = kind(low), kind(high)
    except ValueError:
        example = "32:512" if kind is int else "0.001:10"
        raise InputError(f"--range {text}: LOW:HIGH is wanted, such as {example}") from None
    if not 0 < least <= most:
        raise InputError(f"--range {text}: an empty range; LOW above 0 and at most HIGH is wanted")
    return least, most


# ---- the rates


def _tune_rate(arguments: argparse.Namespace, comm: Comm, start: Start) -> int:
    from kasoku.distributed.consensus import run_on_all_ranks
    from kasoku.training.trainer import prepare

    recipe = _loaded(partial(_with_batch, arguments), comm)
    bounds = run_on_all_ranks(comm, lambda: _range(arguments.range, float) if arguments.range else None)
    rates = rates_of(recipe)
    job = run_on_all_ranks(comm, lambda: prepare(recipe, comm, start=start)).job
    own = [float(group["lr"]) for group in job.kept("rate").own]
    lr = run_on_all_ranks(comm, lambda: reference_rate(rates, own))
    low, high = (bound / lr for bound in bounds) if bounds else (_LOW, _HIGH)
    scaled = [rate * recipe.rate_scale for rate in own]
    if comm.size > 1:  # what no rank can do is told once, while none waits for another

        def alone() -> None:
            with plainly():
                try_alone(job)

        run_on_all_ranks(comm, alone)
    with plainly():  # not together: a rank that fails now leaves the others in the midst of a step, as in a training
        found = range_test(job, low=low, high=high, steps=_STEPS, budget_s=arguments.budget, rates=scaled)

    def tell() -> None:
        if comm.rank == 0:
            if arguments.out:
                arguments.out.mkdir(parents=True, exist_ok=True)
                text = json.dumps(found.as_json(lr, arguments.budget), indent=1) + "\n"
                write_atomically(arguments.out / "tuning.json", lambda part: part.write_text(text))
            _show_rates(found, lr, rates)

    run_on_all_ranks(comm, tell)
    return 0


def _show_rates(result: RangeTest, lr: float, rates: Mapping[str, float]) -> None:
    """Prints the result and the settings that it suggests. Raises InputError where no rate lowers the loss."""
    from kasoku.report import print_table

    samples = result.samples
    tried = f"{len(samples)} steps, {lr * samples[0].factor:.3g} to {lr * samples[-1].factor:.3g}"
    if not result.in_time:
        tried += f"; time was over after them, of {_STEPS}: give more with --budget"
    if result.suggested is None:
        raise InputError(f"no rate lowers the loss ({tried}): try others with --range LOW:HIGH")
    print_table(
        "",
        {
            "rates tried": tried,
            "the loss falls fastest at": f"{lr * result.steepest:.3g}" if result.steepest else "nowhere",
            "it diverges from": f"{lr * result.diverged:.3g}" if result.diverged else "nowhere here",
            "suggested (the smaller of the first and a tenth of the second)": f"{lr * result.suggested:.3g}",
        },
    )
    print(" ".join(f"--set {path}={value * result.suggested:.3g}" for path, value in rates.items()))
