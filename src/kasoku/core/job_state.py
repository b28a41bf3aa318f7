"""The parts of a job: its progress, its changes to other objects, and the state that its checkpoints hold."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

Batch = tuple[Tensor, Tensor]


class Stateful(Protocol):
    """An object whose state a checkpoint can hold, as plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restores the state that `state_dict` returned."""


class EpochProgress:
    """The steps of a training, and the epochs that they make where the length of an epoch changes.

    Attributes:
        steps: optimizer steps so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._since = (0, 0.0)  # steps and epochs when the length of an epoch changed last

    def epochs(self, accumulate: int, batches: int) -> float:
        """Epochs so far, if a step takes `accumulate` batches and an epoch has `batches` of them."""
        steps, epochs = self._since
        return epochs + (self.steps - steps) * accumulate / max(1, batches)

    def set(self, epochs: float, steps: int) -> None:
        """Counts on from here."""
        self.steps = steps
        self._since = (steps, epochs)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "since": list(self._since)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._since = (int(state["since"][0]), float(state["since"][1]))


class Patches(ExitStack):
    """Changes to attributes and hooks of other objects, undone in reverse order by `close()`.

    Attributes:
        attributes: (object, name, old value) of each attribute that is set; ... stands for no old value.
        first_hook: number of torch's next hook when the job was built: techniques register that one and later ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[object, str, object]] = []
        self.first_hook: int = RemovableHandle.next_id

    def set(self, thing: object, name: str, value: object) -> None:
        """Sets an attribute until `close()`."""
        own = vars(thing) if hasattr(thing, "__dict__") else {}
        self.attributes.append((thing, name, own.get(name, ...)))
        self.callback(self.attributes.pop)
        if name in own:
            self.callback(setattr, thing, name, own[name])
        else:
            self.callback(delattr, thing, name)
        setattr(thing, name, value)


class KeptState(dict[str, Stateful]):
    """The objects whose state is in every checkpoint, by name."""

    def add(self, name: str, stateful: Stateful) -> None:
        """Adds an object under a name of its own."""
        if name in self:
            raise ValueError(f"keep({name!r}): the name is taken; give the part another one")
        self[name] = stateful

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.items():
            part.load_state_dict(state[name])


class Batches:
    """The job's loader as the loop sees it: the plain loader inside the generators of techniques."""

    def __init__(self, plain: Iterable[Batch], inner: Iterable[Batch], around: Callable[..., Iterable[Batch]]) -> None:
        self.plain, self._inner, self._around = plain, inner, around

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._around(self._inner))

    def __len__(self) -> int:
        return len(self.plain)  # type: ignore[arg-type]
