"""What `kasoku launch` writes for a cluster: an sbatch script, a Kubernetes manifest."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from kasoku.spawn import train_arguments

_RECIPE = Path("/run/kasoku/recipe.toml")  # in a pod
_GRACE_S = 180  # from the signal to the end: enough for a step and a checkpoint

_SBATCH = """\
#!/bin/bash
# Submit with sbatch, from a folder that all nodes see. At its time limit the training writes a checkpoint and the job
# is put into the queue again; it goes on from there.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={each}
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


def sbatch(arguments: argparse.Namespace, name: str, each: int, *, on_gpus: bool) -> str:
    """A Slurm script: srun starts `each` ranks on each node, one a GPU."""
    words = train_arguments(arguments.recipe, arguments.set, arguments.out, go_on=True)
    quoted = shlex.join(words)
    if arguments.out is None:  # one folder a job, the same when it is requeued
        quoted += f' --out "runs/{name}-$SLURM_JOB_ID"'
    settings = {
        "cpus-per-task": arguments.cpus_per_gpu,
        "gpus-per-node": each if on_gpus else None,
        "partition": arguments.partition,
        "account": arguments.account,
    }
    more = "".join(f"#SBATCH --{key}={value}\n" for key, value in settings.items() if value is not None)
    shape = {"name": name, "nodes": arguments.nodes, "each": each, "time": arguments.time}
    port = arguments.port or "$((20000 + SLURM_JOB_ID % 10000))"
    return _SBATCH.format(**shape, port=port, more=more, grace_s=_GRACE_S, arguments=quoted)


def manifest(arguments: argparse.Namespace, name: str, each: int, out: Path, *, on_gpus: bool) -> str:
    """A Kubernetes List as JSON, which is YAML: the recipe, the Service that names the pods, and the Job."""
    labels = {"app.kubernetes.io/name": "kasoku", "app.kubernetes.io/instance": name}
    recipe = {"recipe.toml": arguments.recipe.read_text()}
    ports = [{"name": "rank-0", "port": arguments.port}]
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": ports}
    pod = _pod(arguments, name, _container(arguments, name, each, out, on_gpus=on_gpus))
    job = {
        "completionMode": "Indexed",
        "completions": arguments.nodes,
        "parallelism": arguments.nodes,
        "backoffLimit": 0,  # ranks end together: a pod alone cannot be started again
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    named = {"metadata": {"name": name, "labels": labels}}
    items: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": recipe},
        {"apiVersion": "v1", "kind": "Service", **named, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": job},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


def _container(arguments: argparse.Namespace, name: str, each: int, out: Path, *, on_gpus: bool) -> dict[str, Any]:
    """Runs this node's ranks; Kubernetes says which node it is by JOB_COMPLETION_INDEX."""
    _, recipe, *more = train_arguments(_RECIPE, arguments.set, out, go_on=True)
    shape = ["--nodes", str(arguments.nodes), "--gpus-per-node", str(each)]
    mounts = [{"name": "recipe", "mountPath": str(_RECIPE.parent)}, {"name": "shm", "mountPath": "/dev/shm"}]
    paths = [mount.partition(":")[2] for mount in arguments.mount]
    container: dict[str, Any] = {
        "name": "kasoku",
        "image": arguments.image,
        "command": ["kasoku", "launch", "local", recipe, *shape, *more],
        "env": [
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(arguments.port)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": "rank-0", "containerPort": arguments.port}],
        "volumeMounts": mounts + [{"name": f"claim-{i}", "mountPath": path} for i, path in enumerate(paths)],
    }
    if on_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(each)}}
    return container


def _pod(arguments: argparse.Namespace, name: str, container: dict[str, Any]) -> dict[str, Any]:
    claims = [mount.partition(":")[0] for mount in arguments.mount]
    return {
        "subdomain": name,  # the pods' hosts are NAME-INDEX.NAME
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's, between the GPUs of a node
            *({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": c}} for i, c in enumerate(claims)),
        ],
    }
