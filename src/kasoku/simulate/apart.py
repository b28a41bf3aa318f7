"""Ranks at their own pace (`Asynchronous`): what their exchanges take, what of it shows, what each stream does when.

Note: the busiest link. Each of N ranks sends every owner an Nth of its update and gets as much back; all ranks are
owners. So every rank sends every other the same bytes, once as pushes and once as answers: two all-to-alls, of which
the busiest link sets the seconds (`allreduce.exchange`).

Note: what is left out. Only links are simulated: not what an owner takes to add, nor the way between a GPU and its
host, nor the word a step that a rank has with the one who deals the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from kasoku.core import InputError, Span
from kasoku.core.cost import Forecast, Piece, Plan, Sized, Unit
from kasoku.parallel import Asynchronous
from kasoku.parallel.pieces import most_alone
from kasoku.parallel.wires import WIRES
from kasoku.simulate.allreduce import ALONE, Fastest, exchange, fastest
from kasoku.simulate.cluster import Cluster

_DRAWN = 6000  # spans of computing, of a timeline


def check(pace: Asynchronous, parts: int) -> None:
    """Raises InputError for settings whose exchanges are others than these."""
    if pace.servers or pace.max_staleness == 0 or parts > 1:
        raise InputError(
            f"servers={pace.servers}, max_staleness={pace.max_staleness}, {parts} parts: ranks at their own pace are "
            "simulated where all own and train (servers=0), may be ahead, and take their share at once"
        )


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int) -> Fastest:
    """What an exchange takes, of the bytes that a rank sends: a question, its answer, and all bytes both ways."""
    cluster.nodes_for(gpus)
    if gpus == 1:
        return ALONE
    once = exchange(cluster, gpus)
    return fastest(cluster, [("exchange", once + once)])


def wire_bytes(pace: Asynchronous) -> int:
    """Of an element under way, either way."""
    return WIRES[pace.wire].dtype.itemsize


def plan(pace: Asynchronous, tensors: Sequence[Sized]) -> Plan:
    """The groups of its policy, whole, in the order in which they are sent; `tensors` in order of definition."""
    made = pace.buckets.plan(tensors)
    sizes = [sum(tensors[i].elements for i in group) for group in made.groups]
    return Plan(made.groups, tuple(Piece(g, 0, size) for g, size in enumerate(sizes)), made.policy)


def settled(pace: Asynchronous, units: Sequence[Unit], exchange_s: float, groups: int) -> Asynchronous:
    """The pace with its number of steps between exchanges, where that is as many as one lasts (every=0).

    `exchange_s`: of all groups.
    """
    if pace.every:
        return pace
    between_s = _whole(units) * (groups if pace.stream else 1)
    steps = math.ceil(exchange_s / between_s - 1e-9) if pace.hidden and between_s else 1
    return replace(pace, every=min(most_alone(pace.max_staleness), max(1, steps)))


def turn(pace: Asynchronous, groups: int) -> int:
    """Steps in which every group is exchanged once."""
    return pace.every * (groups if pace.stream else 1)


def forecast(pace: Asynchronous, units: Sequence[Unit], link_s: float) -> Forecast:
    """A step of a rank, in the steady state; `link_s`: seconds of exchanges a step, on the mean."""
    compute_s = _whole(units)
    exposed_s = max(0.0, link_s - compute_s) if pace.hidden else link_s
    return Forecast(compute_s + exposed_s, compute_s, link_s)


def spans(pace: Asynchronous, units: Sequence[Unit], groups: Sequence[tuple[float, float]]) -> list[Span]:
    """The steady state over a turn, from an exchange on; `groups`: seconds and bytes of each.

    The first step is drawn layer by layer, the others as wholes.
    """
    every = list(enumerate(groups))
    rounds = [[one] for one in every] if pace.stream else [every]
    seconds = [sum(s for _, (s, _) in some) for some in rounds]
    behind = pace.hidden and sum(seconds) > len(rounds) * pace.every * _whole(units)
    # until when each round of the turn before is under way: the link is either never free, or waited for by nobody
    until = [x - sum(seconds) if behind else -math.inf for x in itertools.accumulate(seconds)]
    out: list[Span] = []
    now, free, zero = until[0] if behind else 0.0, 0.0, 0.0
    for i, some in enumerate([*rounds, *rounds]):  # the second turn is like all that follow
        if i == len(rounds):
            out, zero = [], now
        for g, (s, size) in some:
            start = max(now, free)
            free = start + s
            if s:
                out.append(Span("transfer", f"group {g}", start, free, bytes=round(size)))
        until.append(free)
        if not pace.hidden:
            now = _wait(out, now, free)
        for k in range(pace.every):
            now = _step(out, units if i == len(rounds) and k == 0 else [_one(units)], now)
        if pace.hidden:
            now = _wait(out, now, until[i + 1])
    return [Span(s.kind, s.name, s.start - zero, s.stop - zero, bytes=s.bytes) for s in out]


def told(pace: Asynchronous) -> str:
    """What it does, in a line."""
    most = pace.max_staleness
    ahead = "any number of steps" if most is None else f"at most {most} step{'s' if most > 1 else ''}"
    often = {0: "when the last are through", 1: "after each step"}
    when = often.get(pace.every if pace.hidden else max(1, pace.every), f"after every {pace.every} steps")
    some = ", one group at a time" if pace.stream else ""
    shown = "beside computing" if pace.hidden else "waited for at once"
    return f"{ahead} ahead of the slowest; updates in {pace.wire} {when}{some}, {shown}"


def _wait(out: list[Span], now: float, until: float) -> float:
    if until > now:
        out.append(Span("exposed", "fresh weights", now, until))
    return max(now, until)


def _step(out: list[Span], units: Sequence[Unit], now: float) -> float:
    """Draws a step, unless there are too many; returns its end."""
    parts = [("forward", u.name, u.forward_s) for u in units]
    parts += [("backward", u.name, u.backward_s) for u in reversed(units)]
    parts += [("update", u.name, u.update_s) for u in units if u.update_s]
    for kind, name, s in parts:
        if len(out) < _DRAWN:
            out.append(Span(kind, name, now, now + s))
        now += s
    return now


def _one(units: Sequence[Unit]) -> Unit:
    forward_s, backward_s = sum(u.forward_s for u in units), sum(u.backward_s for u in units)
    return Unit("all layers", forward_s, backward_s, sum(u.update_s for u in units))


def _whole(units: Sequence[Unit]) -> float:
    return sum(u.forward_s + u.backward_s + u.update_s for u in units)
