"""`kasoku profile`: where the time of a recipe's steps goes, in tables, files and a verdict.

Written into the folder: profile.json (blocks, operators, idle gaps, memory, bounds), ledger.json and timeline.json as a
training writes them (of the profiled steps alone), and trace.json for chrome://tracing or Perfetto. It is no run:
`kasoku report` does not read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from kasoku.commands.arguments import ProfileArguments
from kasoku.core import InputError
from kasoku.core.files import write_text
from kasoku.report import Ledger, StepBottleneck, facts_of, print_table
from kasoku.report.profiler import Profiler, StepProfile
from kasoku.training.run_folder import create_folder, unused_folder
from kasoku.training.trainer import build

_SHOWN = 12  # rows of a table


def run(arguments: ProfileArguments) -> int:
    """Profiles some steps; returns the exit code."""
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: at least 1 step is wanted")
    recipe = arguments.load()
    folder = unused_folder(arguments.out, arguments.recipe, "profile")
    training = build(recipe)
    create_folder(folder)
    print(training.device_setup.summary, flush=True)
    job, device_setup = training.job, training.device_setup
    profiler = Profiler(job, device_setup.dtype)
    profiler.warm_up()
    ledger = Ledger(job.trace, started=job.clock.now())
    plain = profiler.plain(arguments.steps)
    images, starved = recipe.images_at_once(1), ledger.starved()
    facts = facts_of(job, images, threads=device_setup.threads, starved=starved)
    bounds = profiler.bounds(plain)
    document, timeline = ledger.document(job.comm, facts, bounds)  # of these steps alone
    profile = profiler.look(arguments.steps, plain, bounds, trace=folder / "trace.json")
    documents = {"profile.json": asdict(profile), "ledger.json": document, "timeline.json": timeline}
    for name, content in documents.items():
        write_text(folder / name, json.dumps(content, indent=1) + "\n")
    _show(profile, document["step_s"])
    for cause in document["verdict"]:
        print(StepBottleneck(**cause))
    print(f"{folder}: {', '.join(documents)}, trace.json (open it in chrome://tracing or Perfetto)")
    return 0


def _show(profile: StepProfile, step_s: Mapping[str, float]) -> None:
    """Prints the tables."""
    whole_s = sum(step_s.values())
    rows = {row: f"{_ms(s)}  {s / max(whole_s, 1e-9):.0%}" for row, s in step_s.items() if s > 0}
    print_table("a step, the median", {**rows, "in all": _ms(whole_s)})
    slowest = sorted(profile.blocks, key=lambda block: -(block.forward_s + block.backward_s))[:_SHOWN]
    blocks = {
        block.name: f"forward {_ms(block.forward_s)}, backward {_ms(block.backward_s)}, parameters "
        f"{_mib(block.parameter_bytes)}, kept for backward {_mib(block.saved_bytes)}"
        for block in slowest
    }
    print_table("blocks, the slowest first", blocks)
    operators = {
        operator.name: f"{operator.calls} calls, host {_ms(operator.host_s)}, device {_ms(operator.device_s)}"
        for operator in profile.operators[:_SHOWN]
    }
    print_table("operators, over the traced steps", operators)
    idle = [step.idle_s / max(step.step_s, 1e-9) for step in profile.iterations]
    peak = max(profile.memory, key=lambda sample: sample[2])
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


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
