"""The parts of a job: its changes to other objects, its loader, objects with a state, and the exchange of gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kasoku.core.comm import Comm
from kasoku.core.errors import InputError

Batch = tuple[Tensor, Tensor]
Hyper = list[dict[str, Any]]
Slices = Mapping[Tensor, Sequence[Tensor]]  # of parameters, each with its gradient


def first_part(job: Any) -> int:
    """The number of this rank's first backward pass of a step among those of all ranks."""
    loader = job.plain_loader
    return int(loader.first_part) if getattr(loader, "at_once", 0) else job.comm.rank * job.accumulate


def batches_of(loader: Any) -> int:
    """The batches of an epoch. Raises InputError for a loader without a length."""
    try:
        return len(loader)
    except TypeError as error:
        raise InputError(f"the loader has no len(), by which epochs are counted ({error}): give it one") from error


class Stateful(Protocol):
    """An object whose state a checkpoint can hold, as plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restores the state that `state_dict` returned."""


class GradientExchange(Protocol):
    """Averages gradients over ranks in backward, bucket by bucket, in an order that is the same on all ranks."""

    factors: Comm  # for layers that exchange the factors of their gradients instead

    def bucket_bytes(self, p: Tensor) -> int:
        """The bytes of the bucket that holds the gradient of p."""

    def hold(self, p: Tensor) -> None:
        """Notes that the layer of p keeps the factors of its gradient until the turn of p's bucket."""


class Patches(ExitStack):
    """Changes to attributes and hooks of other objects, undone in reverse order by `close()`."""

    def __init__(self) -> None:
        super().__init__()
        # (object, name, old value) of each attribute that is set; ... stands for no old value
        self.attributes: list[tuple[object, str, object]] = []
        self.first_hook: int = RemovableHandle.next_id  # of those that techniques register

    def set(self, thing: object, name: str, value: object) -> None:
        """Sets an attribute until `close()`."""
        old = vars(thing).get(name, ...) if hasattr(thing, "__dict__") else ...
        setattr(thing, name, value)
        self.attributes.append((thing, name, old))
        self.callback(self.attributes.pop)
        if old is not ...:
            self.callback(setattr, thing, name, old)
        else:
            self.callback(delattr, thing, name)


class Batches:
    """The job's loader as the loop sees it: the plain loader inside the generators of techniques."""

    def __init__(self, plain: Iterable[Batch], inner: Iterable[Batch], around: Callable[..., Iterable[Batch]]) -> None:
        self.plain, self._inner, self._around = plain, inner, around

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._around(self._inner))

    def __len__(self) -> int:
        return len(self.plain)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # such as the sampler of a DataLoader
        if name == "plain":  # of a copy that has no state yet
            raise AttributeError(name)
        return getattr(self.plain, name)
