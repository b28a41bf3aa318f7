"""The command line itself: help for every verb, at once; arguments as frozen dataclasses."""

import re
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import kasoku
from kasoku.__main__ import main as entry_point
from kasoku.cli import VERBS, main
from kasoku.commands.arguments import SlurmArguments, TrainArguments
from kasoku.core import files


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert f"usage: kasoku {verb}" in capsys.readouterr().out


def test_the_version_is_that_of_the_package_its_citation_and_its_changelog(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"kasoku {kasoku.__version__}\n"
    root = Path(__file__).parents[2]
    assert f"\nversion: {kasoku.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## [{kasoku.__version__}]" in (root / "CHANGELOG.md").read_text()


def test_no_source_is_one_line_that_names_all(capsys):
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "kasoku: nothing given: one of RECIPE, --resume DIR, --data DIR is wanted\n"


@pytest.mark.process
@pytest.mark.smoke
def test_the_help_of_kasoku_and_of_its_commands_does_not_import_torch():
    code = """
import sys
from kasoku.__main__ import main
for words in (["--help"], ["--version"], *([verb, "--help"] for verb in sys.argv[1:])):
    sys.argv = ["kasoku", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
print("torch" in sys.modules, "rich" in sys.modules)
"""
    words = [sys.executable, "-c", code, *VERBS]
    process = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert process.stdout.rstrip().endswith("False False")
    assert all(re.search(rf"^    {verb}\s", process.stdout, re.MULTILINE) for verb in VERBS)


def test_arguments_are_frozen_and_have_the_defaults_of_their_options():
    arguments = SlurmArguments(recipe=Path("a.toml"))
    assert (arguments.nodes, arguments.set, arguments.out, arguments.cpus_per_gpu) == (1, (), None, 8)
    with pytest.raises(FrozenInstanceError):
        arguments.nodes = 2
    with pytest.raises(TypeError, match="recipe"):
        SlurmArguments()
    assert TrainArguments().recipe is None


def test_without_fcntl_the_error_names_the_systems_that_kasoku_runs_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(
        ImportError, match=r"kasoku runs on Linux \(macOS: untried\), and this is .*: on Windows use WSL"
    ):
        runpy.run_path(files.__file__)
    monkeypatch.setattr("kasoku.cli.main", lambda **_: runpy.run_path(files.__file__))
    assert entry_point() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.process
def test_on_windows_a_command_ends_in_one_line():
    code = "import sys; sys.modules['fcntl'] = None; from kasoku.__main__ import main; sys.exit(main())"
    process = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert process.stderr.startswith("kasoku runs on Linux")
    assert process.stderr.count("\n") == 1
