"""kasoku profile: where the time of a recipe's steps goes, in tables, files and a verdict.

Written into the folder: profile.json (blocks, operators, idle gaps, memory, bounds), ledger.json and timeline.json as a
training writes them (of the profiled steps alone), and trace.json for chrome://tracing or Perfetto. It is no run:
`kasoku report` does not read it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kasoku.core import InputError
from kasoku.core.files import write_atomically

if TYPE_CHECKING:
    from kasoku.report.profiler import StepProfile
    from kasoku.training.run_state import Training

_SHOWN = 12  # rows of a table


def add_parser(commands: Any) -> None:
    """Adds `profile` to the command's parsers."""
    profile = commands.add_parser("profile", help="where the time of a step goes: blocks, operators, gaps, memory")
    profile.add_argument("recipe", type=Path, help="a recipe file (TOML)")
    profile.add_argument("--steps", type=int, default=10, metavar="N", help="steps of each look (default: 10)")
    profile.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    profile.add_argument("--out", type=Path, metavar="DIR", help="the folder for what is found (default: runs/NAME-N)")
    profile.set_defaults(run=_profile, stays="nothing was trained that is kept")


def _profile(arguments: argparse.Namespace) -> int:
    from kasoku.config.recipe import load, own_folders
    from kasoku.training.run_folder import free_folder
    from kasoku.training.trainer import prepare

    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: at least 1 step is wanted")
    sys.path.extend(own_folders(arguments.recipe))
    recipe = load(arguments.recipe, arguments.set)
    folder: Path = arguments.out or free_folder(f"{arguments.recipe.stem}-profile")
    if (folder / "recipe.toml").exists():
        raise InputError(f"{folder}: holds a run, whose ledger would be lost: give another --out")
    training = prepare(recipe)
    print(training.chosen, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    profile, ledger, timeline = look(training, arguments.steps, folder / "trace.json")
    documents = {"profile.json": profile.document(), "ledger.json": ledger, "timeline.json": timeline}
    for name, document in documents.items():
        _put(folder / name, document)
    show(profile, ledger)
    print(f"{folder}: {', '.join(documents)}, trace.json (open it in chrome://tracing or Perfetto)")
    return 0


def look(training: Training, steps: int, trace: Path) -> tuple[StepProfile, dict[str, Any], dict[str, Any]]:
    """Takes steps of a training that was prepared; gives the profile, the ledger's document and the timeline's.

    Args:
        training: what `prepare` made; its model trains a little.
        steps: of each look.
        trace: the file for the Chrome trace.
    """
    from kasoku.core.hardware import cores
    from kasoku.report import Ledger, facts_of
    from kasoku.report.bottleneck import find_bottlenecks
    from kasoku.report.profiler import Profiler

    job, chosen, recipe = training.job, training.chosen, training.recipe
    profiler = Profiler(job, chosen.dtype)
    profiler.warm()
    ledger = Ledger(job.trace, started=job.clock.now())
    plain = profiler.plain(steps)
    images, starved = recipe.batch // recipe.parts(1), ledger.starved()
    facts = facts_of(job, images, threads=chosen.threads, cores=cores(), starved=starved)
    ledger.steps.settle()
    mean_s = ledger.mean_s()
    document, timeline = ledger.document(job.comm, facts)
    profile = profiler.look(steps, plain, trace=trace)
    causes = find_bottlenecks([mean_s], facts, profile.bounds)
    document |= {"bounds": profile.bounds, "verdict": [asdict(cause) for cause in causes]}
    return profile, document, timeline


def show(profile: StepProfile, ledger: dict[str, Any]) -> None:
    """Prints the tables and the verdict."""
    from kasoku.report import StepBottleneck, print_table

    whole_s = sum(ledger["step_s"].values())
    rows = {row: f"{_ms(s)}  {s / max(whole_s, 1e-9):.0%}" for row, s in ledger["step_s"].items() if s > 0}
    print_table("a step, the median", {**rows, "in all": _ms(whole_s)})
    slowest = sorted(profile.blocks, key=lambda block: -(block.forward_s + block.backward_s))[:_SHOWN]
    blocks = {
        block.name: f"forward {_ms(block.forward_s)}, backward {_ms(block.backward_s)}, parameters "
        f"{_mib(block.parameter_bytes)}, kept for backward {_mib(block.saved_bytes)}"
        for block in slowest
    }
    print_table("blocks, the slowest first", blocks)
    operators = {
        one.name: f"{one.calls} calls, host {_ms(one.host_s)}, device {_ms(one.device_s)}"
        for one in profile.operators[:_SHOWN]
    }
    print_table("operators, over the traced steps", operators)
    idle = [one.idle_s / max(one.step_s, 1e-9) for one in profile.iterations]
    peak = max(profile.memory, key=lambda one: one[2])
    bounds = profile.bounds
    needs = (
        f"{_ms(bounds['least_s'])} at least, {bounds['reached']:.0%} of the {_ms(bounds['step_s'])} that a step takes"
    )
    facts = {
        "idle in each iteration": " ".join(f"{share:.0%}" for share in idle),
        "memory, at most": f"{_mib(peak[2])}, {_ms(peak[0])} into a step ({peak[1]})",
        "FLOPs of a step": f"{bounds['flops'] / 1e9:,.3f} G; this device did {bounds['flops_per_s'] / 1e9:,.0f} G/s",
        "bytes of a step": f"{_mib(bounds['bytes'])}; this device moved {_mib(bounds['bytes_per_s'])}/s",
        "bound": needs,
    }
    print_table("the device", facts)
    for cause in ledger["verdict"]:
        print(StepBottleneck(**cause))


def _put(file: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1) + "\n"
    write_atomically(file, lambda part: part.write_text(text))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
