"""The command line itself: help for every verb, at once; arguments as frozen dataclasses."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import kasoku
from kasoku.cli import VERBS, main
from kasoku.commands.arguments import SlurmArguments, TrainArguments


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
    assert all(f"    {verb} " in process.stdout for verb in VERBS)


def test_arguments_are_frozen_and_have_the_defaults_of_their_options():
    arguments = SlurmArguments(recipe=Path("a.toml"))
    assert (arguments.nodes, arguments.set, arguments.out, arguments.cpus_per_gpu) == (1, (), None, 8)
    with pytest.raises(FrozenInstanceError):
        arguments.nodes = 2
    with pytest.raises(TypeError, match="recipe"):
        SlurmArguments()
    assert TrainArguments().recipe is None
