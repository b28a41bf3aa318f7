"""`kasoku search`: settings of a recipe tried in trainings of their own, several at once where there is room."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch

from kasoku.commands.arguments import SearchArguments
from kasoku.config import trust
from kasoku.config.recipe import Recipe, dumps, read_early
from kasoku.core import InputError, say
from kasoku.core.hardware import cores
from kasoku.distributed.local_launch import STARTED, train_arguments
from kasoku.report import print_table
from kasoku.training.control import signals
from kasoku.training.run_folder import free_folder
from kasoku.tune.hyperparameters import STOPPED, SearchSettings, TrialResult, search
from kasoku.tune.search_space import read_space

_SHOWN = 10  # trials in the table that is printed


def run(arguments: SearchArguments) -> int:
    """Searches; returns the exit code."""
    space = read_space(arguments.space)
    recipe = arguments.load()
    for path, values in space.items():  # has the recipe this path, and does it take some of these values?
        refusals = []
        for value in values.examples:
            try:
                arguments.load(f"{path}={value}")
                break
            except InputError as error:
                refusals.append(error)
        else:
            raise InputError(f"{arguments.space}: {refusals[0]}") from refusals[0]
    folder = arguments.out or free_folder(f"{arguments.recipe.stem}-search")
    # accuracies at the end are compared, so none ends at its target; K trainings share the cores
    settings = ["evaluate.stop=false"]
    if arguments.jobs > 1 and not recipe.device.threads:
        settings.append(f"device.threads={max(1, cores() // arguments.jobs)}")
    settings += arguments.set
    words = train_arguments(arguments.recipe, settings, None, go_on=False, extra=trust.allow_options())
    plan = SearchSettings(
        (sys.executable, "-m", "kasoku", *words, "--quiet"),
        space,
        folder,
        arguments.trials,
        arguments.jobs,
        about="\n".join([dumps(recipe), *(f"{path}: {values}" for path, values in space.items())]),
        environment=partial(_environment, arguments.jobs),
        pruner=arguments.pruner,
        prepare=partial(_prepare, recipe),
    )
    print(f"{arguments.trials} trials, {arguments.jobs} at once, in {folder}", flush=True)
    with signals() as caught:
        results = search(plan, caught=caught, say=lambda line: print(line, flush=True))
    _show(results)
    if caught:
        say(f"stopped by {caught[0]}; go on with the same command and --out {folder}")
        return STOPPED
    return 0


def _prepare(recipe: Recipe) -> None:
    """Imports and reads once what all trials need."""
    import_module("torch._dynamo")  # torch's optimizers import it
    import_module("kasoku.training.trainer")
    read_early(recipe)


def _environment(jobs: int, job: int) -> dict[str, str]:
    """Environment variables of a trial's process: its start, and with several jobs its share of the GPUs."""
    own = {STARTED: repr(time.perf_counter())}  # a process that has it also ends when this one is killed
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = visible or [str(gpu) for gpu in range(torch.cuda.device_count())]
    if jobs > 1 and gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[job::jobs] or [gpus[job % len(gpus)]])
    return own


def _show(results: Sequence[TrialResult]) -> None:
    """Prints the best trials, and the settings of the best one as --set takes them."""
    rows = []
    for result in results[:_SHOWN]:
        figures = [f"{result.top1:.2%}" if result.top1 else "-", f"{result.result.get('seconds') or 0:.1f}"]
        rows.append([str(result.trial), result.how, *figures, *result.settings.values()])
    print_table("", rows, ("trial", "how", "top-1", "seconds", *(results[0].settings if results else ())))
    if len(results) > _SHOWN:
        print(f"and {len(results) - _SHOWN} more")
    if results and results[0].how == "done":
        print(" ".join(f"--set {shlex.quote(f'{path}={value}')}" for path, value in results[0].settings.items()))
