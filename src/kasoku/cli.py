"""The command: kasoku train | launch | tune | search | profile | simulate | plan | report.

Runs put to use: eval | predict | export. Data: data | pack. What there is: list.

Exit codes: 0 done, 1 a fault of kasoku's own, 2 something given cannot be used, 3 the training diverged,
4 another rank died or hangs, 75 stopped by SIGINT or SIGTERM with a checkpoint written (go on with --resume),
130 interrupted at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kasoku.config.recipe import Recipe, own_folders
from kasoku.core import Comm, InputError, process_start
from kasoku.training.run_folder import RunFolder

if TYPE_CHECKING:
    from kasoku.distributed.startup import Start
    from kasoku.training.auto_batch import TunedRecipe
    from kasoku.training.run_state import Training

STOPPED = 75
CHANGEABLE = ("epochs", "schedule.", "evaluate.", "save.", "device.", "data.root")  # of a run that is resumed


def main(argv: Sequence[str] | None = None, begins: Callable[[], object] = lambda: None) -> int:
    """Runs one command; returns its exit code. `begins` is called when what all commands need is imported."""
    from kasoku.distributed.local_launch import typed_at

    given = list(sys.argv[1:] if argv is None else argv)
    started = typed_at() or process_start()
    before = argparse.Namespace(started=started, given=given, stays="a checkpoint written before stands")
    arguments = _parser().parse_args(given, before)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        begins()
        return run(arguments)
    except InputError as error:
        print(f"kasoku: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"kasoku: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"kasoku: out of device memory ({str(error).partition('.')[0]}): lower batch", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"kasoku: interrupted at once; {arguments.stays}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from kasoku.commands import launch
    from kasoku.commands import plan as planning
    from kasoku.commands import profile as profiling
    from kasoku.commands import report as reporting
    from kasoku.commands import search as searching
    from kasoku.commands import simulate as simulating
    from kasoku.commands import tune as tuning

    parser = argparse.ArgumentParser(prog="kasoku", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train from a recipe, or on a folder of photos")
    train.add_argument("recipe", nargs="?", type=Path, help="a recipe file (TOML)")
    train.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of the recipe"
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: runs/NAME-N)")
    train.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR")
    train.add_argument(
        "--continue", dest="go_on", action="store_true", help="go on with the run in --out, as it is, if any"
    )
    train.add_argument("--data", type=Path, metavar="DIR", help="without a recipe: a folder with one folder a class")
    train.add_argument("--weights", type=Path, metavar="FILE", help="with --data: published weights to start from")
    train.add_argument("--freeze", type=int, default=0, metavar="K", help="with --weights: leave the first K blocks")
    train.add_argument("--members", type=int, default=0, metavar="K", help="train K members of an ensemble")
    train.add_argument(
        "--vary", action="append", default=[], metavar="PATH=V1,V2,...", help="with --members: a value for each"
    )
    train.add_argument("--dry-run", action="store_true", help="only print what the recipe would do")
    train.add_argument("--plot", type=Path, metavar="FILE", help="draw rate, weight decay, momentum over epochs (HTML)")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.set_defaults(run=_train)
    for beside in (launch, tuning, searching, profiling, simulating, planning, reporting):
        beside.add_parser(commands)
    _add_use(commands)
    _add_data(commands)
    commands.add_parser("list", help="models, data sources, techniques, recipes").set_defaults(run=_list)
    return parser


def _add_use(commands: Any) -> None:
    evaluate = commands.add_parser("eval", help="top-1 and top-5 of runs, alone and as an ensemble")
    evaluate.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    evaluate.add_argument(
        "--data", type=Path, metavar="DIR", help="other test images: a folder with one folder a class"
    )
    evaluate.set_defaults(run=_eval)

    predict = commands.add_parser("predict", help="the five likeliest classes of images, as CSV")
    predict.add_argument("trained", type=Path, metavar="RUN")
    predict.add_argument("images", nargs="+", type=Path, metavar="IMAGE|DIR")
    predict.set_defaults(run=_predict)

    export = commands.add_parser("export", help="write a trained network for other programs")
    export.add_argument("trained", type=Path, metavar="RUN")
    export.add_argument("--format", choices=("safetensors", "torch-export", "onnx"), required=True)
    export.add_argument("--out", type=Path, metavar="FILE", help="where to (default: in the run folder)")
    export.set_defaults(run=_export)


def _add_data(commands: Any) -> None:
    data = commands.add_parser("data", help="download the official files of a data set")
    data.add_argument("name", metavar="NAME", help="cifar10, cifar100, mnist, fashion-mnist or imagenette")
    data.add_argument("--to", required=True, metavar="DIR", help="the folder for the data")
    data.add_argument("--source", default="", metavar="URL", help="another address of the same files")
    data.add_argument("--quiet", action="store_true", help="no progress bar")
    data.set_defaults(run=_data, stays="what was downloaded so far stays, and the same command goes on there")

    pack = commands.add_parser("pack", help="pack images into tar shards once, to be read faster ever after")
    pack.add_argument("source", nargs="?", metavar="SRC", help="a folder of images, or tar shards; or their address")
    pack.add_argument("target", nargs="?", metavar="DST", help="the folder for the pack")
    pack.add_argument("--side", type=int, default=256, help="shorter side in pixels; 0: as it is (default: 256)")
    pack.add_argument("--format", choices=("jpeg", "raw"), default="jpeg", help="raw: pixels (default: jpeg)")
    pack.add_argument("--quality", type=int, default=90, help="of JPEG (default: 90)")
    pack.add_argument("--workers", type=int, default=0, help="threads (default: one a core)")
    pack.add_argument("--verify", metavar="DIR", help="check that a pack is whole, by its checksums")
    pack.add_argument("--quiet", action="store_true", help="no progress bar")
    pack.set_defaults(run=_pack, stays="the shards that are whole stay, and the same command goes on there")


def _train(arguments: argparse.Namespace) -> int:
    from kasoku.distributed.local_launch import on_ranks

    return on_ranks(arguments, partial(_train_or_diverge, arguments), count=partial(_gpus, arguments))


def _train_or_diverge(arguments: argparse.Namespace, comm: Comm, start: Start) -> int:
    from kasoku.training.run_state import (
        DivergedError,  # after the ranks began to meet, as all that takes time to import
    )

    try:
        return _train_on(arguments, comm, start)
    except DivergedError as error:
        if comm.rank == 0:
            print(f"kasoku: {error}", file=sys.stderr)
        return 3


def _gpus(arguments: argparse.Namespace) -> int:
    from kasoku.commands.launch import gpus_for

    if torch.cuda.device_count() < 2 or arguments.members or arguments.dry_run:
        return 1
    _check_train(arguments)
    recipe, folder = _recipe_and_folder(arguments)
    of_members = arguments.resume and not (folder / "recipe.toml").is_file()
    return 1 if of_members else gpus_for(recipe)


def _train_on(arguments: argparse.Namespace, comm: Comm, start: Start) -> int:
    from kasoku.commands.tune import before_training
    from kasoku.config.recipe import dumps
    from kasoku.config.sharing import shares_of
    from kasoku.data.datasets.folder_index import scanned_once
    from kasoku.distributed.consensus import assert_same_on_all_ranks, run_on_all_ranks, version_facts
    from kasoku.report import print_table
    from kasoku.training.run_folder import run_folder, shares_in
    from kasoku.training.trainer import fit, prepare

    run_on_all_ranks(comm, lambda: _check_train(arguments))
    if arguments.go_on and comm.broadcast_object((arguments.out / "recipe.toml").is_file()):
        arguments.resume, arguments.out, arguments.set = arguments.out, None, []
    found = partial(_recipe_and_folder, arguments)  # with --data it looks into the folder
    recipe, folder = run_on_all_ranks(comm, lambda: scanned_once(comm, found) if arguments.data else found())
    if comm.size > 1:  # one rank alone need not read the package's source
        run_on_all_ranks(comm, lambda: assert_same_on_all_ranks(comm, {"recipe": dumps(recipe), **version_facts()}))
    resume = arguments.resume is not None
    if arguments.members or (resume and not (folder / "recipe.toml").is_file()):
        return _train_members(arguments, folder, comm)
    if arguments.dry_run:
        if comm.rank == 0:
            _look_ahead(recipe, arguments.plot)
        return 0
    quiet = arguments.quiet = arguments.quiet or comm.rank > 0
    tuning = partial(before_training, arguments, recipe, again=_load, comm=comm)
    tuned = start.do("tuning", tuning) if recipe.auto_batch else None
    recipe, dataset = (tuned.recipe, tuned.dataset) if tuned else (recipe, None)
    # before the folder: a start that fails leaves nothing behind
    kept = shares_in(folder, comm, recipe.batch) if resume and not recipe.device.graphs else ()
    shares = shares_of(recipe, tuned.found.speeds) if tuned else kept
    training = run_on_all_ranks(comm, lambda: prepare(recipe, comm, dataset=dataset, start=start, shares=shares))
    with run_folder(comm, folder, resume=resume) as run:
        run_on_all_ranks(comm, lambda: _begin(arguments, training, run, tuned) if run else None)
        result = fit(training, run, started=arguments.started, resume=resume, quiet=quiet)
    if comm.rank == 0 and not result.stopped and not quiet:
        print_table("", result.rows(folder))
    if result.stopped and comm.rank == 0:
        _say_stopped(result.stopped, folder)
    run_on_all_ranks(comm, lambda: None)  # nobody ends before rank 0 has spoken: a launcher ends all when one does
    return STOPPED if result.stopped else 0


def _begin(arguments: argparse.Namespace, training: Training, run: RunFolder, tuned: TunedRecipe | None) -> None:
    """Writes and says what is about to happen."""
    from kasoku.config.recipe import dumps
    from kasoku.training.run_folder import describe, keep_shares

    recipe, ranks = training.recipe, training.job.comm.size
    if not arguments.resume:
        describe(run, training, own_folders(arguments.recipe))
        if tuned:
            tuned.found.save(run.path / "tuning.json")
        keep_shares(run, training.job)
    elif arguments.set:
        run.write("recipe.toml", dumps(recipe))
    if not arguments.quiet:
        each = f"{ranks} ranks, each on " if ranks > 1 else ""
        print(f"{each}{training.chosen}\n{training.total_steps} steps, run folder {run.path}", flush=True)
    unlike = getattr(recipe.schedule, "epochs", recipe.epochs) != recipe.epochs
    derived = recipe.origin or recipe.rate_scale != 1 or recipe.norm_batch or unlike
    if arguments.plot or (derived and not arguments.quiet):
        _look_ahead(recipe, arguments.plot, training, show=not arguments.quiet)


def _train_members(arguments: argparse.Namespace, folder: Path, comm: Comm) -> int:
    from kasoku.config import recipe as recipes
    from kasoku.distributed.consensus import run_on_all_ranks
    from kasoku.training import ensemble as members
    from kasoku.training.run_folder import members_of
    from kasoku.training.trained import evaluate_runs

    run_on_all_ranks(comm, lambda: _check_members(comm.size))
    if arguments.resume:
        paths = members_of(folder)
        each = [recipes.load(path / "recipe.toml", arguments.set) for path in paths]
    else:
        each = members.varied(lambda more: _load(arguments, more), arguments.members, arguments.vary)
        paths = members.folders(folder, len(each))
    if arguments.plot or arguments.dry_run:
        _look_ahead(each[0], arguments.plot, show=arguments.dry_run)
    if arguments.dry_run:
        for recipe in each[1:]:
            _look_ahead(recipe)
        return 0
    own = None if arguments.resume else own_folders(arguments.recipe)
    results = members.train(each, paths, started=arguments.started, own_modules=own, quiet=arguments.quiet)
    stopped = [result.stopped for result in results if result.stopped]
    if stopped:
        _say_stopped(stopped[0], folder)
        return STOPPED
    return 0 if arguments.quiet else evaluate_runs(paths, None)


def _check_members(ranks: int) -> None:
    if ranks > 1:
        raise InputError(f"--members on {ranks} ranks: members train on one device, by turns; start one process")


def _say_stopped(signal: str, folder: Path) -> None:
    print(f"kasoku: stopped by {signal}; go on with: kasoku train --resume {folder}", file=sys.stderr)


def _look_ahead(
    recipe: Recipe, plot: Path | None = None, training: Training | None = None, *, show: bool = True
) -> None:
    from kasoku.config import updates as course
    from kasoku.report import print_table

    facts, remark = (course.facts(training.dataset), "") if training else course.ahead(recipe)
    shape = {"num_classes": facts.classes, "in_channels": facts.channels, "image_size": facts.side}
    group = course.first_group(recipe, training.job.model if training else recipe.model(**shape))
    moments = course.moments(recipe, facts.images, group)
    if show:
        print_table("", course.table(recipe, facts, moments))
    if remark:
        print(f"kasoku: {remark}", file=sys.stderr)
    if plot:
        course.plot(plot, f"batch {recipe.batch:,}, {recipe.epochs:g} epochs", moments)


def _check_train(arguments: argparse.Namespace) -> None:
    given = [name for name in ("recipe", "resume", "data") if getattr(arguments, name)]
    if len(given) != 1:
        raise InputError(f"kasoku train: {' and '.join(given) or 'nothing'} given: one of RECIPE, --resume, --data")
    if arguments.go_on and (arguments.resume or not arguments.out or arguments.members):
        raise InputError("--continue: goes with --out DIR, where the run is or will be; for members give --resume DIR")
    if arguments.resume and arguments.out:
        raise InputError("--out beside --resume: a resumed run stays in its folder; leave --out away")
    if (arguments.weights or arguments.freeze) and not arguments.data:
        raise InputError(
            "--weights and --freeze go with --data; in a recipe use the technique kasoku.models.Pretrained"
        )
    if arguments.plot and arguments.plot.suffix != ".html":
        raise InputError(f"--plot {arguments.plot}: an HTML page is written; give a name that ends in .html")
    if arguments.vary and not arguments.members:
        raise InputError("--vary without --members: a value for each member is wanted; give --members K")
    if arguments.members and arguments.resume:
        raise InputError("--members beside --resume: the folder knows its members; leave --members out")
    wrong = [s for s in arguments.set if arguments.resume and not s.startswith(CHANGEABLE)]
    if wrong:
        allowed = ", ".join(CHANGEABLE)
        raise InputError(f"--resume with --set {wrong[0]}: that would be another training; only {allowed} may change")
    if arguments.freeze and not arguments.weights:
        raise InputError("--freeze without --weights: blocks that learnt nothing yet are not worth keeping; give both")


def _recipe_and_folder(arguments: argparse.Namespace) -> tuple[Recipe, Path]:
    from kasoku.config import recipe as recipes
    from kasoku.training.run_folder import allow_own_modules, free_folder, members_of

    sys.path.extend(entry for entry in own_folders(arguments.recipe) if entry not in sys.path)
    if arguments.resume:
        run = next(iter(members_of(arguments.resume)), arguments.resume)
        allow_own_modules(run)
        if not (run / "recipe.toml").is_file():
            raise InputError(f"--resume {arguments.resume}: no run there (no recipe.toml): an earlier run is wanted")
        return recipes.load(run / "recipe.toml", arguments.set), arguments.resume
    recipe = _load(arguments)
    return recipe, arguments.out or free_folder((arguments.recipe or arguments.data).resolve().stem)


def _load(arguments: argparse.Namespace, more: Sequence[str] = ()) -> Recipe:
    from kasoku.config import recipe as recipes
    from kasoku.config.from_folder import recipe_for

    settings = [*arguments.set, *more]
    if arguments.data:
        return recipe_for(arguments.data, arguments.weights, freeze=arguments.freeze, settings=settings)
    return recipes.load(arguments.recipe, settings)


def _eval(arguments: argparse.Namespace) -> int:
    from kasoku.training.trained import evaluate_runs

    return evaluate_runs(arguments.runs, arguments.data)


def _predict(arguments: argparse.Namespace) -> int:
    from kasoku.training.trained import predict

    return predict(arguments.trained, arguments.images)


def _export(arguments: argparse.Namespace) -> int:
    from kasoku.commands.export import export

    print(export(arguments.trained, arguments.format, arguments.out))
    return 0


def _data(arguments: argparse.Namespace) -> int:
    from kasoku.data.datasets.download import download

    print(download(arguments.name, arguments.to, source=arguments.source, quiet=arguments.quiet))
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    from kasoku.data.packs.writer import pack, verify

    given = [one for one in (arguments.source, arguments.target) if one]
    if len(given) != (0 if arguments.verify else 2):
        raise InputError("kasoku pack: SRC DST to pack, or --verify DIR to check a pack")
    if arguments.verify:
        print(verify(arguments.verify))
        return 0
    settings = {name: getattr(arguments, name) for name in ("side", "format", "quality", "workers", "quiet")}
    print(pack(arguments.source, arguments.target, **settings))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from kasoku.commands.list import listing

    listing()
    return 0


if __name__ == "__main__":
    from kasoku.distributed.rendezvous import leave

    sys.exit(leave(main()))
