"""The Containerfile, run as far as it can be without a container engine; its head says what was not run."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kasoku
from helpers.clean import CleanEnvironment
from kasoku.cli import main

ROOT = Path(__file__).parent.parent
KINDS = ("FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD")


def instructions() -> list[tuple[str, str]]:
    """(kind, the rest) of each instruction."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]


def values(kind: str) -> list[str]:
    return [rest for each, rest in instructions() if each == kind]


def test_the_containerfile_uses_what_this_test_runs():
    assert {kind for kind, _ in instructions()} == set(KINDS)
    (image,) = values("FROM")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert image == f"docker.io/library/python:{version.removeprefix('>=')}"


def test_what_it_copies_is_in_the_repository():
    sources = {word for rest in values("COPY") for word in rest.split()[:-1]}
    tracked = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition("/")[0] for name in tracked.stdout.split()} == sources


def test_launch_kubernetes_names_it_and_starts_its_program(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "kubernetes", "--help"])
    assert "Containerfile" in capsys.readouterr().out
    assert main(["launch", "kubernetes", str(ROOT / "recipes" / "digits_cnn_98.toml"), "--mount", "runs:/runs"]) == 0
    job = json.loads(capsys.readouterr().out)["items"][-1]
    assert "Containerfile" in job["metadata"]["annotations"]["kubernetes.io/description"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert json.loads(values("ENTRYPOINT")[0]) == command[:1]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="its shell and folders are those of Linux")
def test_its_steps_install_the_command_in_a_folder_with_what_it_copies(tmp_path):
    environment, root, here = CleanEnvironment(tmp_path), tmp_path / "root", tmp_path / "root"
    (environment.bin / "sh").symlink_to("/bin/sh")
    for kind, rest in instructions():
        if kind == "WORKDIR":
            here = root / rest.removeprefix("/")
            here.mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, here / target, ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
                else:
                    shutil.copy(ROOT / source, here / target)
        elif kind == "RUN":
            environment.run("sh", "-c", rest, cwd=here)
    program, *default = (word for kind in ("ENTRYPOINT", "CMD") for word in json.loads(values(kind)[0]))
    assert environment.run(program, *default, cwd=here).startswith("usage: kasoku")
    assert environment.run(program, "--version", cwd=here) == f"kasoku {kasoku.__version__}\n"
    code = "import kasoku, torch; print(kasoku.__file__)"
    assert environment.run("python", "-c", code, cwd=here).startswith(str(environment.bin.parent))
