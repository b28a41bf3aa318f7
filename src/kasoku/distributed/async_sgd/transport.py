"""Requests between ranks, answered while all of them compute.

Note: progress. Between processes, one thread for each other rank receives its requests and answers them, so a reply
does not wait for the training loop of the rank that gives it. gloo's own threads move the bytes. Ranks that share
memory (segments.py) send only headers, and the callee reads and writes in place. Requests of one rank are answered in
order; those of several ranks in any order. Requests without a body go to the first owner on a channel of their own, so
they overtake bytes under way. Where ranks take turns in one process (`Threads`, a virtual clock), the callee's handler
is called directly, and the caller gives its turn away afterwards.
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
from kasoku.distributed.async_sgd.peers import Held, LostError, Peers, Pending
from kasoku.distributed.async_sgd.shared_memory import PLACE, Segments
from kasoku.distributed.async_sgd.survivors import Everybody, Table, on_survivors

ASK, REPLY = 2, 3  # tags of requests and replies, which share a channel; 1 is a heartbeat's
TOLD = 4  # numbers of a header: the kind of message, and up to three more
HEAD = TOLD + 2 * PLACE  # with the addresses of both bodies in shared memory, or zeros where the bytes are sent
BYE = 0  # the kind of message that ends the requests of a rank
_FULL = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)  # of this process; other errors are the peer's
T = TypeVar("T")
Head = Sequence[int]
Ranks = tuple[Sequence[int], Sequence[int]]
Hold = Callable[[str, Callable[[], bool]], None]  # (what for, until when)


class RequestHandler(Protocol):
    """Answers the requests of all other ranks."""

    def size(self, head: Head) -> tuple[int, torch.dtype]:
        """Elements and type of the request's body, and of the reply's; 0: no body."""
        ...

    def answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        """The reply's header; reads `body` and fills `out`, which may share memory with `body`."""
        ...

    def ready(self, rank: int, head: Head) -> bool:
        """Whether the request can be answered yet."""
        ...

    def gone(self, rank: int) -> None:
        """Called once when `rank` has died."""
        ...


