"""Early start: what a training needs before its first step, as tasks that run while others wait.

Note: what overlaps. Importing, indexing and building compute; meeting the other ranks, the connections between them
and reading from a far disk wait. Each task has a thread, begins when the tasks it is after have ended, and whoever
needs its result waits for that one only. Threads share the interpreter, so computing is not shortened, waiting is.

Note: errors. A task whose predecessors succeeded is always run, whatever else failed, so that collectives in tasks
meet their partners; at `finish` the first error counts, in the order in which the tasks were added, not of the clock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from kasoku.core.clock import Clock, Wall
from kasoku.core.trace import Span

T = TypeVar("T")
SEQUENTIAL = "KASOKU_SEQUENTIAL"  # set to 1: one task after the other, to compare with
COMPILER = "torch._dynamo"  # imported by torch itself: by every optimizer and functional_call at first use


@dataclass(frozen=True)
class Task:
    """A part of a start: `f` gets the results of the tasks it is after, in that order."""

    name: str
    f: Callable[..., Any]
    after: tuple[str, ...] = ()


class Start:
    """The tasks of one start on one rank.

    Args:
        clock: what tells the time; the real one by default.
        overlap: False: one task after the other, in the order they are added, on the caller's thread. By default they
            overlap, unless $KASOKU_SEQUENTIAL is 1.
        began: when the process started, on that clock: what came before is the task "import".
    """

    def __init__(self, clock: Clock | None = None, *, overlap: bool | None = None, began: float | None = None) -> None:
        self.clock = clock or Wall()
        self.overlap = os.environ.get(SEQUENTIAL, "") != "1" if overlap is None else overlap
        self.tasks: list[Task] = []
        self._futures: dict[str, Future[Any]] = {}
        self._spans: dict[str, Span] = {}
        self._here: list[str] = []  # what the caller has done or waited for last
        self.began = self.clock.now() if began is None else began
        if began is not None:
            self.note("import", began)

    def add(self, name: str, f: Callable[..., T], after: Sequence[str] = ()) -> None:
        """Has f called with the results of the tasks `after` as soon as they have ended; returns at once.

        Raises:
            ValueError: for a name that is taken, and for one in `after` that is not there yet.
        """
        task = self._known(Task(name, f, tuple(after)))
        if self.overlap:  # a daemon: an interruption does not wait for a rank that never comes
            threading.Thread(target=self._run, args=(task,), name=f"kasoku-start-{name}", daemon=True).start()
        else:
            self._run(task)

    def import_compiler(self) -> None:
        """Has what torch imports at the first use of an optimizer imported as the task "compiler", once."""
        if "compiler" not in self._futures:
            self.add("compiler", lambda: import_module(COMPILER))

    def do(self, name: str, f: Callable[..., T], after: Sequence[str] = ()) -> T:
        """The same on the caller's thread, which waits; returns what f returns. Raises what failed."""
        task = self._known(Task(name, f, tuple(after)))
        self._here = [name]
        self._run(task)
        result: T = self._futures[name].result()
        return result

    def note(self, name: str, start: float, stop: float | None = None) -> None:
        """Takes a task of the caller's thread that was timed elsewhere; until now by default."""
        self._known(Task(name, _nothing))
        self._here = [name]
        self._spans[name] = Span("start", name, start, self.clock.now() if stop is None else stop)
        self._futures[name].set_result(None)

    def __getitem__(self, name: str) -> Any:
        """A task's result: waits for that task only. Raises its error."""
        self._here.append(name)
        return self._futures[name].result()

    def wait(self) -> Callable[[], dict[str, Any]]:
        """Waits until all tasks so far have ended; gives what returns their results, or raises as `finish` does."""
        futures = dict(self._futures)
        self._here += futures
        for future in futures.values():
            future.exception()
        return lambda: {name: future.result() for name, future in futures.items()}

    def finish(self) -> dict[str, Any]:
        """Waits for all tasks and returns their results.

        Raises:
            Exception: the error of the first that failed, in the order they were added.
        """
        return self.wait()()

    @property
    def spans(self) -> list[Span]:
        """When each task that has ended ran, in the order they were added."""
        return [self._spans[task.name] for task in self.tasks if task.name in self._spans]

    @property
    def after(self) -> dict[str, tuple[str, ...]]:
        """What each task began after; also what the caller had done or waited for before it was added."""
        return {task.name: task.after for task in self.tasks}

    def shares(self, started: float) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by task: of the time since the process `started`, what was waited for; and what ran beside others.

        Both are empty where the tasks had ended before: they belong to an earlier training of this process.
        """
        spans = self.spans
        if max((s.stop for s in spans), default=started) <= started:
            return {}, {}
        shares = waited_for(spans, self.began)
        beside = {s.name: _seconds([s]) - shares[s.name] for s in spans if shares[s.name] < 0.5 * _seconds([s])}
        if "import" not in shares:
            shares = {"import": min(self.began, *(s.start for s in spans)) - started, **shares}
        return shares, beside

    def _known(self, task: Task) -> Task:
        missing = [name for name in task.after if name not in self._futures]
        if task.name in self._futures or missing:
            what = f"after {missing[0]}, which is not there yet" if missing else "there already"
            raise ValueError(f"task {task.name}: {what}")
        self._futures[task.name] = Future()
        before = dict.fromkeys((*task.after, *self._here))  # whoever adds it has done these before
        self.tasks.append(Task(task.name, task.f, tuple(before)))
        return task

    def _run(self, task: Task) -> None:
        future = self._futures[task.name]
        try:
            given = [self._futures[name].result() for name in task.after]
            start = self.clock.now()
            try:
                result = task.f(*given)
            finally:
                self._spans[task.name] = Span("start", task.name, start, self.clock.now())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)


def critical_path(spans: Iterable[Span], after: Mapping[str, Sequence[str]]) -> list[Span]:
    """The chain of tasks, each after the one before it, that takes longest: no start can be faster than its sum."""
    by_name = {s.name: s for s in spans}
    longest: dict[str, list[Span]] = {}
    for name in after:  # a task is listed behind those it is after
        if name in by_name:
            chains = [longest[other] for other in after[name] if other in longest]
            longest[name] = [*max(chains, key=_seconds, default=[]), by_name[name]]
    return max(longest.values(), key=_seconds, default=[])


def waited_for(spans: Iterable[Span], began: float) -> dict[str, float]:
    """The seconds from `began` to the end of the last task, each given to the task that was waited for then.

    Back from the task that ended last to the one that had ended last when it began, and so on.
    """
    left = sorted(spans, key=lambda s: s.stop)
    shares = dict.fromkeys((s.name for s in left), 0.0)
    while left:
        last = left.pop()
        left = [s for s in left if s.stop <= last.start]
        shares[last.name] = last.stop - (left[-1].stop if left else min(began, last.start))
    return shares


def itemised(spans: Sequence[Span], began: float) -> str:
    """One line: the seconds to the first step, and of each task; those that ran beside others have a +."""
    shares = waited_for(spans, began)
    total_s = max((s.stop for s in spans), default=began) - began
    items = [f"{s.name} {'+' * (shares[s.name] < 0.5 * _seconds([s]))}{_seconds([s]):.2f}" for s in spans]
    return f"first step after {total_s:.2f} s: {', '.join(items)} (+: beside others)"


def _seconds(chain: Iterable[Span]) -> float:
    return sum(s.stop - s.start for s in chain)


def _nothing() -> None:
    return
