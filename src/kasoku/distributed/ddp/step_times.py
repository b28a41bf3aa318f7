"""From the measured moments of steps to what the search for a plan needs: times of layers, speeds of the link.

Note: times of layers. The forward of a layer lasts until the next layer is entered; its backward lasts from the last
gradient of the layer behind it to its own last gradient. The time between two steps (data) belongs to a unit of its own
in front, without parameters; loss and accumulated passes count as backward of the last layer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kasoku.core import Clock
from kasoku.distributed.ddp.cost_model import LinkModel, UnitTimes
from kasoku.distributed.ddp.layer_index import LayerIndex

_LEAST_SHARE = 0.3  # of a speed; less is noise


@dataclass
class StepMoments:
    """The moments of one step; None until they come."""

    begin: Any = None
    entered: dict[int, Any] = field(default_factory=dict)  # forwards of layers
    out: Any = None  # the first forward of the step has ended
    arrived: dict[int, Any] = field(default_factory=dict)  # the last gradient of each layer
    called: Any = None  # optimizer.step()
    background_done: Any = None  # the transfers beside compute have ended
    transfer_s: float = 0.0
    averaged: Any = None
    end: Any = None

    @property
    def whole(self) -> bool:
        """Whether a forward in training mode and a step were seen."""
        return None not in (self.begin, self.out, self.called)


class Stopwatch:
    """Moments on the stream of a GPU, or on the clock of the host."""

    def __init__(self, clock: Clock, *, cuda: bool) -> None:
        self.clock, self.cuda = clock, cuda

    def moment(self) -> Any:
        """Now, on the stream where there is one."""
        if not self.cuda:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two moments."""
        return float(start.elapsed_time(stop) / 1e3 if self.cuda else stop - start)

    def synchronize(self) -> float:
        """Waits for the device; the host's time then."""
        if self.cuda:
            torch.cuda.synchronize()
        return self.clock.now()


def medians(alone: Sequence[StepMoments], beside: Sequence[StepMoments], watch: Stopwatch, layers: int) -> list[float]:
    """Medians in seconds: forward and backward of each unit, the update, then the compute of both kinds of steps.

    Args:
        alone: steps that send after backward.
        beside: steps that compute beside transfers; the last value is what these took after the end of compute.
        watch: took the moments.
        layers: number of layers.
    """
    rows = [_row(step, watch, layers) for step in alone]
    columns = [statistics.median_low(column) for column in zip(*rows, strict=True)]
    alone_s = statistics.median_low([watch.seconds(s.begin, s.called) for s in alone])
    beside_s = statistics.median_low([watch.seconds(s.begin, s.called) for s in beside])
    rest_s = statistics.median_low([watch.seconds(s.called, s.background_done) for s in beside])
    return [*columns, alone_s, beside_s, rest_s]


def _row(step: StepMoments, watch: Stopwatch, layers: int) -> list[float]:
    """One step: forward of the start and of each layer by its number, the same for backward, the update."""
    moments = [step.begin, *step.entered.values(), step.out]
    forward = dict(zip([-1, *step.entered], itertools.pairwise(moments), strict=True))
    backward: dict[int, float] = {}
    passed = 0.0
    numbers = range(layers)
    for i in reversed([*step.entered, *(i for i in numbers if i not in step.entered)]):
        now = watch.seconds(step.out, step.arrived[i]) if i in step.arrived else passed
        backward[i] = max(0.0, now - passed)
        passed = max(passed, now)
    backward[-1] = max(0.0, watch.seconds(step.out, step.called) - passed)
    return [
        *(watch.seconds(*forward[i]) if i in forward else 0.0 for i in (-1, *numbers)),
        *(backward[i] for i in (-1, *numbers)),
        watch.seconds(step.averaged, step.end),
    ]


def unit_times(layers: LayerIndex, values: Sequence[float]) -> tuple[list[UnitTimes], Sequence[float]]:
    """The units in forward order, and the values of `medians` behind those of the units."""
    names = ["", *(layers.modules[i][0] for i in layers.order)]
    n = len(names)
    sizes = [0] * n
    for t in layers.tensors:
        sizes[t.unit + 1] += t.size
    update = values[2 * n]
    columns = [0, *(1 + i for i in layers.order)]  # the values are by the layers' own numbers
    units = [
        UnitTimes(name, values[i], values[n + i], update * size / sum(sizes))
        for name, size, i in zip(names, sizes, columns, strict=True)
    ]
    return units, values[2 * n + 1 :]


def link_model(
    latency_s: float, transfer_s: float, total_bytes: int, chunks: int, shares: tuple[float, float]
) -> LinkModel:
    """Bandwidth from the time of all gradients in chunks behind each other.

    Args:
        latency_s: of an empty all-reduce.
        transfer_s: of all gradients.
        total_bytes: of all gradients.
        chunks: number of all-reduces in that time.
        shares: the speeds of compute and of transfers that remain beside each other.
    """
    moving_s = max(transfer_s - chunks * latency_s, 0.1 * transfer_s, 1e-9)
    return LinkModel(latency_s, total_bytes / moving_s, *shares)


def shares(alone_s: float, beside_s: float, rest_s: float, sent_s: float) -> tuple[float, float]:
    """The fractions of their speeds that compute and transfers keep beside each other.

    Args:
        alone_s: compute alone.
        beside_s: the same compute beside transfers.
        rest_s: what these took on alone once it had ended.
        sent_s: these transfers alone.
    """
    if rest_s > 0.02 * beside_s:  # transfers ran during all of the compute
        compute, link = alone_s / beside_s, (sent_s - rest_s) / beside_s
    else:
        compute, link = 1 - (beside_s - alone_s) / max(sent_s, 1e-9), 1.0
    return min(1.0, max(_LEAST_SHARE, compute)), min(1.0, max(_LEAST_SHARE, link))
