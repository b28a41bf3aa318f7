"""kasoku launch: the ranks of a training on this machine, as a Slurm job, or as a Kubernetes Job.

Note: one road. `local` starts this machine's ranks and is all that a Kubernetes pod runs; under Slurm srun starts them.
A script or manifest says `--continue`: submitted or started again it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from kasoku.config.recipe import Recipe, load, own_folders
from kasoku.config.sharing import check_share, most_ranks
from kasoku.core import InputError
from kasoku.core.files import write_atomically
from kasoku.core.hardware import cores
from kasoku.distributed.cluster_jobs import KubernetesSpec, LaunchSpec, SlurmSpec, manifest, sbatch
from kasoku.distributed.environment import Place
from kasoku.distributed.local_launch import spawn, train_arguments

S = TypeVar("S", bound=LaunchSpec)
PORT = 29500
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def add_parser(commands: Any) -> None:
    """Adds `launch` to the command's parsers."""
    launch = commands.add_parser("launch", help="train on the GPUs of many machines: local, slurm, kubernetes")
    places = launch.add_subparsers(metavar="WHERE", required=True)

    local = _common(places, "local", "start this machine's ranks, a process a GPU (or on the CPU)", _local)
    local.add_argument("--node", type=int, metavar="I", help="which of the nodes this is (default: 0)")
    local.add_argument("--master", metavar="HOST", help="the host of node 0 (default: MASTER_ADDR, or this one)")
    local.add_argument("--port", type=int, metavar="P", help="free on node 0 (default: MASTER_PORT, or any)")
    local.add_argument(
        "--continue", dest="go_on", action="store_true", help="go on with the run in --out, as it is, if any"
    )
    local.add_argument("--quiet", action="store_true", help="no progress bar")

    slurm = _common(places, "slurm", "write an sbatch script", _slurm)
    slurm.add_argument("--port", type=int, metavar="P", help="of rank 0 (default: from the job's number)")
    slurm.add_argument(
        "--cpus-per-gpu", type=int, default=SlurmSpec.cpus_per_gpu, metavar="C", help="(default: %(default)s)"
    )
    slurm.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    slurm.add_argument("--account", metavar="NAME", help="(default: yours)")
    slurm.add_argument("--time", default=SlurmSpec.time, metavar="D-HH:MM:SS", help="limit (default: %(default)s)")

    kubernetes = _common(places, "kubernetes", "write a manifest: Indexed Job, headless Service, recipe", _kubernetes)
    kubernetes.add_argument("--image", default=KubernetesSpec.image, help="with kasoku in it (default: %(default)s)")
    kubernetes.add_argument(
        "--mount", action="append", default=[], metavar="CLAIM:DIR", help="a volume claim for the run, the data, ..."
    )
    kubernetes.add_argument("--port", type=int, default=PORT, metavar="P", help="of rank 0 (default: %(default)s)")
    for written in (slurm, kubernetes):
        written.add_argument("--name", help="of the job (default: the recipe's)")
        written.add_argument("--write", type=Path, metavar="FILE", help="where to (default: standard output)")


