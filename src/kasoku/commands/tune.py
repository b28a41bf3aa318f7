"""`kasoku tune`: the batch of a recipe, found by trying sizes."""

import re
from functools import partial

import torch

from kasoku.commands.arguments import STRATEGIES, TuneArguments
from kasoku.config.ranks import check_same
from kasoku.config.recipe import read_document
from kasoku.core import Comm, InputError
from kasoku.core.errors import nearest
from kasoku.core.files import json_text, write_text
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.local_launch import on_ranks
from kasoku.distributed.startup import Start
from kasoku.training.auto_batch import show, tune
from kasoku.training.run_folder import output_folder


def run(arguments: TuneArguments) -> int:
    """Tunes; returns the exit code."""
    if arguments.strategy and "." not in arguments.strategy and arguments.strategy not in STRATEGIES:
        raise InputError(f"--strategy {arguments.strategy}: no such strategy{nearest(arguments.strategy, STRATEGIES)}")
    tune_one, count = partial(_tune, arguments), partial(_gpus, arguments)
    return on_ranks(tune_one, arguments.words, started=arguments.started, count=count)


def _gpus(arguments: TuneArguments) -> int:
    """The number of processes to tune on this machine."""
    available = torch.cuda.device_count()  # all sizes that are tried can be shared by all GPUs
    return available if available > 1 and arguments.load().device.kind in ("auto", "cuda") else 1


def _tune(arguments: TuneArguments, comm: Comm, start: Start) -> int:
    sizes = run_on_all_ranks(comm, lambda: _range(arguments.range) if arguments.range else (0, 0))
    recipe = run_on_all_ranks(comm, arguments.load)
    check_same(recipe, comm)
    create = partial(output_folder, arguments.out, arguments.recipe, "tuned")
    folder = run_on_all_ranks(comm, lambda: create() if arguments.out and comm.rank == 0 else None)  # before the search
    # where the recipe does not say how the rates follow the batch, they stay those of its own batch
    known = recipe.reference_batch or read_document(arguments.recipe, arguments.set).get("points")
    fixed = [] if known else [f"reference_batch={recipe.batch}"]
    tuned = tune(recipe, lambda batch: arguments.load(f"batch={batch}", *fixed), comm=comm, sizes=sizes)

    def report() -> None:
        show(tuned)
        chosen = [f"batch={tuned.recipe.batch}", *fixed]
        if tuned.recipe.accumulate != recipe.accumulate:
            chosen.append(f"accumulate={tuned.recipe.accumulate}")
        print(" ".join(f"--set {setting}" for setting in chosen))
        document = tuned.result.as_json()
        if folder:
            write_text(folder / "tuning.json", json_text(document))
        arguments.document.update(settings=chosen, **document)

    run_on_all_ranks(comm, lambda: report() if comm.rank == 0 else None)
    return 0


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise InputError(f"--range {text}: LOW:HIGH is wanted, such as 32:512")
    smallest, largest = map(int, match.groups())
    if not 0 < smallest <= largest:
        raise InputError(f"--range {text}: an empty range; LOW above 0 and at most HIGH is wanted")
    return smallest, largest
