"""A small tree of photos, for the tests of how folders are listed."""

import os
from collections import Counter

import pytest

from helpers.made import fill


@pytest.fixture
def tree(tmp_path):
    """Root with train/ and val/, three classes in each; cache beside it."""
    for part, count in (("train", 4), ("val", 2)):
        for name in ("ant", "bee", "cat"):
            fill(tmp_path / "photos" / part / name, count)
    return tmp_path / "photos"


@pytest.fixture
def listings(monkeypatch):
    """Counts how often each folder is listed, by its name."""
    found, real = Counter(), os.scandir

    def listing(path):
        if isinstance(path, str):  # not what shutil removes
            found[os.path.basename(path)] += 1
        return real(path)

    monkeypatch.setattr(os, "scandir", listing)
    return found