class PendingReply:
    """A request whose reply has not been read yet."""

    def __init__(self, pending: Pending | None, reply: Tensor) -> None:
        self._pending, self._reply = pending, reply

    @property
    def done(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return self._pending is None or self._pending.over.is_set()

    def wait(self) -> list[int]:
        """The reply's header; its body is in `out` then. Raises LostError if the callee is dead."""
        if self._pending is not None:
            self._pending.wait()
        reply: list[int] = self._reply.tolist()
        return reply


class InProcess:
    """Ranks of one process that take turns: the callee's handler is called directly."""

    def __init__(self, comm: Comm, handler: RequestHandler) -> None:
        self._comm, self._handlers = comm, comm.gather_objects(handler)
        self.dead: dict[int, str] = {}
        self._block: Hold = comm.block

    def start(self) -> None:
        """Does nothing: there are no threads."""

    def check(self) -> None:
        """Does nothing: a failure is raised where it happens."""

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> PendingReply:
        """Sends a request to rank `to` once it can be answered."""
        handler, rank = self._handlers[to], self._comm.rank
        self._block(f"an answer of rank {to}", lambda: handler.ready(rank, head))
        return PendingReply(None, torch.tensor([*handler.answer(rank, head, body, out)]))

    def quiet(self) -> None:
        """Waits until all ranks have sent their last request."""
        self._comm.gather_objects(None)

    def meet(self, f: Callable[[Table], T]) -> tuple[T, list[int]]:
        """The result of f over all ranks, and the list of these."""
        return f(Everybody(self._comm)), list(range(self._comm.size))

    def stop(self) -> None:
        """Waits for all ranks."""
        self._comm.gather_objects(None)


class NetworkTransport:
    """Ranks in processes of their own; see Note: progress.

    Args:
        comm: a channel of its own.
        handler: answers the requests of the other ranks.
        ranks: those that send requests, and those that answer them.
        segments: the memory that this rank shares with others.
    """

    def __init__(self, comm: Comm, handler: RequestHandler, ranks: Ranks, segments: Segments) -> None:
        self._comm, self._segments = comm, segments
        self.hand_over(handler, ranks)
        self._threads: list[tuple[int, threading.Thread]] = []
        self._errors: list[BaseException] = []
        self.peers = Peers(comm, self._gone)
        self.dead = self.peers.dead
        self.changed = threading.Condition()

    def hand_over(self, handler: RequestHandler, ranks: Ranks) -> None:
        """Replaces the handler, and the ranks that send and answer requests, from the next `start` on."""
        asking, answering = ranks
        self._handler, me = handler, self._comm.rank
        self._from = [rank for rank in asking if rank != me and me in answering]
        self._to = [rank for rank in answering if rank != me and me in asking]
        self._first = next(iter(answering), me)

    def _ways(self, to: int) -> list[bool]:
        """The channels for requests to rank `to`: False the one for bodies, True the one without."""
        return [False, True] if to == self._first else [False]

    def _way(self, small: bool) -> Comm:
        return self.peers.small if small else self._comm

    def start(self) -> None:
        """Starts the threads that answer requests."""
        self.peers.start()
        self._threads = [
            (rank, threading.Thread(target=self._serve, args=both, name=f"kasoku answers {rank}", daemon=True))
            for rank in self._from
            if rank not in self.dead
            for both in [(rank, small) for small in self._ways(self._comm.rank)]
        ]
        for _, thread in self._threads:
            thread.start()

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> PendingReply:
        """Sends a request to rank `to`; until its reply, `body` must not be changed, nor `out` read.

        The callee may use `body` as working memory, so its content is undefined afterwards.
        """
        self.check()
        if to == self._comm.rank:
            return PendingReply(None, torch.tensor([*self._answered(to, head, body, out)]))
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
            self.peers.lose(to, "its connection broke")
        return PendingReply(self.peers.pending(to, [*works, Held(told)], small=small), reply)

    def check(self) -> None:
        """Raises InputError if the others have given this rank up, or the error of a thread that answers requests."""
        self.peers.check()
        if self._errors:
            raise self._errors[0]

    def _places(self, to: int, body: Tensor, out: Tensor) -> list[int]:
        """The addresses of both, if rank `to` can map their memory."""
        places = [self._segments.place(x) for x in (body, out)] if to in self._segments.near and len(body) else [()]
        return [number for place in places for number in place] if all(places) else []

    def quiet(self) -> None:
        """Announces the last request, and answers others' requests until their last. Raises as `check` does."""
        self.check()
        bye, none = torch.zeros(HEAD, dtype=torch.int64), []
        for rank, small in [(to, small) for to in self._to for small in self._ways(to)]:
            try:
                sent = self._way(small).send(bye, to=rank, tag=ASK)
                none += [self.peers.pending(rank, [sent, Held(bye)], small=small)]
            except RuntimeError:
                self.peers.lose(rank, "its connection broke")
        for pending in none:
            with suppress(LostError):
                pending.wait()
        for rank, thread in self._threads:
            self.peers.join(rank, thread, lambda: bool(self._errors))
        self.check()
        self._threads.clear()

    def meet(self, f: Callable[[Table], T]) -> tuple[T, list[int]]:
        """The result of f over the living ranks, and the list of these; f may be called again, so it must only read."""
        return on_survivors(self._comm, self.peers, f)

    def stop(self) -> None:
        """Ends all threads; all living ranks call it."""
        self.peers.stop()
        self._segments.forget()

    def _gone(self, rank: int) -> None:
        """Wakes the threads that wait for a rank that has died."""
        self._handler.gone(rank)
        with self.changed:
            self.changed.notify_all()

    def _answered(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        if not self._handler.ready(rank, head):
            with self.changed:
                self.changed.notify_all()  # this request may be the one that others wait for
                self.changed.wait_for(lambda: self._errors or self._handler.ready(rank, head))
            if not self._handler.ready(rank, head):
                raise self._errors[0]
        found = self._handler.answer(rank, head, body, out)
        with self.changed:
            self.changed.notify_all()
        return found

    def _serve(self, rank: int, small: bool) -> None:
        """The main function of a thread: answers one rank until its last request or its death."""
        try:
            self._serve_all(rank, self._way(small), [_Buffer(), _Buffer()])
        except LostError:
            self.peers.lose(rank, "its connection broke")
        except BaseException as error:
            with self.changed:  # wakes the threads that wait for a result of this one
                self._errors.append(error)
                self.changed.notify_all()
            self.peers.end()

    def _serve_all(self, rank: int, way: Comm, buffers: list[_Buffer]) -> None:
        """Receives a request into one buffer while the previous reply is sent from the other."""
        head = torch.zeros(HEAD, dtype=torch.int64)
        while True:
            buffers.reverse()
            buffer = buffers[0]
            with _lost(rank):
                way.receive(head, source=rank, tag=ASK).wait()
                told = head.tolist()
                buffer.clear()
                if told[0] == BYE:
                    return buffers[1].clear()
                n, dtype = self._handler.size(told)
                near = told[TOLD] > 0
                body = out = buffer.of(0 if near else n, dtype)
                if len(body):
                    way.receive(body, source=rank, tag=ASK).wait()
                sent = body
                if near and rank not in self.dead:
                    body, out = (self._segments.at(x, n, dtype) for x in (told[TOLD:-PLACE], told[-PLACE:]))
            if rank in self.dead:  # it was given up, so its update no longer counts
                raise LostError(rank)
            found = self._answered(rank, told[:TOLD], body, out)
            buffer.reply[: len(found)] = torch.tensor(found)
            with _lost(rank):
                buffer.leaves = [way.send(x, to=rank, tag=REPLY) for x in (buffer.reply, sent) if len(x)]


@contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        raise LostError(rank) from error


class _Buffer:
    """Memory for a request and then for its reply, as large as the largest so far.

    Attributes: `reply`: the reply's header. `leaves`: the sends under way.
    """

    def __init__(self) -> None:
        self.reply = torch.zeros(HEAD, dtype=torch.int64)
        self.leaves: list[Work] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def clear(self) -> None:
        """Waits until the reply has been sent."""
        while self.leaves:
            self.leaves.pop().wait()

    def of(self, n: int, dtype: torch.dtype) -> Tensor:
        """The first n elements of it."""
        size = n * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


def transport(comm: Comm, handler: RequestHandler, ranks: Ranks, segments: Segments) -> Any:
    """InProcess where ranks take turns in one process, else NetworkTransport; collective."""
    return NetworkTransport(comm, handler, ranks, segments) if comm.thread_safe else InProcess(comm, handler)
