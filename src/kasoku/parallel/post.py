"""Requests between ranks, which are answered while all of them compute.

Note: who makes progress. Between processes one thread for each other rank waits for its requests and answers them, so
an answer does not wait for the training of the rank that gives it; bytes move by gloo's own threads. What one rank asks
another is answered in the order of asking; what several ask comes in any order. Where ranks take turns in one process
(`Threads`, a virtual clock) the other's answer is called in place, and the turn is given away after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kasoku.core import Comm, Work

ASK, REPLY = 1, 2  # tags: a rank's questions and its answers go the same way
HEAD = 4  # numbers before each message: what it is, and up to three more
BYE = 0  # no more questions
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


class Question:
    """A question under way. `reply`: the head of its answer, after `wait()`."""

    def __init__(self, works: Sequence[Work], reply: Tensor) -> None:
        self._works, self._reply = list(works), reply

    def wait(self) -> list[int]:
        """The answer's head; what came with it is in `out` then."""
        while self._works:
            self._works.pop(0).wait()
        reply: list[int] = self._reply.tolist()
        return reply


class Direct:
    """Ranks of one process, which take turns: the answer is called in place."""

    def __init__(self, comm: Comm, desk: Desk) -> None:
        self._comm, self._desks = comm, comm.gather_objects(desk)
        self._block: Hold = getattr(comm, "block", lambda *_: None)

    def start(self) -> None:
        """Nothing runs beside the ranks."""

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Question:
        """Asks rank `to`, once it can answer."""
        desk, rank = self._desks[to], self._comm.rank
        self._block(f"an answer of rank {to}", lambda: desk.ready(rank, head))
        return Question([], torch.tensor([*desk.answer(rank, head, body, out)]))

    def stop(self) -> None:
        """Waits until no rank has a question any more."""
        self._comm.gather_objects(None)


class Wired:
    """Ranks in processes of their own; see Note: who makes progress.

    Args:
        comm: a channel of its own.
        desk: answers what others ask.
        ranks: those that ask, and those that answer.
    """

    def __init__(self, comm: Comm, desk: Desk, ranks: tuple[Sequence[int], Sequence[int]]) -> None:
        self._comm, self._desk = comm, desk
        asking, answering = ranks
        self._from = [rank for rank in asking if rank != comm.rank and comm.rank in answering]
        self._to = [rank for rank in answering if rank != comm.rank and comm.rank in asking]
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self.changed = threading.Condition()

    def start(self) -> None:
        """Begins to answer."""
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"kasoku answers {rank}", daemon=True)
            for rank in self._from
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Question:
        """Asks rank `to`; `body` must not change, nor `out` be read, before the answer is there."""
        if to == self._comm.rank:
            return Question([], torch.tensor([*self._answered(to, head, body, out)]))
        told, reply = torch.zeros(HEAD, dtype=torch.int64), torch.zeros(HEAD, dtype=torch.int64)
        told[: len(head)] = torch.tensor(head)
        send, receive = self._comm.send, self._comm.receive
        works = [send(told, to=to, tag=ASK), *([send(body, to=to, tag=ASK)] if len(body) else [])]
        works += [receive(reply, source=to, tag=REPLY), *([receive(out, source=to, tag=REPLY)] if len(out) else [])]
        return Question([*works, _Held(told)], reply)

    def stop(self) -> None:
        """Says that there are no more questions, and answers others' until they say so too. Raises what went wrong."""
        byes = [self._comm.send(torch.zeros(HEAD, dtype=torch.int64), to=rank, tag=ASK) for rank in self._to]
        for work in byes:
            work.wait()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._errors:
            raise self._errors[0]

    def _answered(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        if not self._desk.ready(rank, head):
            with self.changed:
                self.changed.notify_all()  # what was asked may be what others wait for
                self.changed.wait_for(lambda: self._desk.ready(rank, head))
        found = self._desk.answer(rank, head, body, out)
        with self.changed:
            self.changed.notify_all()
        return found

    def _serve(self, rank: int) -> None:
        """Answers one rank until it says that it has no more questions; the main function of a thread."""
        head, reply = torch.zeros(HEAD, dtype=torch.int64), torch.zeros(HEAD, dtype=torch.int64)
        room = _Room()
        sent: list[Work] = []
        try:
            while True:
                self._comm.receive(head, source=rank, tag=ASK).wait()
                told = head.tolist()
                if told[0] == BYE:
                    return
                (n_in, type_in), (n_out, type_out) = self._desk.sizes(told)
                body = room.at("body", n_in, type_in)
                if n_in:
                    self._comm.receive(body, source=rank, tag=ASK).wait()
                while sent:
                    sent.pop().wait()
                out = room.at("out", n_out, type_out)
                found = self._answered(rank, told, body, out)
                reply[: len(found)] = torch.tensor(found)
                sent = [self._comm.send(reply, to=rank, tag=REPLY)]
                sent += [self._comm.send(out, to=rank, tag=REPLY)] if n_out else []
        except BaseException as error:
            self._errors.append(error)
        finally:
            for work in sent if not self._errors else ():
                work.wait()


class _Held:
    """Keeps a tensor alive while it is sent."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


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
