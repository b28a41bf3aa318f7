"""The figures of docs/ that the simulator draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_all_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install -e '.[dev]'")
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("simulated", ROOT / "docs" / "simulated.py")
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    monkeypatch.setattr(drawing, "DOCS", tmp_path)
    monkeypatch.setattr(drawing, "sizes", lambda *_: [1, 64])  # of 60, which take seconds
    drawing.main()
    committed = {file.name for file in (ROOT / "docs").glob("simulated_*.svg")}
    assert {file.name for file in tmp_path.glob("*.svg")} == committed
    assert len(committed) == 4
