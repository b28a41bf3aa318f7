"""Requests between ranks, answered while all of them compute.

Note: progress. Between processes, one thread for each other rank receives its requests and answers them, so a reply
does not wait for the callee's training loop. gloo's own threads move the bytes. Requests of one rank are answered in
order; those of several ranks in any order. Requests without a body go to the first owner on a channel of their own, so
they overtake bytes under way. Where ranks take turns in one process (`Threads`, a virtual clock), the callee's handler
is called directly, and the caller yields its turn afterwards.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.async_sgd.parameter_server import Head, ParameterServer
from kasoku.distributed.async_sgd.peers import ASK, REPLY, LostError, Peers, Reply, answered
from kasoku.distributed.async_sgd.survivors import Table, on_survivors
from kasoku.distributed.liveness import daemon

HEADER = 4  # numbers of a Head, at most
BYE = 0  # the kind of message that ends the requests of a rank
T = TypeVar("T")


class InProcess:
    """Ranks of one process that take turns: the callee's handler is called directly."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.dead: dict[int, str] = {}

    def start(self) -> None:
        pass  # there are no threads

    def set_server(self, server: ParameterServer) -> None:
        self._servers = self._comm.gather_objects(server)

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Reply:
        """Sends a request to rank `to` once it can be answered."""
        server, rank = self._servers[to], self._comm.rank
        self._comm.block(f"a reply of rank {to}", lambda: server.ready(rank, head))
        return answered(server.answer(rank, head, body, out))

    def finish_requests(self) -> None:
        """Waits until all ranks have sent their last request."""
        self._comm.gather_objects(None)

    def at_sync_point(self, f: Callable[[Table], T]) -> T:
        """The result of f over all ranks."""
        return f(Table(self._comm))

    def stop(self) -> None:
        self._comm.gather_objects(None)


class NetworkTransport:
    """Ranks in processes of their own, on a channel of its own; see Note: progress."""

    def __init__(self, comm: Comm, leaders: Sequence[int]) -> None:
        self._comm = comm
        self._threads: list[tuple[int, threading.Thread]] = []
        self.peers = Peers(comm, leaders, lambda rank: self._server.rank_died(rank))
        self.dead = self.peers.dead

    def set_server(self, server: ParameterServer) -> None:
        """Sets what answers requests from the next `start` on.

        Workers, which own the weights, send their updates to each other; all ranks ask the first on the small channel.
        """
        self._server, rank, workers = server, self._comm.rank, sorted(server.clocks)
        pairs = [(caller, owner, self._comm) for caller in workers for owner in workers]
        pairs += [(caller, workers[0], self.peers.small) for caller in server.leaders]
        self._callers = [(caller, x) for caller, owner, x in pairs if owner == rank != caller]
        self._callees = [(owner, x) for caller, owner, x in pairs if caller == rank != owner]

    def start(self) -> None:
        """Starts the threads that answer requests."""
        self.peers.start()
        callers = [(rank, x) for rank, x in self._callers if rank not in self.dead]
        self._threads = [(rank, daemon(f"kasoku answers {rank}", self._serve, rank, x)) for rank, x in callers]

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Reply:
        """Sends a request to rank `to`; until its reply, `body` must not be changed, nor `out` read.

        The callee may use `body` as working memory, so its content is undefined afterwards. Raises LostRankError if
        the other ranks took this one for dead, or the error of an answering thread.
        """
        self.peers.check()
        if to == self._comm.rank:
            return answered(self._answer(to, head, body, out))
        request, reply = torch.zeros(HEADER, dtype=torch.int64), torch.zeros(HEADER, dtype=torch.int64)
        request[: len(head)] = torch.tensor(head)
        return self.peers.exchange(to, self._comm if len(body) else self.peers.small, [request, body], [reply, out])

    def finish_requests(self) -> None:
        """Announces the last request, and answers other ranks' requests until their last. Raises as `ask` does."""
        self.peers.check()
        bye = torch.zeros(HEADER, dtype=torch.int64)
        replies = [self.peers.exchange(rank, channel, [bye]) for rank, channel in self._callees]
        for reply in replies:
            reply.exception()  # waits
        for rank, thread in self._threads:
            self.peers.join(rank, thread)
        self.peers.check()
        self._threads.clear()

    def at_sync_point(self, f: Callable[[Table], T]) -> T:
        """The result of f over the living ranks; f may be called again, so it must only read."""
        return on_survivors(self._comm, self.peers, f)

    def stop(self) -> None:
        """Ends all threads; all living ranks call it."""
        self.peers.stop()

    def _answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        server, changed = self._server, self.peers.changed
        if not server.ready(rank, head):
            with changed:
                changed.notify_all()  # other requests may wait for this one
            self.peers.wait_until(lambda: server.ready(rank, head))
        reply = server.answer(rank, head, body, out)
        with changed:
            changed.notify_all()
        return reply

    def _serve(self, rank: int, channel: Comm) -> None:
        """The main function of a thread: answers one rank until its last request or its death.

        Receives a request into one buffer while the previous reply is sent from the other.
        """
        header, buffers = torch.zeros(HEADER, dtype=torch.int64), [_Buffer(), _Buffer()]
        try:
            while True:
                buffers.reverse()
                buffer = buffers[0]
                with _errors_are_deaths(rank):
                    channel.receive(header, source=rank, tag=ASK).wait()
                    head = header.tolist()
                    buffer.clear()
                    if head[0] == BYE:
                        return buffers[1].clear()
                    body = buffer.of(*self._server.size(head))
                    if len(body):
                        channel.receive(body, source=rank, tag=ASK).wait()
                if rank in self.dead:  # its update no longer counts
                    raise LostError(rank)
                reply = self._answer(rank, head, body, body)
                buffer.reply[: len(reply)] = torch.tensor(reply)
                with _errors_are_deaths(rank):
                    buffer.sends = [channel.send(x, to=rank, tag=REPLY) for x in (buffer.reply, body) if len(x)]
        except LostError:
            self.peers.lose(rank, "its connection broke")
        except BaseException as error:
            self.peers.fail(error)


@contextmanager
def _errors_are_deaths(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostError(rank) from error


class _Buffer:
    """Memory for a request and then for its reply, as large as the largest so far."""

    def __init__(self) -> None:
        self.reply = torch.zeros(HEADER, dtype=torch.int64)  # its header
        self.sends: list[Work] = []  # under way
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def clear(self) -> None:
        """Waits until the reply has been sent."""
        while self.sends:
            self.sends.pop().wait()

    def of(self, n: int, dtype: torch.dtype) -> Tensor:
        """Its first n elements."""
        size = n * dtype.itemsize
        self._bytes.resize_(max(size, len(self._bytes)))
        return self._bytes[:size].view(dtype)
