"""Commands look at a recipe's network each time; tests of one session look at each network once."""

from __future__ import annotations

from typing import Any

import pytest

from kasoku.simulate import from_recipe as simulation

_seen: dict[str, Any] = {}
_inspect = simulation._inspect


def remember_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what the simulation finds out about a network, by the recipe's table of the model and its images."""

    def inspect(model: Any, facts: Any) -> Any:
        key = f"{model} {facts}"
        if key not in _seen:
            _seen[key] = _inspect(model, facts)
        return _seen[key]

    monkeypatch.setattr(simulation, "_inspect", inspect)
