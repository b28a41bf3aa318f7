"""`kasoku profile`: where the time of a step of a recipe or a script goes, in tables, files and a verdict.

Written into the folder: profile.json (blocks, operators, idle gaps, memory, bounds; of rank 0, with a line for each
rank), profile-1.json, ... of the other ranks, ledger.json and timeline.json as a training writes them (of the profiled
steps alone), and rank 0's trace.json for chrome://tracing or Perfetto. A script has no blocks, operators and trace.
"""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kasoku.commands.arguments import ProfileArguments, ScriptArguments
from kasoku.config.ranks import check_same, gpus_for, is_asynchronous
from kasoku.config.recipe import Recipe
from kasoku.core import Comm, InputError, say
from kasoku.core.files import read_json
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.local_launch import on_ranks, run_processes
from kasoku.distributed.startup import Start
from kasoku.report import Ledger, facts_of, script_timer
from kasoku.report.profile_tables import report_ranks, write_profile
from kasoku.report.profiler import Profiler
from kasoku.training.run_folder import output_folder, unused_folder
from kasoku.training.trainer import build


def run(arguments: ProfileArguments) -> int:
    """Profiles some steps; returns the exit code."""
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: at least 1 step is wanted")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise InputError(f"--ranks {arguments.ranks}: at least 1 process is wanted")
    run_rank, count = partial(_profile, arguments), lambda: arguments.ranks or gpus_for(arguments.load())
    return on_ranks(run_rank, arguments.words, started=arguments.started, count=count)


def run_script(arguments: ScriptArguments) -> int:
    """Runs a script and profiles it; returns its exit code, or 2 if it made no step. Prints to standard error."""
    command = arguments.words[arguments.words.index("--") + 1 :]
    if not command:
        raise InputError("kasoku profile --: a command is wanted, as kasoku profile -- python train.py")
    script = next((word for word in command if word.endswith(".py")), command[-1])
    folder = output_folder(arguments.out, Path(script), "profile")
    path = [str(Path(script_timer.__file__).parent / "at_start"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with TemporaryDirectory() as written:
        code = run_processes(command, [{"KASOKU_PROFILE": written, "PYTHONPATH": os.pathsep.join(path)}])
        results = sorted(map(read_json, Path(written).glob("*.json")), key=lambda each: (each["rank"], each["steps"]))
    ranks = [*{each["rank"]: each for each in results}.values()]  # of each rank the process with the most steps
    if not ranks:
        say(f"profile: no Python process of {script} with kasoku ended after 4 or more steps of a torch.optim")
        return code or 2
    if len(ranks) < ranks[0]["ranks"]:
        say(f"profile: only {len(ranks)} of {ranks[0]['ranks']} ranks ended on this machine, and not by a signal")
    with redirect_stdout(sys.stderr):
        report_ranks(ranks, folder)
    return code


def _recipe(arguments: ProfileArguments, ranks: int) -> Recipe:
    recipe = arguments.load()
    if is_asynchronous(recipe, ranks):
        got = f"kasoku.distributed.Asynchronous on {ranks} ranks: no step is one of all ranks"
        raise InputError(f"{got}; leave it out, or give --ranks 1")
    return recipe


def _profile(arguments: ProfileArguments, comm: Comm, start: Start) -> int:
    recipe = run_on_all_ranks(comm, lambda: _recipe(arguments, comm.size))
    check_same(recipe, comm)
    run_on_all_ranks(comm, lambda: unused_folder(arguments.out, arguments.recipe, "profile"))  # refused before minutes
    training = run_on_all_ranks(comm, lambda: build(recipe, comm, start=start))
    if comm.rank == 0:
        print(training.device_setup.summary, flush=True)
    create = partial(output_folder, arguments.out, arguments.recipe, "profile")
    folder = run_on_all_ranks(comm, lambda: create() if comm.rank == 0 else Path())
    job, device_setup = training.job, training.device_setup
    profiler = Profiler(job, device_setup.dtype)
    profiler.warm_up()
    facts = facts_of(job, recipe.images_at_once(comm.size), threads=device_setup.threads)  # its time is in no step
    ledger = Ledger(job.trace, started=job.clock.now())
    plain = profiler.plain(arguments.steps)
    facts = replace(facts, starved=round(ledger.starved(), 4))
    bounds = profiler.bounds(plain)
    document, timeline = ledger.document(comm, facts, bounds)  # of these steps alone
    means = ledger.mean_s()
    profile = profiler.look(arguments.steps, plain, bounds, trace=folder / "trace.json" if comm.rank == 0 else None)
    job.drain()
    profiles = comm.gather_objects((profile, means, facts))

    def report() -> None:
        first = write_profile(folder, profiles, document, timeline)
        arguments.document.update(folder=str(folder), profile=first, ledger=document)

    run_on_all_ranks(comm, lambda: report() if comm.rank == 0 else None)
    return 0
