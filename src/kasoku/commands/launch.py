"""`kasoku launch`: the ranks of a training on this machine, or a job for Slurm, Kubernetes, Kubeflow or SkyPilot.

Note: one road. `local` starts this machine's ranks and is all that a pod or node runs; under Slurm srun starts them.
A script or manifest says `--continue`: submitted or started again it goes on from the last checkpoint.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kasoku.commands import arguments as options
from kasoku.config import trust
from kasoku.config.ranks import check_share, ranks_of_member
from kasoku.config.recipe import Recipe, check_data
from kasoku.core import InputError, say
from kasoku.core.hardware import cores
from kasoku.distributed.cluster_jobs import LaunchSpec, manifest, sbatch, sky_task
from kasoku.distributed.environment import Place
from kasoku.distributed.local_launch import spawn, train_arguments


def run_local(arguments: options.LocalArguments) -> int:
    """Starts the ranks of this machine; returns the exit code of the first that fails, or 0."""
    recipe = arguments.load()
    gpus = torch.cuda.device_count() if recipe.device.kind in ("auto", "cuda") else 0
    each = _shape(arguments, recipe, gpus or 1)
    if gpus and each > gpus:
        raise InputError(f"--gpus-per-node {each}: this machine has {gpus} GPUs: give at most {gpus}")
    limit = max(2, cores())
    if not gpus and each > limit and recipe.device.kind != "cpu":
        advice = f"give at most {limit} processes, or --set device.kind=cpu for more"
        raise InputError(f"--gpus-per-node {each}: this machine has no GPU, and {cores()} cores: {advice}")
    if arguments.go_on and not arguments.out:
        raise InputError("--continue without --out: where the run is, or will be, is wanted; give --out DIR")
    node = _from(arguments.node, "JOB_COMPLETION_INDEX" if arguments.nodes > 1 else "", 0)
    if not 0 <= node < arguments.nodes:
        raise InputError(f"--node {node}: nodes count from 0 to {arguments.nodes - 1}, as --nodes says")
    master = arguments.master or os.environ.get("MASTER_ADDR")
    if arguments.nodes > 1 and not master:
        raise InputError(f"--nodes {arguments.nodes} without --master: the host of node 0 is wanted by all nodes")
    port = _from(arguments.port, "MASTER_PORT", options.PORT if arguments.nodes > 1 else 0)
    _check_port(port, 0 if arguments.nodes == 1 else 1)
    places = [Place(node * each + i, arguments.nodes * each, i, each) for i in range(each)]
    flags = [f"--{name}" for name in ("quiet", "traceback") if getattr(arguments, name)]
    extra = [*flags, *_extra(arguments)]
    command = train_arguments(arguments.recipe, arguments.set, arguments.out, go_on=arguments.go_on, extra=extra)
    return spawn(command, places, address=master or "127.0.0.1", port=port, started=arguments.started)


def run_slurm(arguments: options.SlurmArguments) -> int:
    """Prints an sbatch script; returns the exit code."""
    job = _cluster_job(arguments, 63)
    if not re.fullmatch(r"\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2}", arguments.time, re.ASCII):
        raise InputError(f'--time "{arguments.time}": D-HH:MM:SS, HH:MM:SS or minutes')
    print(sbatch(job, time=arguments.time, cpus_per_gpu=arguments.cpus_per_gpu), end="")
    return 0


def run_kubernetes(
    arguments: options.KubernetesArguments, build: Callable[..., str] = manifest, pod: str = "-{}"
) -> int:
    """Prints a manifest, or what `build` makes of the job; returns the exit code. `pod`: its name, after the job's."""
    job = _cluster_job(arguments, 63 - len(pod.format(arguments.nodes - 1)))
    if not re.fullmatch(r"[\w][\w./:@-]*", arguments.image, re.ASCII):
        raise InputError(f'--image "{arguments.image}": the name of an image is wanted, as registry/name:tag')
    for mount in arguments.mount:
        claim, _, path = mount.partition(":")
        # a claim has the name of a DNS subdomain (RFC 1123), as all objects of Kubernetes
        label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
        is_name = len(claim) <= 253 and re.fullmatch(rf"{label}(\.{label})*", claim)
        if not (is_name and path.startswith("/") and ":" not in path):
            raise InputError(f"--mount {mount}: CLAIM:DIR is wanted, a claim's name and an absolute folder")
    out = Path("/runs") / (arguments.out or job.name)  # where the image's commands begin
    if not any(out.is_relative_to(mount.partition(":")[2]) for mount in arguments.mount):
        say(f"{out} is lost with its container: give a volume claim, as --mount CLAIM:{out.parent}")
    if own := trust.allow_options()[1::2]:
        say(f"the image must have the modules {', '.join(own)}: the job brings only the recipe")
    print(build(replace(job, out=out), image=arguments.image, mount=arguments.mount), end="")
    return 0


