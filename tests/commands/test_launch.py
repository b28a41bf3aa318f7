"""`kasoku launch`: what it writes for clusters is valid and is executed as written; what cannot be is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.started import KASOKU, RECIPE, clean, ended, port, wait_for_checkpoints
from kasoku.cli import main
from kasoku.commands import launch

FILES = [Path(__file__).parent.parent / "files" / f"{name}.json" for name in ("kubernetes", "kubeflow", "skypilot")]
DEFINITIONS = {name: each for file in FILES for name, each in json.loads(file.read_text())["definitions"].items()}
FIVE = ["epochs=0.23", "schedule.warmup=0", "device.kind=cpu", "device.threads=1", "evaluate.target=0"]
SETTINGS = [part for setting in FIVE for part in ("--set", setting)]
BIN = str(Path(sys.executable).parent)  # where the command `kasoku` is
SBATCH_OPTIONS = {  # of sbatch(1) that a script of ours may have
    *("cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "requeue"),
    *("signal", "time"),
}
KINDS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "TrainingRuntime": "trainer.kubeflow.org.v1alpha1.TrainingRuntime",
    "TrainJob": "trainer.kubeflow.org.v1alpha1.TrainJob",
}
PODS = ("kubernetes", "kubeflow")  # where pods run


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 0
    return capsys.readouterr().out


def steps(run: Path) -> int:
    return int(json.loads((run / "result.json").read_text())["steps"])


# ---- Slurm

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = int(os.environ["SLURM_NTASKS"])
places = [dict(os.environ, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(tasks)]
running = [subprocess.Popen(words, env=place) for place in places]
sys.exit(max(process.wait() for process in running))
"""


