"""Several collectives, one after the other, that do not hold up who starts them.

Note: chains. Between GPUs a chain goes to a side stream, one for each key, and `wait()` lets the current stream wait.
Between CPUs it runs on one thread, in the order of calls, which is the same on every rank. Where ranks take turns in
one process (`Threads`) its first collective starts at once, and the rest runs in `wait()`, also in the order of calls.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future

import torch
from torch import Tensor

from kasoku.core import Work

Chain = Generator[Work, None, None]  # yields each collective that must end before it goes on


class Runner:
    """Runs chains without holding up who starts them; see Note: chains.

    Args:
        threads: the collectives may be called from any thread.
    """

    def __init__(self, *, threads: bool) -> None:
        self._threads = threads
        self._open: deque[_Turn] = deque()
        self._queue: _Queue | None = None
        self._streams: dict[str, torch.cuda.Stream] = {}

    def start(self, key: str, x: Tensor, chain: Chain) -> Work:
        """Starts a chain that leaves its result in x."""
        if not self._threads:
            turn = _Turn(chain, self._finish)
            self._open.append(turn)
            return turn
        if x.is_cuda:
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
            return _Aside(chain, x, self._streams[key])
        self._queue = self._queue or _Queue()
        return self._queue.start(chain)

    def _finish(self, last: _Turn | None = None) -> None:
        """Ends what was started, in the order of calls, up to `last`."""
        while self._open and not (last and last.done()):
            self._open.popleft().finish()

    def settle(self) -> None:
        """Returns when nothing is under way; no thread is left."""
        self._finish()
        for stream in self._streams.values():
            stream.synchronize()
        if self._queue is not None:
            self._queue.end()
            self._queue = None


class _Turn:
    """A chain that goes on where it, or one started later, is waited for."""

    def __init__(self, chain: Chain, finish_up_to: Callable[[_Turn], None]) -> None:
        self._chain, self._finish_up_to = chain, finish_up_to
        self._work = next(chain, None)

    def done(self) -> bool:
        return self._work is None

    def finish(self) -> None:
        while self._work is not None:
            self._work.wait()
            self._work = next(self._chain, None)

    def wait(self) -> None:
        self._finish_up_to(self)


class _Aside:
    """A chain on a side stream: issued whole, since between GPUs a wait holds up the stream and not the host."""

    def __init__(self, chain: Chain, x: Tensor, stream: torch.cuda.Stream) -> None:
        self._device = x.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            for work in chain:
                work.wait()
            self._event.record(stream)
        x.record_stream(stream)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Queue:
    """Chains on one thread, in the order of calls; after an error all later ones fail with it."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Chain, _Later] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="reducer", daemon=True)
        self._thread.start()

    def start(self, chain: Chain) -> Work:
        later = _Later()
        self._todo.put((chain, later))
        return later

    def end(self) -> None:
        """Returns when all chains have ended and the thread too."""
        self._todo.put(None)
        self._thread.join()

    def _main(self) -> None:
        error: BaseException | None = None
        while (item := self._todo.get()) is not None:
            chain, later = item
            try:
                for work in chain if error is None else ():
                    work.wait()
            except BaseException as e:
                error = e  # the other ranks' next collective is not ours any more
            later.end(error)


class _Later:
    """The end of a chain on another thread."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
