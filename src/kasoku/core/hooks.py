"""Module hooks that declare what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def ignores_values(hook: F) -> F:
    """Declares that a module hook neither changes inputs and outputs nor depends on their values.

    A technique may then call the hook with other tensors, or leave out a forward hook, where it runs several layers at
    once (`SavedMemory`). Layers with any other hook run as torch runs them.
    """
    hook.ignores_values = True  # type: ignore[attr-defined]
    return hook
