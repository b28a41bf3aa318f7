"""Threads that read and decode images; their number is tuned while training goes on."""

import atexit
import math
import queue
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PERIOD = 8  # batches between two decisions, at first
_RARE = 512  # at last
_GAIN = 0.98  # batches come in less than this share of the time: a change was worth it
_WAITING = 0.05  # of the time of a batch: the input is what is waited for
_END_S = 1.0  # that is waited for threads when Python ends
_POOLS: "weakref.WeakSet[ThreadPool]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread that still decodes when Python ends would abort the process; one that hangs in a read is left."""
    pools, until = [*_POOLS], time.monotonic() + _END_S
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join(until)


class ThreadPool:
    """Threads whose number may change: decoders release the interpreter's lock."""

    def __init__(self, size: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.size, self._closed = 0, False
        self.resize(size)
        _POOLS.add(self)

    def submit(self, f: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, lambda: f(*args, **named)))
        return future

    def resize(self, size: int) -> None:
        """Changes the number of threads; surplus ones end once all tasks so far have begun."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(size - self.size):
            thread = threading.Thread(target=self._work, name="kasoku-decode", daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in range(self.size - size):
            self._tasks.put(None)
        self.size = size

    def close(self) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        """Has each thread end with the task in hand."""
        self._closed = True
        self.resize(0)

    def join(self, until: float = math.inf) -> None:
        """Waits for the threads until time.monotonic() is `until`."""
        for thread in self._threads:
            thread.join(None if until == math.inf else max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if self._closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised where the result is waited for
                    future.set_exception(error)
            del task, future, call  # what the task held is not kept until the next one comes


class Autotuner:
    """How many threads: a quarter more or fewer is tried now and then, and kept where batches come faster for it.

    More are tried while the loop waits for its input; fewer where it does not and decoding takes cores from computing.
    What does not help is tried again after four times as many batches, since other programs come and go.
    """

    def __init__(self, size: int, most: int, *, shared: bool) -> None:
        self.size, self.most, self.shared = size, most, shared
        self._times_s: list[tuple[float, float]] = []  # of each batch: from request to request, waited
        self._before: tuple[int, float] | None = None  # the size before the trial, and its seconds a batch
        self._period = _PERIOD
        self._fewer = False  # what is tried next where both may help

    def batch(self, took_s: float, waited_s: float) -> int:
        """After a batch, its seconds from request to request and those waited: returns the number of threads to use."""
        self._times_s.append((took_s, waited_s))
        if len(self._times_s) < (_PERIOD if self._before else self._period):
            return self.size
        now_s, waiting_s = map(statistics.median, zip(*self._times_s, strict=True))
        self._times_s.clear()
        if self._before:
            size, before_s = self._before
            self._before = None
            if now_s < _GAIN * before_s:
                self._period = _PERIOD
            else:
                self.size = size
                self._fewer = not self._fewer
                self._period = min(4 * self._period, _RARE)
            return self.size
        size, waiting = self.size, waiting_s > _WAITING * now_s
        step = max(1, size // 4)
        fewer = self.shared and (self._fewer or not waiting)
        wanted = size - step if fewer else size + step if waiting else size
        self.size = max(1, min(wanted, self.most))
        self._before = (size, now_s) if self.size != size else None
        return self.size
