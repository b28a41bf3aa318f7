"""The collectives between ranks behind one small protocol: `Solo` (one rank) and `Threads` (N ranks in one process).

Note: ranks that take turns. Under `Threads` exactly one rank runs at any moment and gives the turn away only where it
waits, always to the next rank that can go on. So a run is deterministic, sums are taken in rank order, and when no
rank can go on the deadlock is known at once and named. torch's CPU random state travels with the turn: each rank has
its own, as a process would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kasoku.core.clock import Clock, Wall
from kasoku.core.errors import InputError

T = TypeVar("T")


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result may be read; may be called again."""
        ...

    def done(self) -> bool:
        """True when `wait()` would return at once."""
        ...


class Comm(Protocol):
    """The collectives of one rank. Tensors are written in place; every call returns at once, `Work.wait()` waits."""

    rank: int
    size: int
    clock: Clock
    own_threads: bool  # collectives may be called from any thread of the process

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        """Every rank's x becomes the sum (or "mean", "max") over ranks."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes this rank's part of the sum over ranks; x has size * len(out) elements."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes the parts x of all ranks, in rank order."""
        ...

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        """Sends x to one rank, which receives it by the same tag."""
        ...

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        """Receives what `source` sent by this tag, in the order it was sent."""
        ...

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        """The root's object, on every rank; waits."""
        ...

    def gather_objects(self, thing: T) -> list[T]:
        """Every rank's object in rank order, on every rank; waits."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Out becomes part `rank` of every rank's x, in rank order; x has `size` equal parts."""
        ...

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        """The ranks of this rank's group, with a queue of their own.

        All ranks pass the same groups, which are disjoint and hold every rank, in the same order of calls.
        """
        ...

    def channel(self, *, patient: bool = False) -> Comm:
        """The same ranks with a queue of its own: what is sent there does not wait for what is sent here.

        Called by all ranks in the same order. `patient`: no time-out ends what waits there.
        """
        ...


