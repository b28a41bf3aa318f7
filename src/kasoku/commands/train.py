"""`kasoku train`: trains from a recipe or on a folder of photos, alone or on many ranks, one network or an ensemble.

Note: imports inside functions. The trainer takes 0.5 s to import, which overlaps with the rendezvous: `on_ranks`
imports it, and nothing here does before.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kasoku.commands.arguments import TrainArguments
from kasoku.config import trust
from kasoku.config.ranks import check_same, gpus_for, shares_of
from kasoku.config.recipe import Recipe, dumps, load
from kasoku.config.updates import info_of, schedule_warning
from kasoku.core import Comm, CorruptionError, InputError, Solo, say
from kasoku.core.files import json_text
from kasoku.data import Shares
from kasoku.distributed.consensus import assert_same_on_all_ranks, run_on_all_ranks
from kasoku.distributed.election import lost_ranks
from kasoku.distributed.environment import place
from kasoku.distributed.local_launch import on_ranks
from kasoku.distributed.startup import Start
from kasoku.training.run_folder import RunFolder, finished, free_folder, members_of, resumed_recipe, shares_in, upload

if TYPE_CHECKING:
    from kasoku.training.auto_batch import TunedRecipe
    from kasoku.training.run_state import Training

DIVERGED, CORRUPTED, STOPPED = 3, 5, 75  # exit codes


def run(arguments: TrainArguments) -> int:
    """Trains; returns the exit code."""
    folder = arguments.resume or (arguments.out if arguments.go_on else None)
    if folder and place().size > 1 and lost_ranks(folder):  # nobody waits for this rank if the others have ended
        trust.allow_beside(arguments.recipe)
        recipe = resumed_recipe(folder, arguments.set if arguments.resume else ())
        if over := finished(folder, recipe):
            say(f"{folder}: {over}")
            return _end(Solo(), None, folder, recipe) if place().rank == 0 else 0
    train, count = partial(_train_or_diverge, arguments), partial(_gpus, arguments)
    packages = partial(import_module, "kasoku.training.trainer")
    return on_ranks(train, arguments.words, started=arguments.started, count=count, packages=packages, folder=folder)


def _check(arguments: TrainArguments) -> None:
    a = arguments
    sources = [name for name, value in (("recipe", a.recipe), ("resume", a.resume), ("data", a.data)) if value]
    given = " and ".join(sources) or "nothing"
    rules = {  # message: whether the rule is broken
        f"{given} given: one of RECIPE, --resume DIR, --data DIR is wanted": len(sources) != 1,
        "--continue: goes with --out DIR, where the run is or will be": a.go_on and (a.resume or not a.out),
        "--out beside --resume: a resumed run stays in its folder; remove --out": a.resume and a.out,
        "--weights and --freeze go with --data; in a recipe use the technique kasoku.models.Pretrained": not a.data
        and (a.weights or a.freeze),
        "--vary without --members: a value for each member is wanted; give --members K": a.vary and not a.members,
        "--members beside --resume: the folder knows its members; leave --members out": a.members and a.resume,
        "--print of an ensemble: one recipe is printed; leave --members out, or give a member's folder": a.show
        and (a.members or (a.resume and members_of(a.resume))),
        "--freeze without --weights: the frozen blocks would keep their random weights; give both": a.freeze
        and not a.weights,
    }
    for message, broken in rules.items():
        if broken:
            raise InputError(message)


def _gpus(arguments: TrainArguments) -> int:
    """The number of processes to train on this machine."""
    if torch.cuda.device_count() < 2 or arguments.dry_run or arguments.show:
        return 1
    _check(arguments)
    recipe, folder = _recipe_and_folder(arguments)
    return gpus_for(recipe, arguments.members or len(members_of(folder)) or 1)


def _has_run(arguments: TrainArguments) -> bool:
    """Whether --out holds a run to go on with. Raises InputError if it has another number of members.

    If some of its members were not begun, none has trained, so all are begun anew.
    """
    out, wanted = arguments.out or Path(), arguments.members
    members = members_of(out)
    if not members and not (out / "recipe.toml").is_file():
        return False
    trained = any([*out.glob("member-*/checkpoints/step-*"), *out.glob("member-*/result.json")])
    if members and len(members) < wanted == len(members_of(out, unbegun=True)) and not trained:
        for member in members:
            with closing(RunFolder(member, resume=True)):  # locked
                (member / "metrics.jsonl").unlink(missing_ok=True)
                (member / "recipe.toml").unlink()
        return False
    if len(members) != wanted:
        got = f"a run of {len(members)} members, and --members {wanted} is given"
        raise InputError(f"{out}: {got}; go on with --resume {out}")
    return True


def _recipe_and_folder(arguments: TrainArguments) -> tuple[Recipe, Path]:
    """The recipe and the run folder; without --out and --resume a new one."""
    if arguments.resume:
        run = next(iter(members_of(arguments.resume)), arguments.resume)
        return resumed_recipe(run, arguments.set), arguments.resume
    trust.allow_beside(arguments.recipe)
    source = arguments.recipe or arguments.data or Path()
    name = re.sub(r"[*?\[\]]", "", source.resolve().stem) or "photos"  # of a pattern
    recipe, out = _load(arguments), arguments.out or free_folder(name)
    root, writes = Path(str(recipe.data.keys.get("root"))), not (arguments.show or arguments.dry_run)
    flat = recipe.data.use == "kasoku.data.folder" and not (root / "train").is_dir()  # each folder is a class
    if arguments.data and flat and writes and not (out / "recipe.toml").exists() and out.resolve().is_relative_to(root):
        raise InputError(f"{out}: lies among the photos, as if it were a class: give --out, a folder elsewhere")
    return recipe, out


def _load(arguments: TrainArguments, *more: str) -> Recipe:
    settings = [*arguments.set, *more]
    if arguments.recipe:
        return load(arguments.recipe, settings)
    from kasoku.config.from_folder import recipe_for

    return recipe_for(arguments.data or Path(), arguments.weights, freeze=arguments.freeze, settings=settings)


def _train_or_diverge(arguments: TrainArguments, comm: Comm, start: Start) -> int:
    from kasoku.training.run_state import DivergedError

    try:
        return _train_on_rank(arguments, comm, start)
    except (DivergedError, CorruptionError) as error:
        say(str(error), comm.rank)
        return DIVERGED if isinstance(error, DivergedError) else CORRUPTED


def _train_on_rank(arguments: TrainArguments, comm: Comm, start: Start) -> int:
    """Trains on one of the ranks, or as the only one."""
    from kasoku.data.datasets.folder import scanned_once
    from kasoku.report import dry_run, print_table
    from kasoku.training import elastic, trainer

    run_on_all_ranks(comm, lambda: _check(arguments))
    has_run = partial(_has_run, arguments) if comm.rank == 0 else bool
    if arguments.go_on and comm.broadcast_object(run_on_all_ranks(comm, has_run)):
        trust.allow_beside(arguments.recipe)  # the run's recipe was made from this one
        arguments = replace(arguments, resume=arguments.out, out=None, set=(), members=0, vary=())
    read = partial(_recipe_and_folder, arguments)
    reading = partial(scanned_once, comm, read) if arguments.data else read
    recipe, folder = start.do("recipe", lambda: run_on_all_ranks(comm, reading))
    folder = comm.broadcast_object(folder)
    check_same(recipe, comm)
    resume = arguments.resume is not None
    if arguments.members or (resume and members_of(folder)):
        return _train_members(arguments, folder, comm)
    if arguments.dry_run or arguments.show:
        return _preview(arguments, recipe, comm, start)
    if resume and (over := run_on_all_ranks(comm, lambda: finished(folder, recipe))):
        say(f"{folder}: {over}", comm.rank)
        return _end(comm, None, folder, recipe)
    announced = arguments.data and not arguments.quiet and not resume
    quiet = arguments.quiet  # of the rank 0 at the end
    arguments = replace(arguments, quiet=quiet or comm.rank > 0)
    tuned = start.do("tuning", partial(_tune, arguments, recipe, comm)) if recipe.auto_batch else None
    recipe, dataset = (tuned.recipe, tuned.dataset) if tuned else (recipe, None)
    # before the folder is written: a start that fails leaves nothing behind
    shares = shares_of(recipe, tuned.result.speeds) if tuned else ()
    if resume and not tuned:
        shares = shares_in(folder, comm, recipe.batch)
    build = partial(trainer.build, recipe, comm, dataset=dataset, start=start, shares=Shares(shares))
    training = run_on_all_ranks(comm, build)
    rows = dry_run.photo_rows(recipe, training.dataset, training.job.model) if announced else {}
    rows |= start.do("estimate", partial(_time_row, training)) if announced else {}
    with _advised(folder):
        begin = partial(_begin, arguments, training, tuned, rows)
        result = elastic.fit_in(folder, training, begin, started=arguments.started, resume=resume, quiet=quiet)
    if comm.rank == 0 and not result.stopped and not quiet:
        print_table("", result.rows(folder))
    return _end(comm, result.stopped, folder, recipe)


def _preview(arguments: TrainArguments, recipe: Recipe, comm: Comm, start: Start) -> int:
    """Prints the recipe, or what it would do; of a folder of photos also how long that would take."""
    from kasoku.report import dry_run, print_table
    from kasoku.training import trainer

    if arguments.show and recipe.auto_batch and not recipe.reference_batch:
        raise InputError('--print: batch = "auto" of a recipe with points has no settings yet: give --set batch=N')
    shown: dict[str, Any] = {}
    if arguments.data and recipe.auto_batch and not arguments.show:
        say("the time is known once the batch is tuned; --set batch=N shows the choices for N images", comm.rank)
    elif arguments.data and not arguments.show:
        training = run_on_all_ranks(comm, lambda: trainer.build(recipe, comm, start=start))
        say(dry_run.remark(recipe, training.dataset, training.outputs), comm.rank)
        rows = dry_run.photo_rows(recipe, training.dataset, training.job.model)
        shown = {"data": info_of(training.dataset), "model": training.job.model, "first": rows}
    if comm.rank == 0 and arguments.show:
        print(dumps(recipe), end="")
    elif comm.rank == 0:
        say(schedule_warning(recipe))
        dry_run.preview(recipe, **shown)
    if shown and (row := _time_row(training)) and comm.rank == 0:
        print_table("", row)
    return 0


def _tune(arguments: TrainArguments, recipe: Recipe, comm: Comm) -> "TunedRecipe":
    """The recipe at the batch that tuning chooses; the same on all ranks."""
    from kasoku.training import auto_batch

    def check() -> None:
        if arguments.out and (taken := RunFolder.why_taken(arguments.out)):
            raise InputError(taken)

    def at(batch: int) -> Recipe:
        if arguments.data:  # nothing else follows from the batch, so the folder is not listed again
            return replace(recipe, batch=batch, origin="")
        return _load(arguments, f"batch={batch}")

    run_on_all_ranks(comm, check)
    tuned = auto_batch.tune(recipe, at, comm=comm)
    auto_batch.free_memory(recipe)
    if not arguments.quiet:
        auto_batch.show(tuned)
    return tuned


def _time_row(training: "Training") -> dict[str, str]:
    """How long a training takes. Collective; computes a few steps."""
    from kasoku.training.auto_batch import estimated_s

    try:
        seconds = estimated_s(training)
    except InputError as error:
        if not error.memory_short:  # on all ranks: for a copy beside the job
            raise
        return {}
    unit, unit_s = next((unit for unit in (("s", 1), ("min", 60)) if seconds < 120 * unit[1]), ("h", 3600))
    return {"time": f"about {max(1, round(seconds / unit_s))} {unit} on this machine, from a few steps"}


def _begin(
    arguments: TrainArguments, training: "Training", tuned: "TunedRecipe | None", rows: dict[str, str], run: RunFolder
) -> None:
    """Writes the files of a new run, and prints what is about to happen."""
    from kasoku.report.dry_run import preview, remark

    recipe, ranks = training.recipe, training.job.comm.size
    say(schedule_warning(recipe))
    if not arguments.resume:
        say(remark(recipe, training.dataset, training.outputs))
    training.describe(run, None if arguments.resume else trust.import_folders(arguments.recipe))
    if tuned:
        run.write("tuning.json", json_text(tuned.result.as_json()))
    if not arguments.quiet:
        each = f"{ranks} ranks, each on " if ranks > 1 else ""
        print(f"{each}{training.device_setup.summary}\n{training.total_steps} steps, run folder {run.path}", flush=True)
    derived = rows or recipe.origin or recipe.rate_scale != 1 or recipe.norm_batch
    if derived and not arguments.quiet:
        preview(recipe, data=info_of(training.dataset), model=training.job.model, first=rows)


def _train_members(arguments: TrainArguments, folder: Path, comm: Comm) -> int:
    from kasoku.report.dry_run import preview
    from kasoku.training import ensemble

    def members() -> tuple[list[Recipe], list[Path], list[str]]:
        if arguments.resume:
            paths, wanted = members_of(folder), len(members_of(folder, unbegun=True))
            if len(paths) < wanted:
                got = f"{folder}: {wanted} members, of which {len(paths)} were begun"
                raise InputError(f"{got}: start all of them again, with --continue --members {wanted} --out {folder}")
            recipes = [resumed_recipe(path, arguments.set) for path in paths]
            return recipes, paths, [finished(path, recipe) for path, recipe in zip(paths, recipes, strict=True)]
        recipes = ensemble.varied(lambda more: _load(arguments, *more), arguments.members, arguments.vary)
        return recipes, [folder / f"member-{i + 1}" for i in range(len(recipes))], [""]

    recipes, paths, over = run_on_all_ranks(comm, members)
    assert_same_on_all_ranks(comm, {"member": [dumps(recipe) for recipe in recipes]})
    if arguments.dry_run:
        for recipe in recipes if comm.rank == 0 else ():
            preview(recipe)
        return 0
    if all(over):
        say(f"{folder}: {len(paths)} members, the first {over[0]}", comm.rank)
        return _end(comm, None, folder, recipes[0])
    own = None if arguments.resume else trust.import_folders(arguments.recipe)
    say(schedule_warning(recipes[0]), comm.rank)
    with _advised(folder):
        quiet = arguments.quiet
        stopped = ensemble.train(recipes, paths, comm, started=arguments.started, own_modules=own, quiet=quiet)
    if not stopped:
        ensemble.evaluate(paths, comm, quiet=arguments.quiet)
    return _end(comm, stopped, folder, recipes[0])


def _end(comm: Comm, stopped: str | None, folder: Path, recipe: Recipe) -> int:
    """Uploads the results, or says how a training that was stopped goes on; returns the exit code."""
    with _advised(folder):
        upload(comm, folder, "" if stopped else recipe.save.upload)
    if stopped:
        say(f"stopped by {stopped}; {_go_on(folder)}", comm.rank)
    run_on_all_ranks(comm, lambda: None)  # a launcher ends all ranks once one ends: rank 0 prints first
    return STOPPED if stopped else 0


@contextmanager
def _advised(folder: Path) -> Iterator[None]:
    """Adds the resume command to an InputError if there is a checkpoint."""
    try:
        yield
    except InputError as error:
        if not error.resumable:
            raise
        raise type(error)(f"{error}; {_go_on(folder)}") from error


def _go_on(folder: Path) -> str:
    return "go on with: " + shlex.join(["kasoku", "train", "--resume", str(folder), *trust.allow_options()])
