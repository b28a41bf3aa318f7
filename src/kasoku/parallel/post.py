"""Requests between ranks, which are answered while all of them compute.

Note: who makes progress. Between processes one thread for each other rank waits for its requests and answers them, so
an answer does not wait for the training of the rank that gives it; bytes move by gloo's own threads. What one rank asks
another is answered in the order of asking; what several ask comes in any order. Where ranks take turns in one process
(`Threads`, a virtual clock) the other's answer is called in place, and the turn is given away after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.parallel.life import Held, Life, LostError, Pending
from kasoku.parallel.survivors import Everybody, Table, met

ASK, REPLY = 1, 2  # tags: a rank's questions and its answers go the same way
HEAD = 4  # numbers before each message: what it is, and up to three more
BYE = 0  # no more questions
T = TypeVar("T")
Head = Sequence[int]
Hold = Callable[[str, Callable[[], bool]], None]  # (what for, until when)


class Desk(Protocol):
    """What answers: the part that a rank has for all others."""

    def sizes(self, head: Head) -> tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]:
        """Elements and type of what comes with a question, and of what goes with its answer; 0: nothing."""
        ...

    def answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        """Answers a rank: takes `body`, fills `out`."""
        ...

    def ready(self, rank: int, head: Head) -> bool:
        """Whether it can be answered yet."""
        ...

    def gone(self, rank: int) -> None:
        """This rank is dead."""
        ...


class Question:
    """A question under way. `reply`: the head of its answer, after `wait()`."""

    def __init__(self, pending: Pending | None, reply: Tensor) -> None:
        self._pending, self._reply = pending, reply

    def wait(self) -> list[int]:
        """The answer's head; what came with it is in `out` then. Raises LostError where who was asked is dead."""
        if self._pending is not None:
            self._pending.wait()
        reply: list[int] = self._reply.tolist()
        return reply


class Direct:
    """Ranks of one process, which take turns: the answer is called in place."""

    def __init__(self, comm: Comm, desk: Desk) -> None:
        self._comm, self._desks = comm, comm.gather_objects(desk)
        self.dead: dict[int, str] = {}
        self._block: Hold = getattr(comm, "block", lambda *_: None)

    def start(self) -> None:
        """Nothing runs beside the ranks."""

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Question:
        """Asks rank `to`, once it can answer."""
        desk, rank = self._desks[to], self._comm.rank
        self._block(f"an answer of rank {to}", lambda: desk.ready(rank, head))
        return Question(None, torch.tensor([*desk.answer(rank, head, body, out)]))

    def quiet(self) -> None:
        """Waits until no rank has a question any more."""
        self._comm.gather_objects(None)

    def meet(self, f: Callable[[Table], T]) -> tuple[T, list[int]]:
        """What f makes of all ranks, and who they are."""
        return f(Everybody(self._comm)), list(range(self._comm.size))

    def stop(self) -> None:
        """Waits for all."""
        self._comm.gather_objects(None)


