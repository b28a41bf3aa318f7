"""The command `kasoku`: its verbs, its exit codes, and one line for every error that a user can mend.

Exit codes: 0 done, 1 a fault of kasoku's own, 2 an input that cannot be used or an error in code that it names,
3 the training diverged, 4 another rank died or hangs, 5 a device returned wrong bits (Replay), 75 stopped by SIGINT or
SIGTERM with a checkpoint written (go on with --resume), 130 interrupted at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module

from kasoku import __version__
from kasoku.commands import arguments as options
from kasoku.commands.arguments import CommandArguments, JsonArguments, arguments_of, declare, only_json

_LINE = 1200  # letters of a message, at most
VERBS = {  # verb: (module of kasoku.commands, help)
    "train": ("train", "train from a recipe, or on a folder of photos"),
    "launch": ("launch", "train on the GPUs of many machines: here, or by Slurm, Kubernetes, Kubeflow, SkyPilot"),
    "tune": ("tune", "find the batch that trains a recipe fastest"),
    "search": ("search", "try settings of a recipe, each in a training of its own (Optuna)"),
    "profile": ("profile", "where the time of a step goes: blocks, operators, gaps"),
    "simulate": ("simulate", "time and cost of a recipe on a cluster that is described in a file"),
    "plan": ("plan", "GPUs, batch and groups for a deadline or a budget; a recipe and a script"),
    "reproduce": ("reproduce", "repeat the experiments of a document that kasoku began with, and compare"),
    "report": ("report", "one HTML page of runs: curves, where the time went, classes; which recipe is faster"),
    "eval": ("evaluate", "top-1 and top-5 of runs, alone and as an ensemble"),
    "predict": ("predict", "the five likeliest classes of images, as CSV"),
    "export": ("export", "write a trained network for other programs"),
    "data": ("data", "download the official files of a data set"),
    "pack": ("pack", "pack images into tar shards, which load faster in every later run"),
    "init": ("init", "write a recipe to start from, for a folder of photos or from one of kasoku's"),
    "list": ("list", "models, data sources, techniques, recipes; the settings of each"),
}


def main(argv: Sequence[str] | None = None, imported: Callable[[], object] = lambda: None) -> int:
    """Runs one command; returns its exit code. `imported` is called once the command's packages are imported."""
    words = list(sys.argv[1:] if argv is None else argv)
    parsed = _parse(words)
    # not above: `kasoku --help` takes 0.1 s without torch and 1.2 s with it
    from kasoku.config import trust
    from kasoku.core import process_start, say
    from kasoku.distributed.local_launch import attach_to_launcher

    arguments = arguments_of(parsed, words, attach_to_launcher() or process_start())
    run: Callable[[CommandArguments], int] = getattr(import_module(parsed.module), parsed.function)
    try:
        imported()
        with (
            trust.only(getattr(arguments, "allow", ())),
            only_json(arguments.document) if isinstance(arguments, JsonArguments) and arguments.json else nullcontext(),
        ):
            return run(arguments)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        say(f"interrupted at once; {arguments.if_interrupted}")
        return 130
    except Exception as error:
        line = _refusal(error)
        if line is None:
            raise
        if arguments.traceback:
            traceback.print_exception(error)
        say(line)
        return 2


def _refusal(error: Exception) -> str | None:
    """The line for an error that the user can mend; None for a fault of kasoku's own."""
    import torch

    from kasoku.core import InputError, attributed, one_line

    error = attributed(error)
    if isinstance(error, InputError):
        line = one_line(str(error))  # it may repeat what was given
    elif isinstance(error, OSError):
        line = one_line(f"{error.filename or 'input or output'}: {error.strerror or error}")
    elif isinstance(error, torch.OutOfMemoryError):
        line = f"out of device memory ({str(error).partition('.')[0]}): lower batch"
    else:
        return None
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} ... {line[-_LINE // 2 :]}"


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; imports no command, as most import torch."""
    parser = argparse.ArgumentParser(prog="kasoku", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"kasoku {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for verb, (module, line) in VERBS.items():
        subparser = verbs.add_parser(verb, help=line)
        if words and words[0] == verb:
            subparser.set_defaults(module=f"kasoku.commands.{module}", function="run")
            if verb == "launch":
                places = subparser.add_subparsers(metavar="WHERE", required=True)
                for place, place_line in options.PLACES.items():
                    place_parser = places.add_parser(place, help=place_line)
                    place_parser.set_defaults(function=f"run_{place}")
                    declare(place_parser, getattr(options, f"{place.capitalize()}Arguments"))
            elif verb == "profile" and "--" in words:
                subparser.set_defaults(function="run_script")
                declare(subparser, options.ScriptArguments)
                words = words[: words.index("--")]
            else:
                declare(subparser, getattr(options, f"{module.capitalize()}Arguments"))
    return parser.parse_args(words)