def run_kubeflow(arguments: options.KubernetesArguments) -> int:
    """Prints a manifest for Kubeflow Trainer; returns the exit code."""
    return run_kubernetes(arguments, partial(manifest, kubeflow=True), "-node-0-{}-abcde")


def run_skypilot(arguments: options.SkypilotArguments) -> int:
    """Prints a SkyPilot task; returns the exit code."""
    if not re.fullmatch(r"[\w-]+", arguments.accelerator, re.ASCII):
        raise InputError(f'--accelerator "{arguments.accelerator}": the name of a GPU is wanted, such as H100 or L4')
    return run_kubernetes(arguments, partial(sky_task, accelerator=arguments.accelerator))


def _cluster_job(arguments: options.SlurmArguments | options.KubernetesArguments, most: int) -> LaunchSpec:
    """The job. Raises InputError for a name or a port that clusters do not take."""
    from kasoku.training.ensemble import varied

    recipe = arguments.load()
    check_data(recipe)  # a job that waits for hours in a queue must not end at once
    if arguments.members:
        varied(lambda more: arguments.load(*more), arguments.members, arguments.vary)
    elif arguments.vary:
        raise InputError("--vary without --members: a value for each member is wanted; give --members K")
    each = _shape(arguments, recipe, 8)
    _check_port(options.PORT if arguments.port is None else arguments.port, 1)
    from_recipe = re.sub(r"[^a-z0-9]+", "-", arguments.recipe.stem.lower()).strip("-")
    name = arguments.name if arguments.name is not None else from_recipe
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > most:
        wanted = f'lowercase letters, digits and "-", from a letter to a letter or digit, at most {most} characters'
        raise InputError(f'--name "{name}": {wanted} (RFC 1123); give such a name')
    on_gpus = recipe.device.kind != "cpu"
    job = LaunchSpec(name=name, recipe=arguments.recipe, nodes=arguments.nodes, each=each, on_gpus=on_gpus)
    return replace(job, set=arguments.set, extra=_extra(arguments), out=arguments.out, port=arguments.port)


def _shape(arguments: options.LaunchArguments, recipe: Recipe, default: int) -> int:
    """Ranks a node. Raises InputError for a number of ranks that cannot train the recipe."""
    each = default if arguments.gpus_per_node is None else arguments.gpus_per_node
    cpus = arguments.cpus_per_gpu if isinstance(arguments, options.SlurmArguments) else 1
    for name, number in (("--nodes", arguments.nodes), ("--gpus-per-node", each), ("--cpus-per-gpu", cpus)):
        if number < 1:
            raise InputError(f"{name} {number}: at least 1 is wanted")
    ranks = arguments.nodes * each
    if arguments.members:
        ranks = ranks_of_member(arguments.members, ranks)
    if recipe.batch < ranks and not recipe.auto_batch:
        raise InputError(f"batch={recipe.batch}: fewer images than {ranks} ranks; raise batch")
    check_share(recipe, ranks)
    return each


def _extra(arguments: options.LaunchArguments) -> list[str]:
    """Further options of `kasoku train`."""
    members = ["--members", str(arguments.members)] if arguments.members else []
    return [*members, *(word for each in arguments.vary for word in ("--vary", each)), *trust.allow_options()]


def _check_port(port: int, least: int) -> None:
    if not least <= port < 65536:
        raise InputError(f"--port {port}: from 1 to 65535")


def _from(option_value: int | None, variable: str, default: int) -> int:
    if option_value is not None:
        return option_value
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise InputError(f'{variable}="{text}": a number is wanted')
    return int(text)
