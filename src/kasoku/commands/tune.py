"""`kasoku tune`: the batch of a recipe, or its rates, found by trying them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kasoku.commands.arguments import STRATEGIES, TuneArguments
from kasoku.config.ranks import check_same, gpus_for
from kasoku.config.recipe import Recipe, read_document
from kasoku.config.toml import nearest
from kasoku.core import Comm, InputError
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.local_launch import on_ranks
from kasoku.distributed.startup import Start
from kasoku.report import print_table
from kasoku.training.auto_batch import plainly, show, tune
from kasoku.training.trainer import build
from kasoku.tune.lr_range_test import RangeTest, range_test, rates_of, try_alone
from kasoku.tune.measurement import write_tuning

_LOW, _HIGH = 1e-3, 1e2  # of the range test: times the recipe's rates
_STEPS = 100  # of the range test


def run(arguments: TuneArguments) -> int:
    """Tunes; returns the exit code."""
    if arguments.strategy and "." not in arguments.strategy and arguments.strategy not in STRATEGIES:
        raise InputError(f"--strategy {arguments.strategy}: no such strategy{nearest(arguments.strategy, STRATEGIES)}")
    tune_one = partial(_tune_rate if arguments.what == "lr" else _tune_batch, arguments)
    return on_ranks(tune_one, arguments.words, started=arguments.started, count=partial(_gpus, arguments))


def _gpus(arguments: TuneArguments) -> int:
    """The number of processes to tune on this machine."""
    available = torch.cuda.device_count()
    if available < 2:
        return 1
    if arguments.what == "lr":
        return gpus_for(_with_batch(arguments))
    # all sizes that are tried can be shared by all GPUs
    return available if arguments.load().device.kind in ("auto", "cuda") else 1


def _with_batch(arguments: TuneArguments) -> Recipe:
    """The recipe; with batch = "auto" at the batch where tuning would begin."""
    recipe = arguments.load()
    return arguments.load(f"batch={recipe.batch}") if recipe.auto_batch else recipe


# ---- the batch


def _tune_batch(arguments: TuneArguments, comm: Comm, start: Start) -> int:
    sizes = run_on_all_ranks(comm, lambda: _range(arguments.range, int) if arguments.range else (0, 0))
    recipe = run_on_all_ranks(comm, arguments.load)
    check_same(recipe, comm)
    # where the recipe does not say how the rates follow the batch, they stay those of its own batch
    known = recipe.reference_batch or read_document(arguments.recipe, arguments.set).get("points")
    fixed = [] if known else [f"reference_batch={recipe.batch}"]

    def at(batch: int) -> Recipe:
        return arguments.load(f"batch={batch}", *fixed)

    tuned = tune(recipe, at, comm=comm, sizes=sizes)

    def report() -> None:
        if comm.rank == 0:
            show(tuned)
            chosen = [f"batch={tuned.recipe.batch}", *fixed]
            if tuned.recipe.accumulate != recipe.accumulate:
                chosen.append(f"accumulate={tuned.recipe.accumulate}")
            print(" ".join(f"--set {setting}" for setting in chosen))
            if arguments.out:
                write_tuning(arguments.out, tuned.result.as_json())

    run_on_all_ranks(comm, report)
    return 0


def _range(text: str, kind: type[Any]) -> tuple[Any, Any]:
    low, _, high = text.partition(":")
    try:
        smallest, largest = kind(low), kind(high)
    except ValueError:
        example = "32:512" if kind is int else "0.001:10"
        raise InputError(f"--range {text}: LOW:HIGH is wanted, such as {example}") from None
    if not 0 < smallest <= largest:
        raise InputError(f"--range {text}: an empty range; LOW above 0 and at most HIGH is wanted")
    return smallest, largest


# ---- the rates


def _tune_rate(arguments: TuneArguments, comm: Comm, start: Start) -> int:
    recipe = run_on_all_ranks(comm, lambda: _with_batch(arguments))
    check_same(recipe, comm)
    bounds = run_on_all_ranks(comm, lambda: _range(arguments.range, float) if arguments.range else None)
    job = run_on_all_ranks(comm, lambda: build(recipe, comm, start=start)).job
    own = [float(group["lr"]) for group in job.kept("rate").own]
    rates = rates_of(recipe)

    def reference() -> float:  # all rates are told as multiples of it
        if not max(own) > 0:
            raise InputError("optimizer.lr = 0: the recipe's rates are multiplied, so one above 0 is wanted")
        return rates.get("optimizer.lr") or max(own)

    lr = run_on_all_ranks(comm, reference)
    low, high = (bound / lr for bound in bounds) if bounds else (_LOW, _HIGH)
    scaled = [rate * recipe.rate_scale for rate in own]
    if comm.size > 1:  # an error that all ranks meet is printed once, while no rank waits for another
        run_on_all_ranks(comm, partial(plainly()(try_alone), job))
    with plainly():  # not on_all_ranks: a rank that fails in a step leaves the others in it, as in a training
        result = range_test(job, low=low, high=high, steps=_STEPS, budget_s=recipe.tune.budget, rates=scaled)

    def report() -> None:
        if comm.rank == 0:
            if arguments.out:
                write_tuning(arguments.out, result.as_json(lr, recipe.tune.budget))
            _show_rates(result, lr, rates)

    run_on_all_ranks(comm, report)
    return 0


def _show_rates(result: RangeTest, lr: float, rates: Mapping[str, float]) -> None:
    """Prints the result of a range test, and the settings it suggests. Raises InputError if no rate lowers the loss."""
    samples = result.samples
    tried = f"{len(samples)} steps, {lr * samples[0].factor:.3g} to {lr * samples[-1].factor:.3g}"
    if not result.in_time:
        tried += f"; time was over after them, of {_STEPS}: give more with --budget"
    if result.suggested is None:
        raise InputError(f"no rate lowers the loss ({tried}): try others with --range LOW:HIGH")
    rows = {
        "rates tried": tried,
        "the loss falls fastest at": f"{lr * result.steepest:.3g}" if result.steepest else "nowhere",
        "it diverges from": f"{lr * result.diverged:.3g}" if result.diverged else "nowhere here",
        "suggested (the smaller of the first and a tenth of the second)": f"{lr * result.suggested:.3g}",
    }
    print_table("", rows)
    print(" ".join(f"--set {path}={value * result.suggested:.3g}" for path, value in rates.items()))
