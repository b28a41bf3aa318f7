"""The files that `kasoku launch` writes for a cluster: an sbatch script or a Kubernetes manifest."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kasoku.distributed.local_launch import train_arguments

_RECIPE = Path("/run/kasoku/recipe.toml")  # in a pod
_GRACE_S = 180  # between SIGTERM and the end: enough for a step and a checkpoint
_ABOUT = "A training by kasoku. Its Containerfile builds the image, in a checkout: podman build -t {image} ."

_SBATCH = """\
#!/bin/bash
# Submit with sbatch, from a folder that all nodes see. At its time limit the training writes a checkpoint and the job
# is put into the queue again; it goes on from there.
#SBATCH --job-name={spec.name}
#SBATCH --nodes={spec.nodes}
#SBATCH --ntasks-per-node={spec.each}
{more}\
#SBATCH --time={time}
#SBATCH --signal=TERM@{grace_s}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # which srun does not take from the job
export MASTER_ADDR="$(hostname)"  # this script runs on the first node, as does rank 0
export MASTER_PORT={port}
srun --kill-on-bad-exit=0 --wait=60 kasoku {arguments}
status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A training on a cluster.

    Args:
        name: of the job.
        recipe: its file.
        nodes: the number of machines.
        each: ranks a node, one a GPU.
        on_gpus: whether the ranks train on GPUs.
        set: changed settings of the recipe, PATH=VALUE.
        extra: further options of the training.
        out: the run folder, on a file system that all nodes share; None: under runs/, named after the job (Slurm only).
        port: of rank 0; None: derived from the job's number (Slurm only).
    """

    name: str
    recipe: Path
    nodes: int
    each: int
    on_gpus: bool
    set: Sequence[str] = ()
    extra: Sequence[str] = ()
    out: Path | None = None
    port: int | None = None


def sbatch(
    spec: LaunchSpec, *, time: str, cpus_per_gpu: int, partition: str | None = None, account: str | None = None
) -> str:
    """A Slurm script: srun starts the ranks of each node. The arguments are the options of Slurm."""
    quoted = shlex.join(train_arguments(spec.recipe, spec.set, spec.out, go_on=True, extra=spec.extra))
    if spec.out is None:  # one folder a job, also after a requeue
        quoted += f' --out "runs/{spec.name}-$SLURM_JOB_ID"'
    settings = {
        "cpus-per-task": cpus_per_gpu,
        "gpus-per-node": spec.each if spec.on_gpus else None,
        "partition": partition,
        "account": account,
    }
    more = "".join(f"#SBATCH --{key}={value}\n" for key, value in settings.items() if value is not None)
    port = spec.port or "$((20000 + SLURM_JOB_ID % 10000))"
    return _SBATCH.format(spec=spec, time=time, port=port, more=more, grace_s=_GRACE_S, arguments=quoted)


def manifest(spec: LaunchSpec, *, image: str, mount: Sequence[str] = ()) -> str:
    """A Kubernetes List as JSON, which is YAML: the recipe, the Service that names the pods, and the Job.

    `mount` holds CLAIM:DIR, and kasoku is installed in `image`, which the Containerfile of the repository builds.
    """
    _, recipe, *more = train_arguments(_RECIPE, spec.set, spec.out, go_on=True, extra=spec.extra)
    shape = ["--nodes", str(spec.nodes), "--gpus-per-node", str(spec.each)]
    claims = [(f"claim-{i}", *volume.partition(":")[::2]) for i, volume in enumerate(mount)]
    mounts = [{"name": "recipe", "mountPath": str(_RECIPE.parent)}, {"name": "shm", "mountPath": "/dev/shm"}]
    container: dict[str, Any] = {
        "name": "kasoku",
        "image": image,
        "command": ["kasoku", "launch", "local", recipe, *shape, *more],  # its node is JOB_COMPLETION_INDEX
        "env": [
            {"name": "MASTER_ADDR", "value": f"{spec.name}-0.{spec.name}"},
            {"name": "MASTER_PORT", "value": str(spec.port)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": "rank-0", "containerPort": spec.port}],
        "volumeMounts": mounts + [{"name": name, "mountPath": path} for name, _, path in claims],
    }
    if spec.on_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(spec.each)}}
    pod = {
        "subdomain": spec.name,  # the pods' hosts are NAME-INDEX.NAME
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": spec.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's, between the GPUs of a node
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in claims),
        ],
    }
    labels = {"app.kubernetes.io/name": "kasoku", "app.kubernetes.io/instance": spec.name}
    ports = [{"name": "rank-0", "port": spec.port}]
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": ports}
    job = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "backoffLimit": 0,  # ranks end together: a pod alone cannot be started again
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    named = {"metadata": {"name": spec.name, "labels": labels}}
    about = {"annotations": {"kubernetes.io/description": _ABOUT.format(image=image)}}
    items: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": {"recipe.toml": spec.recipe.read_text()}},
        {"apiVersion": "v1", "kind": "Service", **named, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**named["metadata"], **about}, "spec": job},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"
