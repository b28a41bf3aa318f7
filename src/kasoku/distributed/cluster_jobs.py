"""The files that `kasoku launch` writes: an sbatch script, a manifest of Kubernetes or Kubeflow, a SkyPilot task.

Note: a pod that is killed is replaced, and joins the others, which go on (membership.py). Where they cannot, their
ranks end (exit code 4), so all are replaced, and read the last checkpoint, until 6 a node have failed. Not counted:
pods that were evicted, or that saved at a SIGTERM (75). Not replaced: those of a training that diverged (3).
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any

from kasoku.distributed.local_launch import train_arguments

_RECIPE = Path("/run/kasoku/recipe.toml")  # in a pod, whose mount of its folder is in job.json
_RETRIES = 6  # as Kubernetes' own default is
_GRACE_S = 180  # between SIGTERM and the end: enough for a step and a checkpoint


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A training on a cluster."""

    name: str  # of the job
    recipe: Path
    nodes: int
    each: int  # ranks a node, one a GPU
    on_gpus: bool
    set: Sequence[str] = ()  # changed settings of the recipe, PATH=VALUE
    extra: Sequence[str] = ()  # options of `kasoku train`
    out: Path | None = None  # on a file system that all nodes share; None: under runs/, named after the job (Slurm)
    port: int | None = None  # of rank 0; None: derived from the job's number (Slurm)


def sbatch(spec: LaunchSpec, *, time: str, cpus_per_gpu: int) -> str:
    """A Slurm script: srun starts the ranks of each node. The arguments are the options of Slurm."""
    words = shlex.join(train_arguments(spec.recipe, spec.set, spec.out, go_on=True, extra=spec.extra))
    if spec.out is None:  # one folder a job, also after a requeue
        words += f' --out "runs/{spec.name}-$SLURM_JOB_ID"'
    more = f"#SBATCH --cpus-per-task={cpus_per_gpu}\n"
    more += f"#SBATCH --gpus-per-node={spec.each}\n" if spec.on_gpus else ""
    port = spec.port or "$((20000 + SLURM_JOB_ID % 10000))"
    return _template("job.sbatch").format(spec=spec, time=time, port=port, more=more, grace_s=_GRACE_S, arguments=words)


def manifest(spec: LaunchSpec, *, image: str, mount: Sequence[str] = (), kubeflow: bool = False) -> str:
    """A Kubernetes List as JSON, which is YAML: the recipe, the Service that names the pods, and the Job.

    `mount` holds CLAIM:DIR, and kasoku is installed in `image`, which the Containerfile of the repository builds.
    The pods' hosts are NAME-INDEX.NAME. NCCL uses the volume shm between the GPUs of a node. With `kubeflow`: the
    recipe, a TrainJob, and its runtime, a JobSet with the same Job; it makes the Service, with hosts NAME-node-0-INDEX.
    """
    values = {"name": spec.name, "image": image, "port": str(spec.port), "nodes": str(spec.nodes)}
    escaped = {key: json.dumps(value)[1:-1] for key, value in values.items()}
    numbers = {"grace_s": _GRACE_S, "retries": _RETRIES * spec.nodes}
    document: dict[str, Any] = json.loads(Template(_template("job.json")).substitute(escaped, **numbers))
    recipe_map, service, job, runtime, train_job = document["items"]
    document["items"] = [recipe_map, runtime, train_job] if kubeflow else [recipe_map, service, job]
    recipe_map["data"]["recipe.toml"] = spec.recipe.read_text(encoding="utf-8")
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["command"] = _node_command(spec)  # its node is JOB_COMPLETION_INDEX
    if spec.on_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(spec.each)}}
    for i, volume in enumerate(mount):
        claim, _, path = volume.partition(":")
        container["volumeMounts"].append({"name": f"claim-{i}", "mountPath": path})
        pod["volumes"].append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}})
    if kubeflow:
        runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"] = job["spec"]
        del pod["subdomain"]
        container["name"] = "node"
        container["env"][0]["value"] = f"{spec.name}-node-0-0.{spec.name}"
    return json.dumps(document, indent=2) + "\n"


def sky_task(spec: LaunchSpec, *, image: str, mount: Sequence[str] = (), accelerator: str) -> str:
    """A SkyPilot task (YAML), whose nodes run a pod's command. `mount` holds VOLUME:DIR; `accelerator`: the GPU."""
    volumes = {path: volume for volume, _, path in (each.partition(":") for each in mount)}
    values = {"name": spec.name, "image": f"docker:{image}", "volumes": volumes, "recipe": str(spec.recipe.resolve())}
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    hardware = f"accelerators: {accelerator}:{spec.each}" if spec.on_gpus else f"cpus: {spec.each}+"
    command = indent(shlex.join(_node_command(spec)), "  ").strip()
    numbers = {"nodes": spec.nodes, "port": spec.port, "hardware": hardware, "command": command}
    return Template(_template("job.skypilot.yaml")).substitute(quoted, **numbers)


def _node_command(spec: LaunchSpec) -> list[str]:
    """The command of a pod or a node, but for the node's number."""
    _, recipe, *more = train_arguments(_RECIPE, spec.set, spec.out, go_on=True, extra=spec.extra)
    shape = ["--nodes", str(spec.nodes), "--gpus-per-node", str(spec.each)]
    return ["kasoku", "launch", "local", recipe, *shape, *more]


def _template(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")
