"""Overlapped start-up: the work before the first step as tasks, so that one task computes while another waits.

Note: overlap. Importing, indexing and building compute; the rendezvous, connecting the ranks and reading from a remote
disk wait. Each task has a thread and starts when its predecessors have ended. Callers wait only for the tasks whose
results they need. Threads share the interpreter, so overlap saves waiting time, not computing time.

Note: errors. A task whose predecessors succeeded always runs, even if another task failed, so that its collectives
meet those of the other ranks. After `wait`, the first error is raised in the order of the tasks, not of time.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from kasoku.core import Clock, Span, Wall

T = TypeVar("T")
SEQUENTIAL = "KASOKU_SEQUENTIAL"  # 1: one task after the other, for comparison


class Start:
    """The tasks of one start-up on one rank.

    `clock`: the real one by default. `overlap`: False runs one task after the other, in the order they are added, on
    the caller's thread; by default they overlap, unless $KASOKU_SEQUENTIAL is 1. `began`: when the process started, on
    that clock; the time until now is the task "import".

    Attributes: `after`: for each task, its predecessors and the tasks that the caller had waited for before adding it.
    """

    def __init__(self, clock: Clock | None = None, *, overlap: bool | None = None, began: float | None = None) -> None:
        self.clock = clock or Wall()
        self.overlap = os.environ.get(SEQUENTIAL, "") != "1" if overlap is None else overlap
        self.after: dict[str, tuple[str, ...]] = {}
        self._futures: dict[str, Future[Any]] = {}
        self._spans: dict[str, Span] = {}
        self._here: list[str] = []  # tasks that the caller has run or waited for last
        self.began = self.clock.now() if began is None else began
        if began is not None:
            self.note("import", began, self.clock.now())

    def add(self, name: str, f: Callable[..., T], after: Sequence[str] = ()) -> None:
        """Calls f in a thread as soon as the tasks that it needs have ended.

        f's parameters without a default are the names of the tasks whose results it takes; those in `after` must have
        ended as well. Raises ValueError if the name is taken, or a task that it needs is unknown.
        """
        task = (name, f, self._register(name, f, after), after)
        if self.overlap:  # a daemon, so that an interruption does not wait for a missing rank
            threading.Thread(target=self._run, args=task, name=f"kasoku-start-{name}", daemon=True).start()
        else:
            self._run(*task)

    def import_compiler(self) -> None:
        """Adds the task "compiler", once: what torch would import at the first use of an optimizer."""
        if "compiler" not in self._futures:
            self.add("compiler", lambda: import_module("torch._dynamo"))

    def do(self, name: str, f: Callable[..., T], after: Sequence[str] = ()) -> T:
        """Runs a task on the caller's thread and returns its result. Raises its error, or that of a predecessor."""
        needs = self._register(name, f, after)
        self._here = [name]
        self._run(name, f, needs, after)
        return cast(T, self._futures[name].result())

    def note(self, name: str, start: float, stop: float) -> None:
        """Records a task of the caller's thread that was timed elsewhere."""
        self._register(name, lambda: None)
        self._here = [name]
        self._spans[name] = Span("start", name, start, stop)
        self._futures[name].set_result(None)

    def __getitem__(self, name: str) -> Any:
        """Waits for one task and returns its result, or raises its error."""
        self._here.append(name)
        return self._futures[name].result()

    def wait(self) -> Callable[[], dict[str, Any]]:
        """Waits for all tasks; returns a function that returns their results, or raises the first task's error."""
        futures = dict(self._futures)
        self._here += futures
        wait(futures.values())
        return lambda: {name: future.result() for name, future in futures.items()}

    @property
    def spans(self) -> list[Span]:
        """The times of all tasks that have ended, in the order in which they were added."""
        return [self._spans[name] for name in self.after if name in self._spans]

    def shares(self, started: float) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by task since the process `started`: of the tasks on the critical path, and of overlapped ones.

        Both are empty if all tasks had ended by then: they belong to an earlier training of this process.
        """
        spans = self.spans
        if max((s.stop for s in spans), default=started) <= started:
            return {}, {}
        shares = attribute_seconds(spans, self.began)
        hidden = {s.name: s.stop - s.start - shares[s.name] for s in spans}
        overlapped = {s.name: hidden[s.name] for s in spans if shares[s.name] < 0.5 * (s.stop - s.start)}
        if "import" not in shares:
            shares = {"import": min(self.began, *(s.start for s in spans)) - started, **shares}
        return shares, overlapped

    def _register(self, name: str, f: Callable[..., Any], after: Sequence[str] = ()) -> list[str]:
        """Makes a task known; returns the names of the tasks whose results f takes."""
        named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        parameters = signature(f).parameters.values()
        needs = [p.name for p in parameters if p.kind in named and p.default is Parameter.empty]
        missing = [other for other in (*needs, *after) if other not in self._futures]
        if name in self._futures or missing:
            what = f"after {missing[0]}, which is unknown" if missing else "was added before"
            raise ValueError(f"task {name}: {what}")
        self._futures[name] = Future()
        self.after[name] = tuple(dict.fromkeys((*needs, *after, *self._here)))
        return needs

    def _run(self, name: str, f: Callable[..., Any], needs: Sequence[str], after: Sequence[str]) -> None:
        future = self._futures[name]
        try:
            for other in after:
                self._futures[other].result()
            arguments = {other: self._futures[other].result() for other in needs}
            start = self.clock.now()
            try:
                result = f(**arguments)
            finally:
                self._spans[name] = Span("start", name, start, self.clock.now())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)


def attribute_seconds(spans: Iterable[Span], began: float) -> dict[str, float]:
    """Splits the time from `began` to the end of the last task among the tasks that it was waited for.

    Goes back from the task that ended last to the one that had ended last when it started, and so on.
    """
    left = sorted(spans, key=lambda s: s.stop)
    shares = dict.fromkeys((s.name for s in left), 0.0)
    while left:
        last = left.pop()
        left = [s for s in left if s.stop <= last.start]
        shares[last.name] = last.stop - (left[-1].stop if left else min(began, last.start))
    return shares


def startup_line(spans: Sequence[Span], began: float) -> str:
    """One line with the seconds to the first step and of each task; overlapped ones have a +."""
    shares = attribute_seconds(spans, began)
    total_s = max((s.stop for s in spans), default=began) - began
    times_s = {s.name: s.stop - s.start for s in spans}
    items = [f"{name} {'+' * (shares[name] < 0.5 * taken_s)}{taken_s:.2f}" for name, taken_s in times_s.items()]
    return f"start-up {total_s:.2f} s: {', '.join(items)} (+: overlapped)"
