"""What hangs on the modules of one model."""

from __future__ import annotations

from typing import Any, Self

from kasoku.core import InputError


class Bound:
    """Belongs to one model: a deep copy of the model finds that it is another's, and a file cannot hold it."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InputError("SavedMemory: a model with it in place cannot be pickled: save its state_dict(), or close()")
