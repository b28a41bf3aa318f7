"""`kasoku profile`: where the time of the steps of a recipe or a script goes, in tables, files and a verdict."""

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kasoku.commands.arguments import ProfileArguments, ScriptArguments
from kasoku.config.ranks import check_same, gpus_for, is_asynchronous
from kasoku.config.recipe import Recipe
from kasoku.core import Comm, InputError, say
from kasoku.core.files import json_text, read_json, write_text
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.local_launch import on_ranks, run_processes
from kasoku.distributed.startup import Start
from kasoku.report import Ledger, StepBottleneck, facts_of, print_table
from kasoku.report.bottleneck import StepFacts, find_bottlenecks
from kasoku.report.profile_tables import ms, profile_tables
from kasoku.report.profiler import Profiler, StepProfile
from kasoku.report.script_timer import script_documents
from kasoku.training.run_folder import output_folder
from kasoku.training.trainer import build

_PLUGIN = {  # of torch, which calls the function as the last act of its import, and fails if that fails
    "kasoku_profile-0.dist-info/entry_points.txt": "[torch.backends]\nkasoku_profile = kasoku_profile:follow\n",
    "kasoku_profile-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kasoku-profile\nVersion: 0\n",
    "kasoku_profile.py": "from contextlib import suppress\nfollow = lambda: None\nwith suppress(ImportError):\n"
    "    from kasoku.report.script_timer import follow_script as follow\n",  # a Python of COMMAND may have no kasoku
}
Profiled = tuple[int, StepProfile, Mapping[str, float], StepFacts]  # of a rank, with its number and its mean step


def run(arguments: ProfileArguments) -> int:
    """Profiles some steps; returns the exit code."""
    for name, number, one in (("steps", arguments.steps, "step"), ("ranks", arguments.ranks, "process")):
        if number is not None and number < 1:
            raise InputError(f"--{name} {number}: at least 1 {one} is wanted")
    run_rank, count = partial(_profile, arguments), lambda: arguments.ranks or gpus_for(arguments.load())
    return on_ranks(run_rank, arguments.words, started=arguments.started, count=count)


def run_script(arguments: ScriptArguments) -> int:
    """Runs a script and profiles it; returns its exit code, or 2 if it made no step. Prints to standard error."""
    command = arguments.words[arguments.words.index("--") + 1 :]
    if not command:
        raise InputError("kasoku profile --: a command is wanted, as kasoku profile -- python train.py")
    script = next((word for word in command if word.endswith(".py")), command[-1])
    folder = output_folder(arguments.out, Path(script), "profile")
    with TemporaryDirectory() as home:
        (Path(home) / "kasoku_profile-0.dist-info").mkdir()
        for name, text in _PLUGIN.items():
            write_text(Path(home) / name, text)
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        code = run_processes(command, [{"KASOKU_PROFILE": home, "PYTHONPATH": path}])
        results = sorted(map(read_json, Path(home).glob("*.json")), key=lambda each: (each["rank"], each["steps"]))
    ranks = [*{each["rank"]: each for each in results}.values()]  # of each rank the process with the most steps
    if not ranks:
        say(f"profile: no Python process of {script} with kasoku ended after 4 or more steps of a torch.optim")
        return code or 2
    if len(ranks) < ranks[0]["ranks"]:
        say(f"profile: only {len(ranks)} of {ranks[0]['ranks']} ranks ended on this machine, and not by a signal")
    with redirect_stdout(sys.stderr):
        report_script(folder, ranks)
    return code


