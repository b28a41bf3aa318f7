"""The examples of CONTRIBUTING.md: a technique, a data source and a reducer of somebody's own pass the contracts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


@pytest.mark.process
@pytest.mark.smoke
def test_its_examples_pass_the_contracts_as_they_are_written(tmp_path):
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL))
    assert len(files) == TEXT.count("```python") == 5
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    for name in ("Centralise", "stripes", "Wire"):
        assert re.search(rf"PASSED test_\w+\.py::Test\w+::test_\w+\[{name}", done.stdout), done.stdout


def test_the_modules_it_names_are_there():
    root = Path(__file__).parent.parent
    named = set(re.findall(r"`((?:src|tests|benchmarks|docs|records)/[\w/.]*)`", TEXT))
    assert [name for name in named if not (root / name).exists()] == []
    inside = set(re.findall(r"`((?:commands|distributed)/[\w/.]*\.py)`", TEXT))
    assert len(inside) == 3
    assert [name for name in inside if not (root / "src" / "kasoku" / name).is_file()] == []
