"""Fixtures of tuning: a clock in which no real time passes, cheap garbage collection, recipes, refused commands."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.tuning import SMALL
from kasoku.cli import main
from kasoku.core.clock import Wall


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """For tensors this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the wall clock is 20 ms after the one before, so that no step is repeated to fill time."""
    ticks = itertools.count()
    monkeypatch.setattr(Wall, "now", lambda self: 0.02 * next(ticks))


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def auto(tmp_path) -> Path:
    path = tmp_path / "auto.toml"
    path.write_text(SMALL.replace("batch = 64", 'batch = "auto"\nreference_batch = 64'))
    return path


@pytest.fixture
def refused(capsys):
    """Runs a command and checks that it refuses in one line that matches."""

    def check(pattern: str, *arguments: object) -> None:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kasoku: ")
        assert error.count("\n") == 1, error
        assert re.search(pattern, error), error

    return check
