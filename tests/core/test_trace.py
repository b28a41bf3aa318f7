"""Spans, and who follows them."""

import time

import pytest

from kasoku.core import Trace, process_start


class Ticks:
    """A clock the test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def test_a_span_inside_another_is_noted_before_it():
    clock = Ticks()
    trace = Trace(clock, rank=3)
    with trace.span("step"):
        clock.time += 1
        with trace.span("wait", "head", bytes=8):
            clock.time += 2
            with trace.span("copy"):
                clock.time += 4
        clock.time += 8
    outer, inner = trace.spans[2], trace.spans[1]
    assert (outer.start, outer.stop) == (0, 15)
    assert (inner.kind, inner.name, inner.stop - inner.start, inner.rank, inner.bytes) == ("wait", "head", 6, 3, 8)


def test_an_exception_ends_its_span():
    clock = Ticks()
    trace = Trace(clock)

    def step():
        with trace.span("step"):
            clock.time += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    with trace.span("next"):
        clock.time += 2
    assert [(s.kind, s.stop - s.start) for s in trace.spans] == [("step", 1), ("next", 2)]


def test_only_so_many_spans_are_kept():
    clock = Ticks()
    trace = Trace(clock, keep=2)
    for i in range(5):
        with trace.span("step", str(i)):
            clock.time += 1
    assert [s.name for s in trace.spans] == ["3", "4"]


def test_the_start_of_the_process_lies_behind_us():
    assert 0 < time.perf_counter() - process_start() < 86_400
