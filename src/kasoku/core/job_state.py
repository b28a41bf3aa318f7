"""The parts of a job: its progress, its changes to other objects, and the state that its checkpoints hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

from kasoku.core.errors import InputError


class Stateful(Protocol):
    """An object whose state a checkpoint can hold, as plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restores the state that `state_dict` returned."""


class EpochProgress:
    """Counts the steps of a training, and the epochs that they make where the length of an epoch changes.

    Attributes: `since`: steps and epochs at the last change of that length.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.since = (0, 0.0)

    def epochs(self, accumulate: int, batches: int) -> float:
        """Epochs so far, if a step takes `accumulate` batches and an epoch has `batches` of them."""
        steps, epochs = self.since
        return epochs + (self.steps - steps) * accumulate / max(1, batches)


class Patches:
    """Changes to attributes and hooks of other objects, undone in reverse order by `close()`.

    Attributes:
        attributes: (object, name, old value) of each attribute that was set; ... stands for no old value.
        first_hook: number of torch's next hook when the job was built: techniques register that one and later ones.
    """

    def __init__(self) -> None:
        self.attributes: list[tuple[object, str, object]] = []
        self.first_hook: int = RemovableHandle.next_id
        self._undo = ExitStack()

    def set(self, thing: object, name: str, value: object) -> None:
        """Sets an attribute until `close()`."""
        own = vars(thing) if hasattr(thing, "__dict__") else {}
        self.attributes.append((thing, name, own.get(name, ...)))
        self.undo(functools.partial(setattr, thing, name, own[name]) if name in own else lambda: delattr(thing, name))
        setattr(thing, name, value)

    def undo(self, f: Callable[[], object]) -> None:
        """Calls f() at `close()`, last first."""
        self._undo.callback(f)

    def close(self) -> None:
        """Undoes all changes."""
        self._undo.close()
        self.attributes.clear()


class KeptState:
    """The parts of a job whose state is in every checkpoint, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        """Adds a part under a name of its own."""
        if name in self.parts:
            raise ValueError(f"keep({name!r}): the name is taken; give the part another one")
        self.parts[name] = part

    def check(self, state: dict[str, Any]) -> None:
        """Raises InputError for the state of other parts."""
        if set(state) != set(self.parts):
            raise InputError(f"checkpoint keeps {sorted(state)}, this job keeps {sorted(self.parts)}: use its recipe")
