"""The collectives of torch.distributed: NCCL between GPUs, gloo between CPUs."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kasoku.core import Clock, Comm, InputError, Wall, Work
from kasoku.core.hardware import is_dense
from kasoku.core.torch_internals import abort_nccl

T = TypeVar("T")
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_groups: list[dist.ProcessGroup] = []  # made by TorchComm, beside that of all ranks
_UNUSED_TAG = 2**30  # of a message that nobody sends
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class _Handle:
    """Works of torch, and a function to call once they have ended."""

    def __init__(self, *works: Any, finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = [work for work in works if work is not None], finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()  # NCCL: the current stream waits, not the host
        finish, self._works, self._finish = self._finish, [], None  # frees what they hold, unless a wait failed
        if finish is not None:
            finish()


class TorchComm(Comm):
    """One rank of an initialised `torch.distributed` process group; by default of that of all ranks.

    Constructing it is local; all methods but send and receive are collective. None of them drains. Raises InputError if
    torch.distributed is not initialised.
    """

    thread_safe = True

    def __init__(self, group: dist.ProcessGroup | None = None, clock: Clock | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError("TorchComm: torch.distributed is not initialised: call its init_process_group first")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.clock: Clock = clock or Wall()
        self._group = group
        self._spare: list[TorchComm] = []

    def warm(self, device: torch.device, *, channels: int = 0) -> None:
        """Opens the connections of the group, and of new channels, which `channel` then returns first."""
        spare = [self.channel() for _ in range(channels)]
        for comm in (self, *spare):
            comm.all_reduce(torch.zeros(1, device=device)).wait()
        self._spare += spare

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        """Every rank's x becomes the sum (or "mean", "max") over ranks, in place; any dense layout."""
        if op not in _OPS:
            raise InputError(f'all_reduce(op="{op}"): one of "sum", "mean", "max"')
        if not is_dense(x):
            raise InputError(f"all_reduce of shape {tuple(x.shape)}, strides {x.stride()}: the tensor must be dense")
        flat = x.detach().as_strided((x.numel(),), (1,))
        finish = (lambda: x.div_(self.size)) if op == "mean" else None
        return _Handle(dist.all_reduce(flat, op=_OPS[op], group=self._group, async_op=True), finish=finish)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes this rank's part of the sum over ranks. Gloo's own sends as much as an all-reduce (2.13)."""
        if x.device.type != "cpu":
            return _Handle(_reduce_scatter(out.view(-1), x.view(-1), group=self._group, async_op=True))
        own, pair = x.view(self.size, x.numel() // self.size), self.size == 2
        sent = own[1 - self.rank] if pair else own  # its own part stays where it is
        parts = torch.empty_like(sent)
        both, flat = (own[self.rank], parts), out.view(-1)
        work = self._exchange(parts, sent)
        return _Handle(work, finish=lambda: torch.add(*both, out=flat) if pair else torch.sum(parts, 0, out=flat))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes the parts of all ranks; x may be its part of out: gloo copies all twice (2.13)."""
        parts = out.view(self.size, x.numel())
        if x.device.type != "cpu" or parts[self.rank].data_ptr() != x.data_ptr():
            return _Handle(_all_gather(out.view(-1), x.view(-1), group=self._group, async_op=True))
        if self.size == 2:
            return _Handle(self._exchange(parts[1 - self.rank], x))
        return _Handle(*(dist.broadcast(p, group=self._group, group_src=r, async_op=True) for r, p in enumerate(parts)))

    def _exchange(self, out: Tensor, x: Tensor) -> Any:
        """An all-to-all; between two ranks of all of x, both ways at once, where two broadcasts would take turns."""
        sizes = [self.rank * x.numel(), (1 - self.rank) * x.numel()] if self.size == 2 else None
        return dist.all_to_all_single(out.view(-1), x.view(-1), sizes, sizes, group=self._group, async_op=True)

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        """Sends x to one rank; gloo knows only in `wait()` whether it has ended."""
        return _Handle(dist.isend(x, group=self._group, group_dst=to, tag=tag))

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        """Receives what `source` sent by this tag; several threads may each wait for one."""
        return _Handle(dist.irecv(x, group=self._group, group_src=source, tag=tag))

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        """The root's object, on every rank; waits. Pickled: the ranks of one group trust each other."""
        box: list[Any] = [thing]
        dist.broadcast_object_list(box, group=self._group, group_src=root)
        return cast(T, box[0])

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return _Handle(dist.all_to_all_single(out.view(-1), x.view(-1), group=self._group, async_op=True))

    def sub(self, groups: Sequence[Sequence[int]]) -> "TorchComm":
        created = [self._new_group(ranks) for ranks in groups]
        return TorchComm(next(g for g, ranks in zip(created, groups, strict=True) if self.rank in ranks), self.clock)

    def channel(self, *, patient: bool = False) -> "TorchComm":
        """The same ranks in a process group of its own.

        `patient`: a thread may wait there for what comes only in the end. A time-out of gloo would close the
        connections to all ranks.
        """
        if self._spare and not patient:
            return self._spare.pop(0)
        return TorchComm(self._new_group(range(self.size), timedelta(days=3650) if patient else None), self.clock)

    def _new_group(self, ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
        """A process group of some of these ranks; without effect on a rank of this comm that is not among them."""
        world = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        apart = self._group is not None
        group = dist.new_group([world[rank] for rank in ranks], timeout=timeout, use_local_synchronization=apart)
        if dist.get_rank(group) >= 0:  # else a number stands for it
            _groups.append(cast(dist.ProcessGroup, group))
        return cast(dist.ProcessGroup, group)

    def gather_objects(self, thing: T) -> list[T]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self._group)
        return things


def abort() -> None:
    """Makes all collectives of this process raise, those under way and later ones. For a thread beside the training.

    Not collective. Only `destroy` and a new group end this state. Note: gloo cannot be aborted by a call, but a receive
    that times out closes all connections of its group.
    """
    for group in (dist.group.WORLD, *_groups):
        with suppress(RuntimeError, ValueError):  # it was destroyed
            if torch.cuda.is_available():
                abort_nccl(group)
            ranks = range(dist.get_world_size(group) if group else 0)  # none in a group of other ranks
            for peer in {*ranks} - {dist.get_rank(group)}:
                with suppress(RuntimeError):
                    message = dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=_UNUSED_TAG)
                    cast(Any, message).wait(timedelta(milliseconds=1))


def destroy() -> None:
    """Destroys all process groups, if there are any. Not collective."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
