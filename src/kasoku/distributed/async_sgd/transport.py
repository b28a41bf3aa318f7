"""Messages and requests between asynchronous ranks, answered while all of them compute.

Note: progress. Between processes, one thread for each other rank receives its requests and answers them, so a reply
does not wait for the callee's training loop. gloo's own threads move the bytes. Requests of one rank are answered in
order; those of several ranks in any order. Requests without a body go to the first owner on a channel of their own, so
they overtake bytes under way. Where ranks take turns in one process (`Threads`, a virtual clock), the callee's handler
is called directly, and the caller yields its turn afterwards.

Note: threads that wait. gloo tells only in a blocking wait whether a message has arrived. So one thread for each other
rank and channel waits for what was sent and is to be received, in order, and the training loop looks at the futures.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.async_sgd.parameter_server import Head, ParameterServer
from kasoku.distributed.async_sgd.worker import Reply, answered
from kasoku.distributed.liveness import daemon

ASK, REPLY = 1, 2  # tags of messages
HEADER = 4  # numbers of a Head, at most
BYE = 0  # the kind of message that ends the requests of a rank


class InProcess:
    """Ranks of one process that take turns: the callee's handler is called directly."""

    def __init__(self, comm: Comm, server: ParameterServer) -> None:
        self._comm, self._servers = comm, comm.gather_objects(server)

    def start(self) -> None:
        pass  # there are no threads

    def ask(self, to: int, head: Head, body: Tensor) -> Reply:
        """Sends a request to rank `to` once it can be answered."""
        server, rank = self._servers[to], self._comm.rank
        self._comm.block(f"a reply of rank {to}", lambda: server.ready(rank, head))
        return answered(server.answer(rank, head, body))

    def stop(self) -> None:
        """Waits until all ranks have sent their last request."""
        self._comm.gather_objects(None)


class NetworkTransport:
    """Ranks in processes of their own, on a channel of its own; see Note: progress. `server`: answers requests."""

    def __init__(self, comm: Comm, server: ParameterServer) -> None:
        self._comm, self._server = comm, server
        self._small = comm.channel(patient=True)  # for short messages, which do not wait for long ones
        self._changed = threading.Condition(threading.RLock())  # an answer may have made another request ready
        self._failure: BaseException | None = None  # the first one of a message or of an answer
        self._unfinished: set[Reply] = set()
        self._lines: dict[tuple[int, Comm], tuple[queue.SimpleQueue[Any], threading.Thread]] = {}
        self._threads: list[threading.Thread] = []
        rank, workers = comm.rank, sorted(server.clocks)
        # workers, which own the weights, send their updates to each other; all ranks ask the first on the small channel
        pairs = [(caller, owner, comm) for caller in workers for owner in workers]
        pairs += [(caller, workers[0], self._small) for caller in range(len(server.leaders))]
        self._callers = [(caller, x) for caller, owner, x in pairs if owner == rank != caller]
        self._callees = [(owner, x) for caller, owner, x in pairs if caller == rank != owner]

    def start(self) -> None:
        """Starts the threads that answer requests."""
        self._threads = [daemon(f"kasoku answers {rank}", self._serve, rank, x) for rank, x in self._callers]

    def ask(self, to: int, head: Head, body: Tensor) -> Reply:
        """Sends a request to rank `to`, whose reply takes its place in `body`; until then `body` must not be used.

        Raises the error of a message that failed, or of an answering thread.
        """
        self._check()
        if to == self._comm.rank:
            return answered(self._answer(to, head, body))
        request, reply = torch.zeros(HEADER, dtype=torch.int64), torch.zeros(HEADER, dtype=torch.int64)
        request[: len(head)] = torch.tensor(head)
        return self._exchange(to, self._comm if len(body) else self._small, [request, body], [reply, body])

    def stop(self) -> None:
        """Announces the last request, answers those of other ranks until their last, and ends all threads.

        All ranks call it. Raises as `ask` does.
        """
        bye = torch.zeros(HEADER, dtype=torch.int64)
        for rank, channel in self._callees:
            self._exchange(rank, channel, [bye])
        for thread in self._threads:
            self._join(thread)
        for line, thread in self._lines.values():
            line.put(None)
            self._join(thread)
        self._threads.clear()
        self._lines.clear()

    # ---- what this rank sends

    def _exchange(self, rank: int, channel: Comm, sends: Sequence[Tensor], receives: Sequence[Tensor] = ()) -> Reply:
        """Starts to send a request to a rank and to receive its reply. Empty tensors are left out."""
        self._check()
        try:
            works = [channel.send(x, to=rank, tag=ASK) for x in sends if len(x)]
            works += [channel.receive(x, source=rank, tag=REPLY) for x in receives if len(x)]
        except Exception as error:
            self._fail(error)
            raise
        reply: Reply = Future()
        with self._changed:
            self._check()
            self._unfinished.add(reply)
            if (rank, channel) not in self._lines:
                line: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._lines[rank, channel] = line, daemon(f"kasoku waits for {rank}", self._wait, line)
            self._lines[rank, channel][0].put((reply, works, receives[0] if receives else None))
        return reply

    def _wait(self, line: queue.SimpleQueue[tuple[Reply, Sequence[Work], Tensor | None] | None]) -> None:
        """The main function of a thread: waits for what was sent and is to be received, in order."""
        while item := line.get():
            reply, works, result = item
            try:
                for work in works:
                    work.wait()
            except BaseException as error:
                return self._fail(error)
            with self._changed:
                if reply in self._unfinished:
                    self._unfinished.remove(reply)
                    reply.set_result(result)
        return None

    # ---- what it answers

    def _answer(self, rank: int, head: Head, body: Tensor) -> Head:
        server = self._server
        if not server.ready(rank, head):
            with self._changed:
                self._changed.notify_all()  # other requests may wait for this one
                self._changed.wait_for(lambda: self._failure or server.ready(rank, head))
            self._check()
        reply = server.answer(rank, head, body)
        with self._changed:
            self._changed.notify_all()
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
                reply = self._answer(rank, head, body)
                buffer.reply[: len(reply)] = torch.tensor(reply)
                buffer.sends = [channel.send(x, to=rank, tag=REPLY) for x in (buffer.reply, body) if len(x)]
        except BaseException as error:
            self._fail(error)

    # ---- failures

    def _check(self) -> None:
        if self._failure:
            raise self._failure

    def _join(self, thread: threading.Thread) -> None:
        """Waits for the end of a thread. Raises as `ask` does."""
        while not self._failure and thread.is_alive():
            thread.join(0.05)
        self._check()

    def _fail(self, error: BaseException) -> None:
        """Ends all waits; they raise the error, as all later calls do."""
        with self._changed:
            self._failure = self._failure or error
            for reply in self._unfinished:
                reply.set_exception(self._failure)
            self._unfinished.clear()
            self._changed.notify_all()


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