class _Done:
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class Solo:
    """One rank alone: every collective is the identity."""

    rank = 0
    size = 1
    own_threads = False

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or Wall()

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        """Leaves x as it is."""
        return _Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Copies x."""
        out.copy_(x.view_as(out))
        return _Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Copies x."""
        out.copy_(x.view_as(out))
        return _Done()

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        """There is nobody: raises InputError."""
        raise InputError(f"send to rank {to}: this job has one rank")

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        """There is nobody: raises InputError."""
        raise InputError(f"receive from rank {source}: this job has one rank")

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        """The object itself."""
        return thing

    def gather_objects(self, thing: T) -> list[T]:
        """The object in a list."""
        return [thing]

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Copies x."""
        return self.all_gather(out, x)

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        """Itself."""
        return self

    def channel(self, *, patient: bool = False) -> Comm:
        """Itself."""
        return self


class DeadlockError(RuntimeError):
    """No rank can go on; the message says what each one waits for."""


@dataclass
class _Meeting:
    """One collective: filled as ranks arrive, finished by the last of them."""

    what: str
    parts: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    finished: bool = False


class _Shared:
    """What the ranks of one `Threads` share: whose turn it is, what is under way, who waits for what."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.ended: set[int] = set()
        self.failure: BaseException | None = None
        self.subs: dict[tuple[int, tuple[int, ...]], _Shared] = {}

    def next_turn(self, rank: int) -> None:
        """Gives the turn to the next rank that can go on; names the deadlock when there is none."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if other in self.ended:
                continue
            if self.failure or other not in self.waiting or self.waiting[other][1]():
                self.turns[other].release()
                return
        if len(self.ended) < self.size:
            lines = [f"rank {r} waits for {self.waiting[r][0]}" for r in sorted(self.waiting)]
            lines += [f"rank {r} has ended" for r in sorted(self.ended)]
            self.failure = DeadlockError("deadlock: " + "; ".join(lines))
            self.turns[min(set(range(self.size)) - self.ended)].release()


class _ThreadWork:
    def __init__(self, comm: _ThreadComm, what: str, ready: Callable[[], bool], finish: Callable[[], None]) -> None:
        self._comm, self._what, self._ready, self._finish = comm, what, ready, finish
        self._read = False

    def done(self) -> bool:
        return self._ready()

    def wait(self) -> None:
        if not self._read:
            self._comm.block(self._what, self._ready)
            self._read = True
            self._finish()


class _ThreadComm:
    """One rank's view of what is shared."""

    own_threads = False

    def __init__(self, shared: _Shared, rank: int, clock: Clock) -> None:
        self.rank, self.size, self.clock = rank, shared.size, clock
        self._shared = shared
        self._counts: dict[str, int] = {}

    def block(self, what: str, ready: Callable[[], bool]) -> None:
        """Gives the turn away until `ready()`; also when it is ready already, so that turns stay regular."""
        shared = self._shared
        shared.waiting[self.rank] = (what, ready)
        state = torch.get_rng_state()
        shared.next_turn(self.rank)
        shared.turns[self.rank].acquire()
        torch.set_rng_state(state)
        del shared.waiting[self.rank]
        if shared.failure:
            raise shared.failure

    def _meet(self, what: str, part: Any, finish: Callable[[list[Any]], Any]) -> tuple[str, _Meeting]:
        number = self._counts["all"] = self._counts.get("all", -1) + 1
        meeting = self._shared.meetings.setdefault(("all", number), _Meeting(what))
        name = f"collective {number} ({meeting.what})"
        if meeting.what != what:
            raise InputError(f"rank {self.rank} calls {what} where others call {meeting.what} (collective {number})")
        meeting.parts[self.rank] = part
        if len(meeting.parts) == self.size:
            meeting.result = finish([meeting.parts[r] for r in range(self.size)])
            meeting.finished = True
            del self._shared.meetings["all", number]
        return name, meeting

    def _collective(self, what: str, x: Tensor, out: Tensor, *, op: str, pick: Callable[[Tensor], Tensor]) -> Work:
        if op not in ("sum", "mean", "max", "gather"):
            raise InputError(f'all_reduce(op="{op}"): one of "sum", "mean", "max"')

        def finish(parts: list[Tensor]) -> Tensor:
            if op == "gather":
                return torch.cat(parts)
            if op == "max":
                return torch.stack(parts).amax(0)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total / self.size if op == "mean" else total

        label = f"{what} of {x.numel()} {str(x.dtype).removeprefix('torch.')}"
        name, meeting = self._meet(label, x.detach().reshape(-1).clone(), finish)

        def read() -> None:
            with torch.no_grad():
                out.copy_(pick(meeting.result).view_as(out))

        return _ThreadWork(self, name, lambda: meeting.finished, read)

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        return self._collective(f"all_reduce {op}", x, x, op=op, pick=lambda total: total)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        n = out.numel()
        part = slice(self.rank * n, (self.rank + 1) * n)
        return self._collective("reduce_scatter", x, out, op="sum", pick=lambda total: total[part])

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._collective("all_gather", x, out, op="gather", pick=lambda total: total)

    def _letter(self, sender: int, receiver: int, tag: int) -> tuple[str, _Meeting, Callable[[], object]]:
        road = f"{sender}->{receiver}" + (f" by tag {tag}" if tag else "")
        mine = f"{'sent' if self.rank == sender else 'received'} {road}"
        number = self._counts[mine] = self._counts.get(mine, -1) + 1
        name = f"message {number} from rank {sender} to rank {receiver}"
        meetings = self._shared.meetings
        letter = meetings.setdefault((road, number), _Meeting(name))
        return name, letter, lambda: meetings.pop((road, number))

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        name, letter, _ = self._letter(self.rank, to, tag)
        letter.result, letter.finished = x.detach().clone(), True
        return _ThreadWork(self, name, lambda: True, lambda: None)

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        name, letter, forget = self._letter(source, self.rank, tag)

        def read() -> None:
            with torch.no_grad():
                x.copy_(letter.result)
            forget()

        return _ThreadWork(self, name, lambda: letter.finished, read)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        def pick(everything: Tensor) -> Tensor:
            return everything.view(self.size, self.size, -1)[:, self.rank]

        return self._collective("all_to_all", x, out, op="gather", pick=pick)

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        number = self._counts["sub"] = self._counts.get("sub", -1) + 1
        mine = tuple(next(ranks for ranks in groups if self.rank in ranks))
        shared = self._shared.subs.setdefault((number, mine), _Shared(len(mine)))
        some = _ThreadComm(shared, mine.index(self.rank), self.clock)
        some.block = self.block  # type: ignore[method-assign]  # the turn is given to all ranks
        return some

    def channel(self, *, patient: bool = False) -> Comm:
        return self.sub([range(self.size)])

    def gather_objects(self, thing: T) -> list[T]:
        name, meeting = self._meet("gather_objects", thing, list)
        self.block(name, lambda: meeting.finished)
        return list(meeting.result)

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        name, meeting = self._meet(f"broadcast_object from rank {root}", thing, lambda parts: parts[root])
        self.block(name, lambda: meeting.finished)
        result: T = meeting.result
        return result


class Threads:
    """N ranks in one process that take turns: deterministic; a deadlock is named at once.

    Args:
        size: number of ranks.
        clock: what all ranks read; the real one by default.
    """

    def __init__(self, size: int, clock: Clock | None = None) -> None:
        if size < 1:
            raise InputError(f"Threads({size}): at least 1 rank")
        self.size = size
        self.clock: Clock = clock or Wall()

    def run(self, f: Callable[[Comm], T]) -> list[T]:
        """Calls f(comm) on every rank; returns their results in rank order, or raises what the first to fail raised."""
        shared = _Shared(self.size)
        results: dict[int, T] = {}
        start = torch.get_rng_state()

        def rank_main(rank: int) -> None:
            shared.turns[rank].acquire()
            torch.set_rng_state(start)
            try:
                if not shared.failure:
                    results[rank] = f(_ThreadComm(shared, rank, self.clock))
            except BaseException as error:
                shared.failure = shared.failure or error
            finally:
                shared.ended.add(rank)
                shared.next_turn(rank)

        threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}") for r in range(self.size)]
        for thread in threads:
            thread.start()
        shared.turns[0].release()
        for thread in threads:
            thread.join()
        torch.set_rng_state(start)
        if shared.failure:
            raise shared.failure
        return [results[r] for r in range(self.size)]
