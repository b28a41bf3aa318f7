"""N ranks in one process that take turns: deterministic, for tests and for simulated clusters.

Note: turns. Exactly one rank runs at any moment. It gives the turn away only where it waits, always to the next rank
that can go on. So a run is deterministic, sums are taken in rank order, and when no rank can go on the deadlock is
detected at once and named. torch's CPU random state travels with the turn: each rank has its own, as a process would.
"""

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from kasoku.core.clock import Clock, Wall
from kasoku.core.comm import Comm, Work
from kasoku.core.errors import InputError

T = TypeVar("T")
Pick = Callable[[Tensor], Tensor]  # a rank's part of a result


class DeadlockError(RuntimeError):
    """No rank can go on; the message says what each one waits for."""


class _Shared:
    """The state that the ranks of one `Threads` share: turns, collectives, and what each rank waits for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.collectives: dict[int, tuple[str, dict[int, Any], list[Any]]] = {}  # name, parts by rank, the result
        self.messages: dict[tuple[int, int, int, int], Tensor] = {}  # by sender, receiver, tag and number
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.ended: set[int] = set()
        self.failure: BaseException | None = None
        self.subs: dict[tuple[int, tuple[int, ...]], _Shared] = {}

    def next_turn(self, rank: int) -> None:
        """Gives the turn to the next rank that can go on; raises the deadlock where there is none."""
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


class _ThreadWork(Work):
    def __init__(self, comm: "_ThreadComm", what: str, ready: Callable[[], bool], finish: Callable[[], object]) -> None:
        self._comm, self._what, self._ready, self._finish = comm, what, ready, finish
        self._read = False

    def done(self) -> bool:
        return self._read or self._ready()

    def wait(self) -> None:
        if not self._read:
            self._comm.block(self._what, self._ready)
            self._read = True
            self._finish()


class _ThreadComm(Comm):
    def __init__(self, shared: _Shared, rank: int, clock: Clock) -> None:
        self.rank, self.size, self.clock = rank, shared.size, clock
        self._shared = shared
        self._numbers: dict[object, Iterator[int]] = defaultdict(itertools.count)

    def block(self, what: str, ready: Callable[[], bool]) -> None:
        """Gives the turn away until `ready()`; also when it is ready already, so that turns are regular."""
        shared = self._shared
        shared.waiting[self.rank] = (what, ready)
        state = torch.get_rng_state()
        shared.next_turn(self.rank)
        shared.turns[self.rank].acquire()
        torch.set_rng_state(state)
        del shared.waiting[self.rank]
        if shared.failure:
            raise shared.failure

    def _start(self, what: str, part: Any, combine: Callable[[list[Any]], T], use: Callable[[T], object]) -> Work:
        """Joins a collective: the last rank combines the parts of all ranks; each rank uses the result in `wait()`."""
        number = next(self._numbers["collective"])
        theirs, parts, result = self._shared.collectives.setdefault(number, (what, {}, []))
        if theirs != what:
            raise InputError(f"rank {self.rank} calls {what}, the other ranks call {theirs} (collective {number})")
        parts[self.rank] = part
        if len(parts) == self.size:
            result.append(combine([parts[r] for r in range(self.size)]))
            del self._shared.collectives[number]
        return _ThreadWork(self, f"collective {number} ({what})", lambda: bool(result), lambda: use(result[0]))

    def _collective(
        self, what: str, x: Tensor, out: Tensor, combine: Callable[[list[Tensor]], Tensor], pick: Pick = lambda x: x
    ) -> Work:
        label = f"{what} of {x.numel()} {str(x.dtype).removeprefix('torch.')}"

        @torch.no_grad()
        def read(whole: Tensor) -> None:
            out.copy_(pick(whole).view_as(out))

        return self._start(label, x.detach().reshape(-1).clone(), combine, read)

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        if op not in ("sum", "mean", "max"):
            raise InputError(f'all_reduce(op="{op}"): one of "sum", "mean", "max"')
        return self._collective(f"all_reduce {op}", x, x, lambda parts: _reduced(parts, op))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        return self._collective("reduce_scatter", x, out, _reduced, lambda x: x.tensor_split(self.size)[self.rank])

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._collective("all_gather", x, out, torch.cat)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._collective(
            "all_to_all", x, out, torch.cat, lambda x: x.view(self.size, self.size, -1)[:, self.rank]
        )

    def _message(self, sender: int, receiver: int, tag: int) -> tuple[str, tuple[int, int, int, int]]:
        """The name and the key of the next message from one rank to another."""
        number = next(self._numbers[self.rank == sender, sender, receiver, tag])
        return f"message {number} from rank {sender} to rank {receiver}", (sender, receiver, tag, number)

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        name, key = self._message(self.rank, to, tag)
        self._shared.messages[key] = x.detach().clone()
        return _ThreadWork(self, name, lambda: True, lambda: None)

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        name, key = self._message(source, self.rank, tag)
        messages = self._shared.messages

        @torch.no_grad()
        def read() -> None:
            x.copy_(messages.pop(key))

        return _ThreadWork(self, name, lambda: key in messages, read)

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        number = next(self._numbers["sub"])
        mine = tuple(next(ranks for ranks in groups if self.rank in ranks))
        shared = self._shared.subs.setdefault((number, mine), _Shared(len(mine)))
        comm = _ThreadComm(shared, mine.index(self.rank), self.clock)
        comm.block = self.block  # type: ignore[method-assign]  # the turn goes to a rank of any group
        return comm

    def gather_objects(self, thing: T) -> list[T]:
        things: list[T] = []
        self._start("gather_objects", thing, list, things.extend).wait()
        return things


def _reduced(parts: list[Tensor], op: str = "sum") -> Tensor:
    if op == "max":
        return torch.stack(parts).amax(0)
    total = functools.reduce(torch.add, parts)
    return total / len(parts) if op == "mean" else total


class Threads:
    """N ranks in one process that take turns: deterministic; a deadlock is named at once.

    `clock`: of all ranks; the real one by default.
    """

    def __init__(self, size: int, clock: Clock | None = None) -> None:
        if size < 1:
            raise InputError(f"Threads({size}): at least 1 rank")
        self.size = size
        self.clock: Clock = clock or Wall()

    def run(self, f: Callable[[Comm], T]) -> list[T]:
        """Calls f(comm) on every rank; returns the results in rank order, or raises the first error."""
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

        with ThreadPoolExecutor(self.size, thread_name_prefix="rank") as pool:
            pool.map(rank_main, range(self.size))
            shared.turns[0].release()
        torch.set_rng_state(start)
        if shared.failure:
            raise shared.failure
        return [results[r] for r in range(self.size)]
