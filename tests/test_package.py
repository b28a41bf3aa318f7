"""`make dist`: one wheel for every Python and an sdist, both whole, both installed and trained without a compiler."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kasoku
from helpers.clean import CleanEnvironment

ROOT = Path(__file__).parent.parent
SOURCES = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "kasoku").rglob("*") if p.is_file()}
SOURCES = {name for name in SOURCES if not name.endswith((".pyc", ".so"))}
DOCUMENTS = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "NOTICE", "README.md", "SECURITY.md"}
BUILD = {"Containerfile", "MANIFEST.in", "PKG-INFO", "constraints.txt", "pyproject.toml", "setup.cfg", "setup.py"}
DECODER = "from kasoku.data.decode import native; print(native.decoder(), native.__file__)"

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="auditwheel runs on Linux")]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder that `make dist` fills."""
    folder = tmp_path_factory.mktemp("made") / "dist"
    words = ["make", "-o", ".venv/dev", f"BIN={Path(sys.executable).parent}", f"DIST={folder}", "dist"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel_facts(text):
    return email.message_from_string(text)


def test_the_wheel_is_one_for_every_python_and_holds_all(dist):
    wheel, sdist = sorted(dist.iterdir())
    assert re.fullmatch(rf"kasoku-{kasoku.__version__}-py3-none-(manylinux\w+\.?)+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"kasoku-{kasoku.__version__}.dist-info"
        facts, metadata = (wheel_facts(archive.read(f"{info}/{name}").decode()) for name in ("WHEEL", "METADATA"))
    assert facts["Root-Is-Purelib"] == "false"
    assert all(tag.startswith("py3-none-manylinux") for tag in facts.get_all("Tag"))
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "the kasoku authors")
    ours = {name for name in names if name.startswith("kasoku/")}
    assert ours == {name for name in SOURCES if not name.endswith((".c", ".h"))} | {
        f"kasoku/{package}/_native.so" for package in ("data/decode", "device", "optim/lars")
    }
    assert {Path(name).suffix for name in ours} >= {".toml", ".j2", ".npz", ".typed"}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(names)
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    held = {name for name in held if ".egg-info/" not in name}
    assert held == {f"src/{name}" for name in SOURCES} | DOCUMENTS | BUILD


def trained(environment, folder):
    """The accuracy after an epoch of the shipped digits, by the command that was installed."""
    settings = ["epochs=2", "evaluate.every=2", "device.threads=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    environment.run("kasoku", "train", "digits_cnn_98", *words, "--quiet", "--out", "run", cwd=folder)
    return json.loads((folder / "run" / "result.json").read_text())["top1"]


def installed_facts(environment):
    info = next(environment.bin.parent.glob(f"lib/python*/site-packages/kasoku-{kasoku.__version__}.dist-info"))
    return wheel_facts((info / "WHEEL").read_text())


def test_the_wheel_trains_with_native_code_where_there_is_no_compiler(dist, tmp_path):
    environment = CleanEnvironment(tmp_path)
    environment.run("pip", "install", next(dist.glob("*.whl")), cwd=tmp_path)
    decoder, _, file = environment.run("python", "-c", DECODER, cwd=tmp_path).partition("kasoku's own")
    assert not decoder
    assert file.strip().startswith(str(environment.bin.parent))
    assert trained(environment, tmp_path) > 0.8


def test_the_sdist_without_a_compiler_is_a_pure_wheel_and_trains(dist, tmp_path):
    environment = CleanEnvironment(tmp_path)
    environment.run("pip", "install", next(dist.glob("*.tar.gz")), cwd=tmp_path, env={"CC": "/bin/false"})
    facts = installed_facts(environment)
    assert (facts["Root-Is-Purelib"], facts.get_all("Tag")) == ("true", ["py3-none-any"])
    assert environment.run("python", "-c", DECODER, cwd=tmp_path).startswith(f"Pillow {environment.bin.parent}")
    assert trained(environment, tmp_path) > 0.8
