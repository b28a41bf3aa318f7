"""The collectives between ranks behind one small interface, and `Solo`, which is one rank alone."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kasoku.core.clock import Clock, Wall
from kasoku.core.errors import InputError

T = TypeVar("T")


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Returns when the result may be read; may be called again."""

    def done(self) -> bool:
        """True when `wait()` would return at once."""


class Comm(Protocol):
    """The collectives of one rank. They write tensors in place and return at once; `Work.wait()` waits.

    An implementation inherits from it, so that it has the defaults of the optional methods at the end.

    Attributes:
        thread_safe: collectives may be called from any thread of the process.
        activity: what this rank is doing, as its heartbeat reports it; None without a failure detector.
    """

    rank: int
    size: int
    clock: Clock
    thread_safe: bool = False
    activity: Any = None

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        """Every rank's x becomes the sum (or "mean", "max") over ranks."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes this rank's part of the sum over ranks; x has size * len(out) elements."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes the parts x of all ranks, in rank order."""

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        """Sends x to one rank, which receives it by the same tag."""

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        """Receives the messages of `source` with this tag, in the order in which they were sent."""

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        """The root's object, on every rank; waits."""
        return self.gather_objects(thing)[root]

    def gather_objects(self, thing: T) -> list[T]:
        """Every rank's object in rank order, on every rank; waits."""

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes part `rank` of every rank's x, in rank order; x has `size` equal parts."""

    def sub(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """The ranks of this rank's group, with a queue of their own.

        All ranks pass the same groups, which are disjoint and hold every rank, in the same order of calls.
        """

    def channel(self, *, patient: bool = False) -> "Comm":
        """The same ranks with a queue of its own: its collectives do not wait for those of this one.

        All ranks call it in the same order. `patient`: waiting there never times out.
        """
        return self.sub([range(self.size)])

    def warm(self, device: torch.device, *, channels: int = 0) -> None:
        """Opens connections now instead of at the first collective: its own, and those of so many channels.

        All ranks call it together, while nothing else is sent. Nothing to open by default.
        """
        return

    def block(self, what: str, ready: Callable[[], bool]) -> None:
        """Lets other ranks run until `ready()`, where ranks take turns in one process; returns at once by default."""
        return


class _Done:
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class Solo(Comm):
    """One rank alone: every collective is the identity."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.rank, self.size = 0, 1
        self.clock: Clock = clock or Wall()

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        return _Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        out.copy_(x.view_as(out))
        return _Done()

    reduce_scatter = all_to_all = all_gather

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        raise InputError(f"send to rank {to}: this job has one rank")

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        raise InputError(f"receive from rank {source}: this job has one rank")

    def gather_objects(self, thing: T) -> list[T]:
        return [thing]

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        return self


def default_comm() -> Comm:
    """`Solo`. Raises InputError in a process group of several ranks, since each would silently train alone."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        together = "give comm=kasoku.distributed.TorchComm() (also to kasoku's loader)"
        alone = "comm=kasoku.core.Solo() if each rank is to train a model of its own"
        raise InputError(f"Job without comm in a process group of {ranks} ranks: {together}, or {alone}")
    return Solo()