class Wired:
    """Ranks in processes of their own; see Note: who makes progress.

    Args:
        comm: a channel of its own.
        desk: answers what others ask.
        ranks: those that ask, and those that answer.
    """

    def __init__(self, comm: Comm, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]]) -> None:
        self._comm = comm
        self.hand_over(desk, ranks)
        self._threads: dict[int, threading.Thread] = {}
        self._errors: list[BaseException] = []
        self.life = Life(comm, self._gone)
        self.dead = self.life.dead
        self.changed = threading.Condition()

    def hand_over(self, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]]) -> None:
        """From the next start on this one answers, and these ask and answer."""
        asking, answering = ranks
        self._desk, me = desk, self._comm.rank
        self._from = [rank for rank in asking if rank != me and me in answering]
        self._to = [rank for rank in answering if rank != me and me in asking]

    def start(self) -> None:
        """Begins to answer."""
        self.life.start()
        self._threads = {
            rank: threading.Thread(target=self._serve, args=(rank,), name=f"kasoku answers {rank}", daemon=True)
            for rank in self._from
            if rank not in self.dead
        }
        for thread in self._threads.values():
            thread.start()

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Question:
        """Asks rank `to`; `body` must not change, nor `out` be read, before the answer is there."""
        if to == self._comm.rank:
            return Question(None, torch.tensor([*self._answered(to, head, body, out)]))
        told, reply = torch.zeros(HEAD, dtype=torch.int64), torch.zeros(HEAD, dtype=torch.int64)
        told[: len(head)] = torch.tensor(head)
        send, receive = self._comm.send, self._comm.receive
        works: list[Work] = []
        try:
            if to not in self.dead:
                works = [send(told, to=to, tag=ASK), *([send(body, to=to, tag=ASK)] if len(body) else [])]
                works += [receive(reply, source=to, tag=REPLY)]
                works += [receive(out, source=to, tag=REPLY)] if len(out) else []
        except RuntimeError:
            self.life.lose(to, "its connection broke")
        return Question(self.life.pending(to, [*works, Held(told)]), reply)

    def quiet(self) -> None:
        """Says that there are no more questions, and answers others' until they say so too. Raises what went wrong."""
        bye, none = torch.zeros(HEAD, dtype=torch.int64), []
        for rank in self._to:
            try:
                none += [self.life.pending(rank, [self._comm.send(bye, to=rank, tag=ASK), Held(bye)])]
            except RuntimeError:
                self.life.lose(rank, "its connection broke")
        for pending in none:
            with suppress(LostError):
                pending.wait()
        for rank, thread in self._threads.items():
            self.life.join(rank, thread)
        self._threads.clear()
        if self._errors:
            raise self._errors[0]

    def meet(self, f: Callable[[Table], T]) -> tuple[T, list[int]]:
        """What f makes of the ranks that live, and who they are; it may be called again, so it must only read."""
        return met(self._comm, self.life, f)

    def stop(self) -> None:
        """Ends all threads, as all others that live do."""
        self.life.stop()

    def _gone(self, rank: int) -> None:
        """What a rank that died was waited for is waited for no longer."""
        self._desk.gone(rank)
        with self.changed:
            self.changed.notify_all()

    def _answered(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        if not self._desk.ready(rank, head):
            with self.changed:
                self.changed.notify_all()  # what was asked may be what others wait for
                self.changed.wait_for(lambda: self._errors or self._desk.ready(rank, head))
            if not self._desk.ready(rank, head):
                raise self._errors[0]
        found = self._desk.answer(rank, head, body, out)
        with self.changed:
            self.changed.notify_all()
        return found

    def _serve(self, rank: int) -> None:
        """Answers one rank until it says that it has no more questions, or dies; the main function of a thread."""
        try:
            self._serve_all(rank, torch.zeros(HEAD, dtype=torch.int64), _Room())
        except LostError:
            self.life.lose(rank, "its connection broke")
        except BaseException as error:
            with self.changed:  # who waits here for what this thread would have brought hears of it
                self._errors.append(error)
                self.changed.notify_all()

    def _serve_all(self, rank: int, head: Tensor, room: _Room) -> None:
        reply = torch.zeros(HEAD, dtype=torch.int64)
        sent: list[Work] = []
        while True:
            with _lost(rank):
                self._comm.receive(head, source=rank, tag=ASK).wait()
            told = head.tolist()
            (n_in, type_in), (n_out, type_out) = self._desk.sizes(told) if told[0] else ((0, head.dtype),) * 2
            body = room.at("body", n_in, type_in)
            with _lost(rank):
                if n_in:
                    self._comm.receive(body, source=rank, tag=ASK).wait()
                while sent:
                    sent.pop().wait()
            if told[0] == BYE:
                return
            if rank in self.dead:  # it was given up, and what it adds no longer counts
                raise LostError(rank)
            out = room.at("out", n_out, type_out)
            found = self._answered(rank, told, body, out)
            reply[: len(found)] = torch.tensor(found)
            with _lost(rank):
                sent = [self._comm.send(reply, to=rank, tag=REPLY)]
                sent += [self._comm.send(out, to=rank, tag=REPLY)] if n_out else []


@contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostError(rank) from error


class _Room:
    """Memory that grows to the largest message, by name."""

    def __init__(self) -> None:
        self._bytes: dict[str, Tensor] = {}

    def at(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """So many elements of it."""
        size = n * dtype.itemsize
        if self._bytes.get(name) is None or len(self._bytes[name]) < size:
            self._bytes[name] = torch.empty(size, dtype=torch.uint8)
        return self._bytes[name][:size].view(dtype)


def post(comm: Comm, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Direct where ranks take turns in one process, else Wired; called by all of them together."""
    return Wired(comm, desk, ranks) if comm.own_threads else Direct(comm, desk)
