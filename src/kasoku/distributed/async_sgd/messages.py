"""Messages between asynchronous ranks, and the threads that wait for them.

Note: threads. gloo tells only in a blocking wait whether a message has arrived. So one thread for each other rank and
channel waits for what was sent and for what is to be received, in order, and the training loop looks at the futures.

Note: deaths. A message that fails ends all others, and the training loop raises its error at the next one. What follows
is the same as for synchronous ranks (distributed/liveness.py, Note: two policies).
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.liveness import daemon

ASK, REPLY = 1, 2  # tags of messages
Tensors = Sequence[Tensor]
Reply = Future[Any]  # the first tensor received


def answered(result: Any) -> Reply:
    """A reply that is there already."""
    reply: Reply = Future()
    reply.set_result(result)
    return reply


class Messages:
    """One rank's messages to the others.

    Attributes: `small`: a channel for short messages, which do not wait for long ones. `changed`: to be notified when
        something happens that `wait_until` waits for.
    """

    def __init__(self, comm: Comm) -> None:
        self.small = comm.channel(patient=True)
        self.changed = threading.Condition(threading.RLock())
        self._failure: BaseException | None = None
        self._unfinished: set[Reply] = set()
        self._lines: dict[tuple[int, Comm], tuple[queue.SimpleQueue[Any], threading.Thread]] = {}

    def exchange(self, rank: int, channel: Comm, sends: Tensors, receives: Tensors = ()) -> Reply:
        """Starts to send a request to a rank and to receive its reply. Empty tensors are left out."""
        self.check()
        try:
            works = [channel.send(x, to=rank, tag=ASK) for x in sends if len(x)]
            works += [channel.receive(x, source=rank, tag=REPLY) for x in receives if len(x)]
        except Exception as error:
            self.fail(error)
            raise
        reply: Reply = Future()
        with self.changed:
            self.check()
            self._unfinished.add(reply)
            if (rank, channel) not in self._lines:
                line: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._lines[rank, channel] = line, daemon(f"kasoku waits for {rank}", self._wait, line)
            self._lines[rank, channel][0].put((reply, works, receives[0] if receives else None))
        return reply

    def stop(self) -> None:
        """Ends all threads, once the messages so far have ended."""
        for line, thread in self._lines.values():
            line.put(None)
            self.join(thread)
        self._lines.clear()

    def check(self) -> None:
        """Raises the first error of a message or of an answer, if there was one."""
        if self._failure:
            raise self._failure

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits for something that an answer may change. Raises as `check` does."""
        with self.changed:
            self.changed.wait_for(lambda: self._failure or ready())
        self.check()

    def join(self, thread: threading.Thread) -> None:
        """Waits for the end of a thread. Raises as `check` does."""
        while not self._failure and thread.is_alive():
            thread.join(0.05)
        self.check()

    def fail(self, error: BaseException) -> None:
        """Ends all waits; `check` and what is waited for raise the error."""
        with self.changed:
            self._failure = self._failure or error
            for reply in self._unfinished:
                reply.set_exception(self._failure)
            self._unfinished.clear()
            self.changed.notify_all()

    def _wait(self, line: queue.SimpleQueue[tuple[Reply, Sequence[Work], Tensor | None] | None]) -> None:
        while item := line.get():
            reply, works, result = item
            try:
                for work in works:
                    work.wait()
            except BaseException as error:
                return self.fail(error)
            with self.changed:
                if reply in self._unfinished:
                    self._unfinished.remove(reply)
                    reply.set_result(result)
        return None
