"""Requests between ranks, answered while all of them compute.

Note: progress. Between processes, one thread for each other rank receives its requests and answers them, so a reply
does not wait for the callee's training loop. gloo's own threads move the bytes. Requests of one rank are answered in
order; those of several ranks in any order. Requests without a body go to the first owner on a channel of their own, so
they overtake bytes under way. Where ranks take turns in one process (`Threads`, a virtual clock), the callee's handler
is called directly, and the caller yields its turn afterwards.
"""

import threading

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.async_sgd.messages import ASK, REPLY, Messages, Reply, answered
from kasoku.distributed.async_sgd.parameter_server import Head, ParameterServer
from kasoku.distributed.liveness import daemon

HEADER = 4  # numbers of a Head, at most
BYE = 0  # the kind of message that ends the requests of a rank


class InProcess:
    """Ranks of one process that take turns: the callee's handler is called directly."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

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

    def stop(self) -> None:
        self._comm.gather_objects(None)


class NetworkTransport:
    """Ranks in processes of their own, on a channel of its own; see Note: progress."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.messages = comm, Messages(comm)
        self._threads: list[threading.Thread] = []

    def set_server(self, server: ParameterServer) -> None:
        """Sets what answers requests.

        Workers, which own the weights, send their updates to each other; all ranks ask the first on the small channel.
        """
        self._server, rank, workers = server, self._comm.rank, sorted(server.clocks)
        pairs = [(caller, owner, self._comm) for caller in workers for owner in workers]
        pairs += [(caller, workers[0], self.messages.small) for caller in range(len(server.leaders))]
        self._callers = [(caller, x) for caller, owner, x in pairs if owner == rank != caller]
        self._callees = [(owner, x) for caller, owner, x in pairs if caller == rank != owner]

    def start(self) -> None:
        """Starts the threads that answer requests."""
        self._threads = [daemon(f"kasoku answers {rank}", self._serve, rank, x) for rank, x in self._callers]

    def ask(self, to: int, head: Head, body: Tensor, out: Tensor) -> Reply:
        """Sends a request to rank `to`; until its reply, `body` must not be changed, nor `out` read.

        The callee may use `body` as working memory, so its content is undefined afterwards. Raises the error of a
        message that failed, or of an answering thread.
        """
        self.messages.check()
        if to == self._comm.rank:
            return answered(self._answer(to, head, body, out))
        request, reply = torch.zeros(HEADER, dtype=torch.int64), torch.zeros(HEADER, dtype=torch.int64)
        request[: len(head)] = torch.tensor(head)
        channel = self._comm if len(body) else self.messages.small
        return self.messages.exchange(to, channel, [request, body], [reply, out])

    def finish_requests(self) -> None:
        """Announces the last request, and answers other ranks' requests until their last. Raises as `ask` does."""
        bye = torch.zeros(HEADER, dtype=torch.int64)
        for rank, channel in self._callees:
            self.messages.exchange(rank, channel, [bye])
        for thread in self._threads:
            self.messages.join(thread)
        self._threads.clear()

    def stop(self) -> None:
        """Ends all threads; all ranks call it."""
        self.messages.stop()

    def _answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        server, messages = self._server, self.messages
        if not server.ready(rank, head):
            with messages.changed:
                messages.changed.notify_all()  # other requests may wait for this one
            messages.wait_until(lambda: server.ready(rank, head))
        reply = server.answer(rank, head, body, out)
        with messages.changed:
            messages.changed.notify_all()
        return reply

    def _serve(self, rank: int, channel: Comm) -> None:
        """The main function of a thread: answers one rank until its last request.

        Receives a request into one buffer while the previous reply is sent from the other.
        """
        header, buffers = torch.zeros(HEADER, dtype=torch.int64), [_Buffer(), _Buffer()]
        try:
            while True:
                buffers.reverse()
                buffer = buffers[0]
                channel.receive(header, source=rank, tag=ASK).wait()
                head = header.tolist()
                buffer.clear()
                if head[0] == BYE:
                    return buffers[1].clear()
                body = buffer.of(*self._server.size(head))
                if len(body):
                    channel.receive(body, source=rank, tag=ASK).wait()
                reply = self._answer(rank, head, body, body)
                buffer.reply[: len(reply)] = torch.tensor(reply)
                buffer.sends = [channel.send(x, to=rank, tag=REPLY) for x in (buffer.reply, body) if len(x)]
        except BaseException as error:
            self.messages.fail(error)


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
