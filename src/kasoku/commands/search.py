"""kasoku search: settings of a recipe tried in trainings of their own, several at once where there is room."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kasoku.config.recipe import dumps, load, own_folders
from kasoku.core import InputError
from kasoku.core.hardware import cores
from kasoku.distributed.local_launch import STARTED

if TYPE_CHECKING:
    from kasoku.tune.hyperparameters import TrialResult
    from kasoku.tune.search_space import Space

_SHOWN = 10  # trials in the table that is printed


def add_parser(commands: Any) -> None:
    """Adds `search` to the command's parsers."""
    search = commands.add_parser("search", help="try settings of a recipe, each in a training of its own (Optuna)")
    search.add_argument("recipe", type=Path, help="a recipe file (TOML)")
    search.add_argument(
        "--space", type=Path, required=True, metavar="FILE", help="TOML: path = {low, high, log, step} or {choices}"
    )
    search.add_argument("--trials", type=int, required=True, metavar="N", help="in all, with those of earlier parts")
    search.add_argument("--jobs", type=int, default=1, metavar="K", help="trainings at once (default: 1)")
    search.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    search.add_argument("--out", type=Path, metavar="DIR", help="all of it; given again, the search there goes on")
    search.set_defaults(run=_search, stays="what was done stays, and the same command with --out goes on there")


def _search(arguments: argparse.Namespace) -> int:
    from kasoku.training.run_folder import free_folder
    from kasoku.training.trainer import signals
    from kasoku.tune.hyperparameters import STOPPED, SearchSettings, search
    from kasoku.tune.search_space import read_space

    file: Path = arguments.recipe
    sys.path.extend(own_folders(file))
    space = read_space(arguments.space)
    recipe = load(file, arguments.set)
    check(space, arguments.space, lambda more: load(file, [*arguments.set, *more]))
    folder: Path = arguments.out or free_folder(f"{file.stem}-search")
    # accuracies at the end are compared, so none ends at its target; K trainings share the cores
    settings = ["evaluate.stop=false"]
    if arguments.jobs > 1 and not recipe.device.threads:
        settings.append(f"device.threads={max(1, cores() // arguments.jobs)}")
    given = [part for setting in (*settings, *arguments.set) for part in ("--set", setting)]
    plan = SearchSettings(
        (sys.executable, "-m", "kasoku", "train", str(file), "--quiet", *given),
        space,
        folder,
        arguments.trials,
        arguments.jobs,
        about="\n".join([dumps(recipe), *(f"{path}: {one}" for path, one in space.items())]),
        environment=partial(environment, arguments.jobs),
    )
    print(f"{arguments.trials} trials, {arguments.jobs} at once, in {folder}", flush=True)
    with signals() as caught:
        outcomes = search(plan, caught=caught, say=lambda line: print(line, flush=True))
    show(outcomes)
    if caught:
        print(f"kasoku: stopped by {caught[0]}; go on with the same command and --out {folder}", file=sys.stderr)
        return STOPPED
    return 0


def check(space: Space, file: Path, load_with: Callable[[Sequence[str]], object]) -> None:
    """Raises InputError for a path the recipe does not have, with the nearest right one; and for values of no use.

    Args:
        space: what is varied.
        file: where it was read, for the message.
        load_with: reads the recipe with more settings.
    """
    for path, one in space.items():
        refusals = []
        for value in one.examples:
            try:
                load_with([f"{path}={value}"])
                break
            except InputError as error:
                refusals.append(error)
        else:
            raise InputError(f"{file}: {refusals[0]}") from refusals[0]


def environment(jobs: int, job: int) -> dict[str, str]:
    """What a trial's process gets: when it was started, and with several jobs its share of the GPUs.

    By the first its process also ends when this one is killed.
    """
    own = {STARTED: repr(time.perf_counter())}
    there = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = there or [str(gpu) for gpu in range(torch.cuda.device_count())]
    if jobs > 1 and gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[job::jobs] or [gpus[job % len(gpus)]])
    return own


def show(outcomes: Sequence[TrialResult]) -> None:
    """Prints the best trials, and the settings of the best one as --set takes them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = Table()
    for name in ("trial", "how", "top-1", "seconds", *(outcomes[0].settings if outcomes else ())):
        rows.add_column(escape(name))
    for one in outcomes[:_SHOWN]:
        facts = [f"{one.top1:.2%}" if one.top1 else "-", f"{one.result.get('seconds') or 0:.1f}"]
        rows.add_row(str(one.trial), *map(escape, [one.how, *facts, *one.settings.values()]))
    Console(highlight=False).print(rows)
    if len(outcomes) > _SHOWN:
        print(f"and {len(outcomes) - _SHOWN} more in trials.csv")
    if outcomes and outcomes[0].how == "done":
        print(" ".join(f"--set {shlex.quote(f'{path}={value}')}" for path, value in outcomes[0].settings.items()))