def _common(places: Any, name: str, what: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = places.add_parser(name, help=what)
    parser.add_argument("recipe", type=Path, help="a recipe file (TOML)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="G", help="a process each (default: all; elsewhere 8)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run folder, which all nodes see")
    parser.set_defaults(run=run)
    return parser


def gpus_for(recipe: Recipe) -> int:
    """How many ranks a training takes on this machine when nobody says: its GPUs, as many as can share the batch."""
    if recipe.device.kind not in ("auto", "cuda"):
        return 1
    there = torch.cuda.device_count()
    used = most_ranks(recipe, there)
    if used < there:
        print(f"kasoku: {used} of {there} GPUs used: batch={recipe.batch} cannot be shared by more", file=sys.stderr)
    return used


def _local(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    there = torch.cuda.device_count() if recipe.device.kind in ("auto", "cuda") else 0
    each = _shape(arguments, recipe, there or 1)
    if there and each > there:
        raise InputError(f"--gpus-per-node {each}: this machine has {there} GPUs: give at most {there}")
    limit = max(2, cores())
    if not there and each > limit and recipe.device.kind != "cpu":
        raise InputError(
            f"--gpus-per-node {each}: this machine has no GPU, and {cores()} cores: give at most {limit} processes, or "
            "--set device.kind=cpu for more"
        )
    if arguments.go_on and not arguments.out:
        raise InputError("--continue without --out: where the run is, or will be, is wanted; give --out DIR")
    node = _from(arguments.node, "JOB_COMPLETION_INDEX", 0)
    if not 0 <= node < arguments.nodes:
        raise InputError(f"--node {node}: nodes count from 0 to {arguments.nodes - 1}, as --nodes says")
    master = arguments.master or os.environ.get("MASTER_ADDR")
    if arguments.nodes > 1 and not master:
        raise InputError(f"--nodes {arguments.nodes} without --master: the host of node 0 is wanted by all nodes")
    port = _from(arguments.port, "MASTER_PORT", PORT if arguments.nodes > 1 else 0)
    _check_port(port, 0 if arguments.nodes == 1 else 1)
    places = [Place(node * each + i, arguments.nodes * each, i, each) for i in range(each)]
    options = ["--quiet"] if arguments.quiet else []
    command = [*train_arguments(arguments.recipe, arguments.set, arguments.out, go_on=arguments.go_on), *options]
    address = master or "127.0.0.1"
    return spawn(command, places, address=address, port=port, started=arguments.started)


def _slurm(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    each = _shape(arguments, recipe, 8)
    _check_port(PORT if arguments.port is None else arguments.port, 1)
    for option, pattern in (("partition", r"[\w.,-]+"), ("account", r"[\w.-]+")):
        given = getattr(arguments, option)
        if given is not None and not re.fullmatch(pattern, given):
            raise InputError(f'--{option} "{given}": letters, digits, "_", "-" and "."; give the name Slurm knows')
    if not re.fullmatch(r"\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2}", arguments.time):
        raise InputError(f'--time "{arguments.time}": D-HH:MM:SS, HH:MM:SS or minutes')
    return _written(sbatch(_spec(SlurmSpec, arguments, recipe, name=_name(arguments, 63), each=each)), arguments.write)


def _kubernetes(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)
    each = _shape(arguments, recipe, 8)
    _check_port(arguments.port, 1)
    if not re.fullmatch(r"[\w][\w./:@-]*", arguments.image, re.ASCII):
        raise InputError(f'--image "{arguments.image}": the name of an image is wanted, as registry/name:tag')
    for mount in arguments.mount:
        claim, _, path = mount.partition(":")
        if not (_is_name(claim) and path.startswith("/") and ":" not in path):
            raise InputError(f"--mount {mount}: CLAIM:DIR is wanted, a claim's name and an absolute folder")
    name = _name(arguments, 63 - len(f"-{arguments.nodes - 1}"))  # a pod's host is called NAME-INDEX
    out = arguments.out or Path("/runs") / name
    mounted = [Path(mount.partition(":")[2]) for mount in arguments.mount]
    if not any(out.is_relative_to(path) for path in mounted):
        print(
            f"kasoku: {out} is lost with its pod: give a volume claim, as --mount CLAIM:{out.parent}", file=sys.stderr
        )
    spec = _spec(KubernetesSpec, arguments, recipe, name=name, each=each, out=out)
    return _written(manifest(spec), arguments.write)


def _spec(kind: type[S], arguments: argparse.Namespace, recipe: Recipe, **known: Any) -> S:
    """What the arguments of the same names and these say."""
    given = {f.name: getattr(arguments, f.name) for f in fields(kind) if hasattr(arguments, f.name)}
    return kind(**{**given, "on_gpus": recipe.device.kind != "cpu", **known})


def _recipe(arguments: argparse.Namespace) -> Recipe:
    sys.path.extend(own_folders(arguments.recipe))
    return load(arguments.recipe, arguments.set)


def _shape(arguments: argparse.Namespace, recipe: Recipe, default: int) -> int:
    """Ranks a node. Raises InputError for a number of ranks that cannot train the recipe."""
    each: int = default if arguments.gpus_per_node is None else arguments.gpus_per_node
    cpus = getattr(arguments, "cpus_per_gpu", 1)
    for option, number in (("--nodes", arguments.nodes), ("--gpus-per-node", each), ("--cpus-per-gpu", cpus)):
        if number < 1:
            raise InputError(f"{option} {number}: at least 1 is wanted")
    if recipe.batch < arguments.nodes * each and not recipe.auto_batch:
        raise InputError(f"batch={recipe.batch}: fewer images than {arguments.nodes * each} ranks; raise batch")
    check_share(recipe, arguments.nodes * each)
    return each


def _name(arguments: argparse.Namespace, longest: int) -> str:
    """The job's name. Raises InputError where clusters would not take it."""
    from_recipe = re.sub(r"[^a-z0-9]+", "-", arguments.recipe.stem.lower()).strip("-")
    name: str = arguments.name if arguments.name is not None else from_recipe
    if not _LABEL.fullmatch(name) or len(name) > longest:
        raise InputError(
            f'--name "{name}": lowercase letters, digits and "-", from a letter to a letter or digit, at most '
            f"{longest} characters (RFC 1123); give such a name"
        )
    return name


def _is_name(text: str) -> bool:
    """Whether it is a DNS subdomain name (RFC 1123), as objects of Kubernetes have."""
    return len(text) <= 253 and all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in text.split("."))


def _check_port(port: int, least: int) -> None:
    if not least <= port < 65536:
        raise InputError(f"--port {port}: from 1 to 65535")


def _from(given: int | None, variable: str, default: int) -> int:
    if given is not None:
        return given
    said = os.environ.get(variable, str(default))
    if not said.isdecimal():
        raise InputError(f'{variable}="{said}": a number is wanted')
    return int(said)


def _written(text: str, file: Path | None) -> int:
    if file is None:
        print(text, end="")
    else:
        write_atomically(file, lambda part: part.write_text(text))
    return 0