@pytest.fixture
def cluster(tmp_path):
    """Stubs of what a Slurm node has, found first in PATH; scontrol writes down what it was told."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    texts = {
        "srun": SRUN,
        "hostname": "#!/bin/sh\necho localhost\n",
        "scontrol": f'#!/bin/sh\necho "$@" >{tmp_path}/told\n',
    }
    for name, text in texts.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def run(script: str, code: int = 0) -> dict[str, str]:
        asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
        tasks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
        said = {
            "SLURM_NTASKS": tasks,
            "SLURM_NNODES": asked["nodes"],
            "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        }
        said |= {"SLURM_JOB_ID": 30000 + os.getpid(), "SLURM_CPUS_PER_TASK": asked["cpus-per-task"]}
        path = f"{stubs}:{BIN}:{os.environ['PATH']}"
        (tmp_path / "job.sh").write_text(script)
        environment = {**{k: str(v) for k, v in said.items()}, "PATH": path}
        ended(["bash", str(tmp_path / "job.sh")], environment, code=code)
        return asked

    return run


@pytest.mark.process
@pytest.mark.smoke
def test_the_sbatch_script_trains_as_written(cluster, capsys, tmp_path):
    recipe = tmp_path / "my recipe's.toml"  # a name that a shell would take apart
    shutil.copy(RECIPE, recipe)
    run = tmp_path / "a run"
    arguments = [str(recipe), "--nodes", "1", "--gpus-per-node", "2", "--time", "30"]
    script = written(capsys, "slurm", *arguments, *SETTINGS, "--name", "mine", "--out", str(run))
    asked = cluster(script)
    assert set(asked) <= SBATCH_OPTIONS
    assert (asked["job-name"], asked["time"], asked["nodes"]) == ("mine", "30", "1")
    assert steps(run) == 5
    assert not (tmp_path / "told").exists()


@pytest.mark.process
def test_the_sbatch_script_started_again_has_nothing_left_to_do(cluster, capsys, tmp_path):
    run = tmp_path / "run"
    script = written(capsys, "slurm", str(RECIPE), "--gpus-per-node", "2", *SETTINGS, "--out", str(run))
    cluster(script)
    before = (run / "model.safetensors").read_bytes()
    cluster(script)
    assert steps(run) == 5
    assert (run / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "told").exists()


@pytest.mark.process
@pytest.mark.smoke
def test_a_stopped_job_is_put_into_the_queue_again(cluster, capsys, tmp_path):
    script = written(capsys, "slurm", str(RECIPE), "--gpus-per-node", "2")
    (tmp_path / "stubs" / "srun").write_text("#!/bin/sh\nexit 75\n")
    cluster(script, code=75)
    assert (tmp_path / "told").read_text() == f"requeue {30000 + os.getpid()}\n"


def test_on_gpus_slurm_is_asked_for_them(capsys):
    script = written(capsys, "slurm", str(RECIPE), "--nodes", "2", "--gpus-per-node", "4")
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "#SBATCH --nodes=2\n" in script
    assert "gpus-per-node" not in written(capsys, "slurm", str(RECIPE), "--set", "device.kind=cpu")


# ---- Kubernetes and Kubeflow


def wrong(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    """What in a value is not as its JSON schema says: the part of the standard that the file uses."""
    while "$ref" in schema:
        schema = DEFINITIONS[schema["$ref"].rpartition("/")[2]]
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    allowed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(type(value) is types[name] for name in allowed):
        yield f"{at}: {value!r} is no {' or '.join(allowed)}"
    elif isinstance(value, dict):
        yield from (f"{at}: no {name}" for name in schema.get("required", ()) if name not in value)
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            if inner is False:
                yield f"{at}: unknown {name}"
            elif inner:
                yield from wrong(part, inner, f"{at}.{name}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from wrong(part, schema["items"], f"{at}[{i}]")
    elif value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is none of {schema['enum']}"


def manifest(
    capsys: pytest.CaptureFixture[str], *arguments: str, where: str = "kubernetes"
) -> dict[str, dict[str, Any]]:
    """Its objects by kind, each as the published schema wants it."""
    whole = json.loads(written(capsys, where, *arguments))
    assert (whole["apiVersion"], whole["kind"]) == ("v1", "List")
    for thing in whole["items"]:
        assert not list(wrong(thing, DEFINITIONS[KINDS[thing["kind"]]], thing["kind"]))
    return {thing["kind"]: thing for thing in whole["items"]}


def job_of(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Job, or of the one that the JobSet of a runtime has."""
    if "Job" in things:
        return things["Job"]["spec"]
    (job,) = things["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def test_the_check_of_manifests_finds_mistakes(capsys):
    job = manifest(capsys, str(RECIPE))["Job"]
    job["spec"]["completions"] = "2"
    job["spec"]["template"]["spec"]["restartPolicy"] = "never"
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    assert len(list(wrong(job, DEFINITIONS[KINDS["Job"]], "Job"))) == 4


def test_the_manifest_is_whole(capsys):
    things = manifest(
        capsys,
        str(RECIPE),
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--image",
        "reg.io:5000/k@sha256:0",
        "--mount",
        "runs:/runs",
    )
    job, service = things["Job"]["spec"], things["Service"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == things["Service"]["metadata"]["name"] == "digits-cnn-98"
    assert {"name": "MASTER_ADDR", "value": "digits-cnn-98-0.digits-cnn-98"} in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert things["ConfigMap"]["data"]["recipe.toml"] == RECIPE.read_text()
    assert capsys.readouterr().err == ""


def test_the_train_job_has_the_pods_of_the_manifest(capsys):
    arguments = [str(RECIPE), "--nodes", "2", "--gpus-per-node", "4", "--mount", "runs:/runs", "--name", "mine"]
    plain, things = manifest(capsys, *arguments), manifest(capsys, *arguments, where="kubeflow")
    assert list(things) == ["ConfigMap", "TrainingRuntime", "TrainJob"]  # a TrainJob is refused before its runtime
    reference, runtime = things["TrainJob"]["spec"]["runtimeRef"], things["TrainingRuntime"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert things["TrainJob"]["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    job, (container,) = job_of(things), job_of(things)["template"]["spec"]["containers"]
    assert container.pop("name") == "node"  # which the trainer looks for
    assert container["env"].pop(0) == {"name": "MASTER_ADDR", "value": "mine-node-0-0.mine"}
    (same,) = job_of(plain)["template"]["spec"]["containers"]
    del same["env"][0], same["name"], plain["Job"]["spec"]["template"]["spec"]["subdomain"]
    assert job == plain["Job"]["spec"]
    assert things["ConfigMap"] == plain["ConfigMap"]


@pytest.mark.parametrize("out", [[], ["--out", "digits-cnn-98"]])  # the image's commands begin in /runs
@pytest.mark.parametrize("where", [*PODS, "skypilot"])
def test_a_run_in_no_volume_is_warned_of(where, out, capsys):
    assert main(["launch", where, str(RECIPE), *out]) == 0
    said = capsys.readouterr().err
    assert said.startswith("kasoku: /runs/digits-cnn-98 is lost with its container: ")
    assert said.count("\n") == 1


def pods(things: dict[str, dict[str, Any]]) -> tuple[list[str], list[dict[str, str]]]:
    """The container's command, and the environment of each of its pods."""
    spec = job_of(things)
    (container,) = spec["template"]["spec"]["containers"]
    own = {variable["name"]: variable["value"] for variable in container["env"]}
    index = [{"JOB_COMPLETION_INDEX": str(i)} for i in range(spec["completions"])]
    return container["command"], [clean({**own, **each, "PATH": f"{BIN}:{os.environ['PATH']}"}) for each in index]


def run_pods(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), said


def on_loopback(things: dict[str, dict[str, Any]], folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The `pods`, with the recipe where the kubelet would mount it."""
    (folder / "recipe.toml").write_text(things["ConfigMap"]["data"]["recipe.toml"])
    command, environments = pods(things)
    here = [word.replace("/run/kasoku", str(folder)) for word in command]
    return here, [{**environment, "MASTER_ADDR": "127.0.0.1"} for environment in environments]


@pytest.mark.process
@pytest.mark.parametrize("where", PODS)
def test_the_pods_train_as_written_on_loopback(where, capsys, tmp_path):
    arguments = ["--nodes", "2", "--gpus-per-node", "1", "--port", str(port()), "--mount", f"runs:{tmp_path}"]
    arguments += [*SETTINGS, "--out", str(tmp_path / "run")]
    command, environments = on_loopback(manifest(capsys, str(RECIPE), *arguments, where=where), tmp_path)
    run_pods([command] * 2, environments)
    assert steps(tmp_path / "run") == 5


def after_failures(job: dict[str, Any], codes: list[int], failed: int) -> int:
    """The failures that count once pods ended with these codes, as the Job controller counts them.

    Fails where it would not replace them.
    """
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # the only one that a podFailurePolicy goes with
    for code in codes:
        rules = job["podFailurePolicy"]["rules"]
        actions = [rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", ())]
        action = next(iter(actions), "Count")
        assert action != "FailJob", code
        failed += action == "Count"
    assert failed <= job["backoffLimit"], codes
    return failed


def test_a_pod_is_replaced_unless_its_training_diverged_or_fails_again_and_again(capsys):
    job = job_of(manifest(capsys, str(RECIPE), "--nodes", "2", "--gpus-per-node", "1"))
    assert after_failures(job, [75] * 50, 0) == 0  # SIGTERM, after a checkpoint
    assert after_failures(job, [137, 4] * 6, 0) == 12
    for codes in ([137, 4] * 6 + [137], [3]):
        with pytest.raises(AssertionError):
            after_failures(job, codes, 0)
    evicted = [rule for rule in job["podFailurePolicy"]["rules"] if "onPodConditions" in rule]
    assert [(rule["action"], rule["onPodConditions"][0]["type"]) for rule in evicted] == [
        ("Ignore", "DisruptionTarget")
    ]


def kill_pod(process: subprocess.Popen[str]) -> None:
    """Kills all processes of a session at once, as the kernel does those of a container."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == process.pid:
            os.kill(int(status.parent.name), signal.SIGKILL)


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes of a pod in /proc")
@pytest.mark.parametrize("where", PODS)
def test_a_killed_pod_recovers_by_itself(where, capsys, tmp_path):
    """A Job controller starts failed pods again after 10 s or more, when the others of them have ended as well."""
    arguments = ["--nodes", "2", "--gpus-per-node", "1", "--port", str(port()), "--mount", f"runs:{tmp_path}"]
    arguments += [*SETTINGS, "--set", "epochs=2", "--set", "save.every_steps=1", "--out", str(tmp_path / "run")]
    things = manifest(capsys, str(RECIPE), *arguments, where=where)
    command, environments = on_loopback(things, tmp_path)
    left, failed, ends = dict(enumerate(environments)), 0, []
    while left:
        running = {
            i: subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True, start_new_session=True)
            for i, each in left.items()
        }
        try:
            if not ends:
                wait_for_checkpoints([*running.values()], tmp_path / "run")
                kill_pod(running[1])
            said = {i: process.communicate(timeout=200)[1] for i, process in running.items()}
        finally:
            for process in running.values():
                kill_pod(process)
        codes = {i: process.returncode for i, process in running.items()}
        ends.append({i: code if code > 0 else 128 - code for i, code in codes.items() if code})
        failed = after_failures(job_of(things), [*ends[-1].values()], failed)
        left = {i: environments[i] for i in ends[-1]}
    assert ends == [{1: 137}, {}], said  # the other has gone on to the end
    assert steps(tmp_path / "run") == 44


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them, and in each the names a headless Service gives the pods."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip")
    hosts = [f"kasoku{os.getpid()}-{i}" for i in range(2)]
    folders = [Path("/etc/netns") / host for host in hosts]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host)
            ends = [f"ka{os.getpid()}{i}" for i in range(2)]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        names = "".join(f"10.77.0.{i + 1} digits-cnn-98-{i}.digits-cnn-98\n" for i in range(2))
        for i, (host, folder) in enumerate(zip(hosts, folders, strict=True)):
            ip("link", "set", ends[i], "netns", host)
            ip("-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", ends[i])
            for device in ("lo", ends[i]):
                ip("-n", host, "link", "set", device, "up")
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {os.uname().nodename}\n{names}")
        yield hosts
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.process
def test_the_pods_train_as_written_on_two_hosts(two_hosts, capsys, tmp_path):
    """Each in a network namespace of its own, with the recipe mounted and the names known; not a word is changed."""
    arguments = ["--nodes", "2", "--gpus-per-node", "1", "--mount", f"runs:{tmp_path}"]
    things = manifest(capsys, str(RECIPE), *arguments, *SETTINGS, "--out", str(tmp_path / "run"))
    (tmp_path / "recipe.toml").write_text(things["ConfigMap"]["data"]["recipe.toml"])
    command, environments = pods(things)
    mounted = f'mount -t tmpfs none /run && mkdir /run/kasoku && cp {tmp_path}/recipe.toml /run/kasoku/ && exec "$@"'
    run_pods([["ip", "netns", "exec", host, "sh", "-c", mounted, "sh", *command] for host in two_hosts], environments)
    assert steps(tmp_path / "run") == 5


# ---- SkyPilot


def sky_task(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The task, as the published schema wants it."""
    task = pytest.importorskip("yaml").safe_load(written(capsys, "skypilot", *arguments))
    assert not list(wrong(task, DEFINITIONS["sky.Task"], "task"))
    return task


def test_the_sky_task_is_whole(capsys, tmp_path):
    recipe = tmp_path / 'my "recipe"s.toml'
    shutil.copy(RECIPE, recipe)
    arguments = ["--nodes", "2", "--gpus-per-node", "4", "--image", "reg.io:5000/k:1", "--mount", "runs:/runs"]
    task = sky_task(capsys, str(recipe), *arguments, "--accelerator", "A100", "--name", "mine")
    resources = task["resources"]
    assert (task["name"], task["num_nodes"], task["volumes"]) == ("mine", 2, {"/runs": "runs"})
    assert (resources["accelerators"], resources["image_id"]) == ("A100:4", "docker:reg.io:5000/k:1")
    assert resources["job_recovery"] == {"max_restarts_on_errors": 6, "recover_on_exit_codes": [75]}
    assert task["file_mounts"] == {"/run/kasoku/recipe.toml": str(recipe)}
    assert "--out /runs/mine --continue" in task["run"]
    on_cpus = sky_task(capsys, str(RECIPE), "--gpus-per-node", "4", "--set", "device.kind=cpu")["resources"]
    assert (on_cpus["cpus"], "accelerators" in on_cpus) == ("4+", False)


def test_the_check_of_tasks_finds_mistakes(capsys):
    task = sky_task(capsys, str(RECIPE))
    task["num_nodes"] = "2"
    task["resources"]["accelerator"] = task["resources"].pop("accelerators")
    task["resources"]["job_recovery"]["recover_on_exit_codes"] = ["75"]
    assert len(list(wrong(task, DEFINITIONS["sky.Task"], "task"))) == 3


@pytest.mark.process
def test_the_nodes_of_a_sky_task_train_as_written(capsys, tmp_path):
    arguments = ["--nodes", "2", "--gpus-per-node", "1", "--port", str(port()), "--mount", f"runs:{tmp_path}"]
    out = tmp_path / "a\nrun"  # a name that a shell or YAML would take apart
    task = sky_task(capsys, str(RECIPE), *arguments, *SETTINGS, "--out", str(out))
    ((there, here),) = task["file_mounts"].items()
    script = task["run"].replace(there, here)  # as if it were there
    said = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "PATH": f"{BIN}:{os.environ['PATH']}"}
    places = [clean({**task["envs"], **said, "SKYPILOT_NODE_RANK": str(i)}) for i in range(task["num_nodes"])]
    run_pods([["bash", "-c", script]] * 2, places)
    assert steps(out) == 5


# ---- local, and what is refused


@pytest.mark.parametrize("where", ["local", "slurm", *PODS, "skypilot"])
@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["nowhere.toml"], r"nowhere\.toml: cannot be read"),
        ([str(RECIPE), "--nodes", "0"], r"--nodes 0: at least 1"),
        ([str(RECIPE), "--gpus-per-node", "0"], r"--gpus-per-node 0: at least 1"),
        ([str(RECIPE), "--gpus-per-node", "-1"], r"--gpus-per-node -1: at least 1"),
        ([str(RECIPE), "--gpus-per-node", "3"], r"batch=64: 3 ranks cannot share it evenly; 2 could"),
        ([str(RECIPE), "--gpus-per-node", "8", "--nodes", "16"], r"batch=64: fewer images than 128 ranks"),
        ([str(RECIPE), "--set", "epoch=3"], r"epoch: no such key: did you mean epochs"),
    ],
)
def test_what_no_launcher_can_start(where, arguments, pattern, capsys):
    refused(["launch", where, *arguments], pattern, capsys)


def refused(command: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kasoku: ")
    assert said.err.count("\n") == 1
    assert re.search(pattern, said.err), said.err


@pytest.mark.parametrize(
    ("where", "arguments", "pattern"),
    [
        ("slurm", ["--name", "Two Words"], r'--name "Two Words": lowercase letters.*RFC 1123'),
        ("kubernetes", ["--name", "a_b"], r'--name "a_b"'),
        ("kubernetes", ["--name=-a"], r'--name "-a"'),
        ("kubernetes", ["--name", "a" * 62, "--nodes", "2", "--gpus-per-node", "1"], r"at most 61 characters"),
        ("kubeflow", ["--name", "a" * 49, "--nodes", "2", "--gpus-per-node", "1"], r"at most 48 characters"),
        ("kubernetes", ["--image", "two words"], r'--image "two words"'),
        ("skypilot", ["--image", "two words"], r'--image "two words"'),
        ("skypilot", ["--accelerator", "H100: 8"], r'--accelerator "H100: 8": the name of a GPU is wanted'),
        ("kubernetes", ["--mount", "Runs:/runs"], r"--mount Runs:/runs: CLAIM:DIR"),
        ("kubernetes", ["--mount", "runs"], r"--mount runs: CLAIM:DIR"),
        ("kubernetes", ["--port", "70000"], r"--port 70000"),
        ("slurm", ["--port", "0"], r"--port 0"),
        ("slurm", ["--members", "1"], r"--members 1: at least 2"),
        ("kubernetes", ["--vary", "optimizer.lr=0.1,0.2"], r"--vary without --members"),
        ("skypilot", ["--members", "4", "--vary", "optimizer.lr=1,2"], r"2 values for 4 members"),
        ("slurm", ["--time", "soon"], r'--time "soon": D-HH:MM:SS'),
        ("slurm", ["--cpus-per-gpu", "0"], r"--cpus-per-gpu 0: at least 1"),
        ("local", ["--nodes", "2", "--gpus-per-node", "1"], r"--nodes 2 without --master"),
        ("local", ["--node", "1"], r"--node 1: nodes count from 0 to 0"),
        ("local", ["--continue", "--gpus-per-node", "1"], r"--continue without --out"),
    ],
)
def test_what_one_launcher_cannot_do(where, arguments, pattern, capsys, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    refused(["launch", where, str(RECIPE), *arguments], pattern, capsys)


def test_more_gpus_than_there_are(capsys, monkeypatch):
    refused(["launch", "local", str(RECIPE), "--gpus-per-node", "64"], r"no GPU, and \d+ cores", capsys)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    refused(
        ["launch", "local", str(RECIPE), "--gpus-per-node", "8"], r"this machine has 4 GPUs: give at most 4", capsys
    )


def test_local_takes_all_gpus_and_says_each_rank_its_place(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(launch, "spawn", lambda given, places, **more: calls.append((given, places, more)) or 0)
    command = ["launch", "local", str(RECIPE), "--nodes", "2", "--node", "1", "--master", "a", "--port", "5", "--quiet"]
    assert main([*command, "--set", "epochs=1"]) == 0
    ((given, places, more),) = calls
    assert given == ["train", str(RECIPE), "--set", "epochs=1", "--quiet"]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in places] == [(4 + i, 8, i, 4) for i in range(4)]
    assert (more["address"], more["port"]) == ("a", 5)


@pytest.mark.process
def test_bad_input_that_only_ranks_find_is_told_once(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(RECIPE.read_text())
    said = ended([*KASOKU, "launch", "local", str(RECIPE), "--gpus-per-node", "2", "--out", str(run)], code=2)
    assert said.count("\n") == 1
    assert "holds a run already" in said


@pytest.mark.parametrize("where", ["slurm", *PODS, "skypilot"])
def test_a_recipe_without_the_place_of_its_data_is_refused_before_it_waits_in_a_queue(where, capsys):
    recipe = ["imagenet_resnet50_81920", "--out", "run"]
    refused(["launch", where, *recipe], r"data.root is not given.*--set data.root=", capsys)
    assert "data.root=/on/the/cluster" in written(capsys, where, *recipe, "--set", "data.root=/on/the/cluster")
