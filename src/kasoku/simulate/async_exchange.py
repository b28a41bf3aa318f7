"""Simulates the steps of asynchronous ranks (`Asynchronous`): the time of their exchanges, and its exposed part.

Note: the busiest link. Each of N ranks owns an Nth of the weights. A rank sends to each owner that part of its update
and receives as many bytes: two all-to-alls, whose time the busiest link determines (`collectives.exchange`).

Note: not simulated are the additions of the owners, copies between a GPU and its host, and requests for data.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from kasoku.core import Span
from kasoku.distributed import Asynchronous
from kasoku.distributed.async_sgd.worker import most_local_steps
from kasoku.distributed.ddp.cost_model import Forecast, UnitTimes
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.collectives import ALONE, Fastest, exchange, fastest

_MAX_DRAWN = 1000  # steps in a timeline; with more, several are drawn as one


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int) -> Fastest:
    """The time of an exchange by the bytes of a rank's update, which are sent both ways, with requests and replies."""
    once = exchange(cluster, gpus)
    return fastest(cluster, [("exchange", once + once)]) if gpus > 1 else ALONE


def settled(pace: Asynchronous, units: Sequence[UnitTimes], groups_s: Sequence[float]) -> Asynchronous:
    """Replaces every=0 by the number of steps that an exchange of all groups lasts."""
    if pace.every:
        return pace
    between_s = sum(_phases(units).values())
    steps = math.ceil(sum(groups_s) / between_s - 1e-9) if pace.hidden and between_s else 1
    return replace(pace, every=min(most_local_steps(pace.max_staleness), max(1, steps)))


def forecast(
    pace: Asynchronous, units: Sequence[UnitTimes], groups: Sequence[tuple[float, float]], *, timeline: bool = False
) -> Forecast:
    """The mean step of a rank in the steady state; the timeline shows the steps of an exchange."""
    phases = _phases(units)
    compute_s = sum(phases.values())
    link_s = sum(s for s, _ in groups) / pace.every
    exposed_s = max(0.0, link_s - compute_s) if pace.hidden else link_s
    spans = _spans(pace, phases, groups) if timeline else ()
    return Forecast(compute_s + exposed_s, compute_s, link_s, spans=spans)


def _phases(units: Sequence[UnitTimes]) -> dict[str, float]:
    """The seconds of a step's compute by kind."""
    return {kind: sum(getattr(u, f"{kind}_s") for u in units) for kind in ("forward", "backward", "update")}


def _spans(pace: Asynchronous, phases: dict[str, float], groups: Sequence[tuple[float, float]]) -> tuple[Span, ...]:
    drawn = min(pace.every, _MAX_DRAWN)
    spans: list[Span] = []

    def draw(kind: str, name: str, start: float, stop: float, size: float = 0) -> float:
        if stop > start:
            spans.append(Span(kind, name, start, stop, bytes=round(size)))
        return max(start, stop)

    now = free = zero = 0.0
    for _ in range(2):  # the second turn is in the steady state
        zero = now
        spans.clear()
        for group, (s, size) in enumerate(groups):
            free = draw("transfer", f"group {group}", max(now, free), max(now, free) + s, size)
        now = now if pace.hidden else draw("exposed", "fresh weights", now, free)
        for _, (kind, s) in itertools.product(range(drawn), phases.items()):
            now = draw(kind, "all layers", now, now + s * pace.every / drawn)
        now = draw("exposed", "fresh weights", now, free) if pace.hidden else now
    return tuple(replace(span, start=span.start - zero, stop=span.stop - zero) for span in spans)
