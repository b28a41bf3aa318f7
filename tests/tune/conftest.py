"""What the tests of tuning share: a clock in which no real time passes, one thread, cheap garbage collection."""

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from kasoku.core.clock import Wall


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """For tensors this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _old_objects_are_not_collected() -> Iterator[None]:
    """Tuning collects garbage after each size that failed; most of that time goes to the modules of torch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the wall clock is 20 ms after the one before, so that no step is repeated to fill time."""
    ticks = itertools.count()
    monkeypatch.setattr(Wall, "now", lambda self: 0.02 * next(ticks))
