"""Classes of pytest tests that run once for each row, and are collected where somebody subclasses them."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

try:
    import pytest
except ImportError as error:
    raise ImportError('kasoku.testing needs pytest: pip install "pytest>=8"') from error

_ASSERTING = ("toy", "technique_contracts", "source_contracts", "reducer_contracts")
pytest.register_assert_rewrite(*(f"kasoku.testing.{name}" for name in _ASSERTING))
Test = TypeVar("Test", bound=Callable[..., None])


class Contracts:
    """Base class of contracts: a subclass, named Test..., sets `rows`, and each test runs for each of them."""

    rows: ClassVar[Sequence[Any]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each test."""
        if "row" in metafunc.fixturenames:
            rows = list(filter(getattr(metafunc.function, "condition", None), self.rows))
            metafunc.parametrize("row", rows, ids=[row.name for row in rows])

    def setup_method(self) -> None:
        """For tensors as small as these a second thread only waits."""
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def teardown_method(self) -> None:
        torch.set_num_threads(self.threads)


def for_rows(condition: Callable[[Any], Any]) -> Callable[[Test], Test]:
    """A decorator: the test runs only for rows of which condition(row) is true."""

    def mark(test: Test) -> Test:
        test.__dict__["condition"] = condition
        return test

    return mark