def report_script(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Writes and prints the profile of a script, of what `ScriptTimer.finish` gave on each rank."""
    empty = StepProfile([], [], [], {})
    profiles = [(rank["rank"], empty, rank["mean_s"], StepFacts(**rank["facts"])) for rank in ranks]
    _report(folder, profiles, *script_documents(ranks))


def _recipe(arguments: ProfileArguments, ranks: int) -> Recipe:
    recipe = arguments.load()
    if is_asynchronous(recipe, ranks):
        got = f"kasoku.distributed.Asynchronous on {ranks} ranks: no step is one of all ranks"
        raise InputError(f"{got}; leave it out, or give --ranks 1")
    return recipe


def _profile(arguments: ProfileArguments, comm: Comm, start: Start) -> int:
    recipe = run_on_all_ranks(comm, lambda: _recipe(arguments, comm.size))
    check_same(recipe, comm)
    create = partial(output_folder, arguments.out, arguments.recipe, "profile")
    run_on_all_ranks(comm, lambda: create(create=False))  # refused before minutes
    training = run_on_all_ranks(comm, lambda: build(recipe, comm, start=start))
    if comm.rank == 0:
        print(training.device_setup.summary, flush=True)
    folder = run_on_all_ranks(comm, lambda: create() if comm.rank == 0 else Path())
    job, device_setup = training.job, training.device_setup
    profiler = Profiler(job, device_setup.dtype)
    profiler.warm_up()
    facts = facts_of(job, recipe.images_at_once(comm.size), threads=device_setup.threads)  # its time is in no step
    ledger = Ledger(job.trace, started=job.clock.now())
    plain = profiler.plain(arguments.steps)
    facts = replace(facts, starved=round(ledger.starved(), 4))
    document, timeline = ledger.document(comm, facts)  # of these steps alone
    means = ledger.mean_s()
    profile = profiler.look(arguments.steps, plain, trace=folder / "trace.json" if comm.rank == 0 else None)
    job.drain()
    profiles = comm.gather_objects((comm.rank, profile, means, facts))
    report = partial(_report, folder, profiles, document, timeline)
    arguments.document.update(run_on_all_ranks(comm, lambda: report() if comm.rank == 0 else {}))
    return 0


def _report(folder: Path, profiles: Sequence[Profiled], ledger: Mapping[str, Any], timeline: object) -> dict[str, Any]:
    """Writes the files and prints the tables; returns what --json prints."""
    first, *others = [asdict(each) for _, each, _, _ in profiles]
    first["ranks"] = _by_rank(profiles)
    documents = {"profile.json": first, "ledger.json": ledger, "timeline.json": timeline}
    documents |= {f"profile-{rank}.json": other for (rank, *_), other in zip(profiles[1:], others, strict=True)}
    for name, content in documents.items():
        write_text(folder / name, json_text(content))
    step_s: dict[str, float] = ledger["step_s"]
    whole_s = sum(step_s.values())
    rows = {row: f"{ms(s)} ms  {s / max(whole_s, 1e-9):.0%}" for row, s in step_s.items() if s > 0}
    print_table("a step, the median", {**rows, "in all": f"{ms(whole_s)} ms"})
    for title, head, cells in profile_tables(first):
        print_table(title, cells, head)
    print(*(StepBottleneck(**cause) for cause in ledger["verdict"]), sep="\n")
    traced = ", trace.json (open it in chrome://tracing or Perfetto)" if first["blocks"] else ""
    print(f"{folder}: {', '.join(documents)}{traced}")
    return {"folder": str(folder), "profile": first, "ledger": ledger}


def _by_rank(profiles: Sequence[Profiled]) -> list[dict[str, Any]]:
    """What each rank does in the mean step, in rank order: seconds, the share that its device is idle, the verdict."""
    transfer_s = min(step["exposed"] for _, _, step, _ in profiles)  # longer waits are for other ranks
    return [
        {
            "rank": rank,
            "step_s": sum(step.values()),
            "compute_s": sum(step[row] for row in ("forward", "backward", "update")),
            **{f"{row}_s": step[row] for row in ("forward", "backward", "update")},
            "input_s": step["input"],
            "wait_s": step["exposed"],
            "idle": statistics.fmean(
                [each.idle_s / max(each.step_s, 1e-9) for each in profile.iterations]
                or [sum(step[row] for row in ("input", "exposed", "other")) / sum(step.values())]
            ),
            "bottleneck": find_bottlenecks([step], facts, transfer_s=transfer_s)[0].cause,
            "iterations": [asdict(each) for each in profile.iterations],
        }
        for rank, profile, step, facts in profiles
    ]
