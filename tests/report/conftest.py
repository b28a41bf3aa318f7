"""Fixtures of the tests of the page."""

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def figures() -> ModuleType:
    """The module that draws; the test is skipped without plotly."""
    pytest.importorskip("plotly", reason='needs pip install "plotly>=6"')
    from kasoku.report.html import figures

    return figures
