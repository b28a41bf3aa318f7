"""Requests between ranks, which are answered while all of them compute.

Note: who makes progress. Between processes one thread for each other rank waits for its requests and answers them, so
an answer does not wait for the training of the rank that gives it; bytes move by gloo's own threads, or not at all
where ranks have memory in common (segments.py): then only heads are sent, and whoever answers reads and writes in
place. What one rank asks another is answered in the order of asking; what several ask comes in any order. Questions
without bytes go to the first that answers by a way of their own, so that they do not wait for bytes under way, and
overtake them. Where ranks take turns in one process (`Threads`, a virtual clock) the other's answer is called in place,
and the turn is given away after it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.parallel.life import Held, Life, LostError, Pending
from kasoku.parallel.segments import PLACE, Segments
from kasoku.parallel.survivors import Everybody, Table, met

ASK, REPLY = 2, 3  # tags: a rank's questions and its answers go the same way; 1 is a heartbeat's
TOLD = 4  # numbers: what a message is, and up to three more
HEAD = TOLD + 2 * PLACE  # before each message; where what comes and goes with it lies, or zeros where it is sent
BYE = 0  # no more questions
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process can map no more; all else is the other's end
T = TypeVar("T")
Head = Sequence[int]
Hold = Callable[[str, Callable[[], bool]], None]  # (what for, until when)


class Desk(Protocol):
    """What answers: the part that a rank has for all others."""

    def size(self, head: Head) -> tuple[int, torch.dtype]:
        """Elements and type of what comes with a question and goes with its answer; 0: nothing."""
        ...

    def answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        """Answers a rank: takes `body`, fills `out`, which may be the memory of `body`."""
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

    @property
    def done(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return self._pending is None or self._pending.over.is_set()

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

    def check(self) -> None:
        """Nothing fails beside the ranks."""

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
        segments: what this rank has in common with others.
    """

    def __init__(self, comm: Comm, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]], segments: Segments) -> None:
        self._comm, self._segments = comm, segments
        self.hand_over(desk, ranks)
        self._threads: list[tuple[int, threading.Thread]] = []
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
        self._first = next(iter(answering), me)

    def _ways(self, to: int) -> list[bool]:
        """By which ways this rank is asked: that of bytes, and the small one."""
        return [False, True] if to == self._first else [False]

    def _way(self, small: bool) -> Comm:
        return self.life.small if small else self._comm

    def start(self) -> None:
        """Begins to answer."""
        self.life.start()
        self._threads = [
            (rank, threading.Thread(target=self._serve, args=both, name=f"kasoku answers {rank}", daemon=True))
            for rank in self._from
            if rank not in self.dead
            for both in [(rank, small) for small in self._ways(self._comm.rank)]
        ]
        for _, thread in self._threads:
            thread.start()

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Question:
        """Asks rank `to`; `body` must not change, nor `out` be read, before the answer is there.

        After it `body` is as the other left it, which may have worked in it.
        """
        self.check()
        if to == self._comm.rank:
            return Question(None, torch.tensor([*self._answered(to, head, body, out)]))
        told, reply = torch.zeros(HEAD, dtype=torch.int64), torch.zeros(HEAD, dtype=torch.int64)
        told[: len(head)] = torch.tensor(head)
        place = self._places(to, body, out)
        told[TOLD : TOLD + len(place)] = torch.tensor(place)
        sent, come = (body[:0], out[:0]) if place else (body, out)
        small = to == self._first and not (len(body) or len(out))
        send, receive = self._way(small).send, self._way(small).receive
        works: list[Work] = []
        try:
            if to not in self.dead:
                works = [send(x, to=to, tag=ASK) for x in (told, sent) if len(x)]
                works += [receive(x, source=to, tag=REPLY) for x in (reply, come) if len(x)]
        except RuntimeError:
            self.life.lose(to, "its connection broke")
        return Question(self.life.pending(to, [*works, Held(told)], small=small), reply)

    def check(self) -> None:
        """Raises InputError where the others gave this rank up, and what went wrong in answering: it must end then."""
        self.life.check()
        if self._errors:
            raise self._errors[0]

    def _places(self, to: int, body: Tensor, out: Tensor) -> list[int]:
        """Where both lie, if that rank has them before it too."""
        places = [self._segments.place(x) for x in (body, out)] if to in self._segments.near and len(body) else [()]
        return [number for place in places for number in place] if all(places) else []

    def quiet(self) -> None:
        """Says that there are no more questions, and answers others' until they say so too. Raises as `check`."""
        self.check()
        bye, none = torch.zeros(HEAD, dtype=torch.int64), []
        for rank, small in [(to, small) for to in self._to for small in self._ways(to)]:
            try:
                sent = self._way(small).send(bye, to=rank, tag=ASK)
                none += [self.life.pending(rank, [sent, Held(bye)], small=small)]
            except RuntimeError:
                self.life.lose(rank, "its connection broke")
        for pending in none:
            with suppress(LostError):
                pending.wait()
        for rank, thread in self._threads:
            self.life.join(rank, thread, lambda: bool(self._errors))
        self.check()
        self._threads.clear()

    def meet(self, f: Callable[[Table], T]) -> tuple[T, list[int]]:
        """What f makes of the ranks that live, and who they are; it may be called again, so it must only read."""
        return met(self._comm, self.life, f)

    def stop(self) -> None:
        """Ends all threads, as all others that live do."""
        self.life.stop()
        self._segments.forget()

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

    def _serve(self, rank: int, small: bool) -> None:
        """Answers one rank until it says that it has no more questions, or dies; the main function of a thread."""
        try:
            self._serve_all(rank, self._way(small), [_Room(), _Room()])
        except LostError:
            self.life.lose(rank, "its connection broke")
        except BaseException as error:
            with self.changed:  # who waits here for what this thread would have brought hears of it
                self._errors.append(error)
                self.changed.notify_all()
            self.life.end()

    def _serve_all(self, rank: int, way: Comm, rooms: list[_Room]) -> None:
        """A question comes into one room while the answer to the one before leaves the other."""
        head = torch.zeros(HEAD, dtype=torch.int64)
        while True:
            rooms.reverse()
            room = rooms[0]
            with _lost(rank):
                way.receive(head, source=rank, tag=ASK).wait()
                told = head.tolist()
                room.clear()
                if told[0] == BYE:
                    return rooms[1].clear()
                n, dtype = self._desk.size(told)
                near = told[TOLD] > 0
                body = out = room.of(0 if near else n, dtype)
                if len(body):
                    way.receive(body, source=rank, tag=ASK).wait()
                sent = body
                if near and rank not in self.dead:
                    body, out = (self._segments.at(x, n, dtype) for x in (told[TOLD:-PLACE], told[-PLACE:]))
            if rank in self.dead:  # it was given up, and what it adds no longer counts
                raise LostError(rank)
            found = self._answered(rank, told[:TOLD], body, out)
            room.reply[: len(found)] = torch.tensor(found)
            with _lost(rank):
                room.leaves = [way.send(x, to=rank, tag=REPLY) for x in (room.reply, sent) if len(x)]


@contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        raise LostError(rank) from error


class _Room:
    """Memory for a question and then for its answer, which grows to the largest.

    Attributes: `reply`: the head of the answer. `leaves`: what is sent of it.
    """

    def __init__(self) -> None:
        self.reply = torch.zeros(HEAD, dtype=torch.int64)
        self.leaves: list[Work] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def clear(self) -> None:
        """Waits until the answer has left."""
        while self.leaves:
            self.leaves.pop().wait()

    def of(self, n: int, dtype: torch.dtype) -> Tensor:
        """So many elements of it."""
        size = n * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


def post(comm: Comm, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]], segments: Segments) -> Any:
    """Direct where ranks take turns in one process, else Wired; called by all of them together."""
    return Wired(comm, desk, ranks, segments) if comm.own_threads else Direct(comm, desk)
