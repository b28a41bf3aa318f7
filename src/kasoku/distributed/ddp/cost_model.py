"""The cost model of data-parallel training: the time of a step, and how much of its communication is exposed.

All times are in seconds, all sizes in bytes.

Note: two streams of work. The compute stream runs the backward of every unit from the last to the first. Then it
updates the units and runs their forward from the first to the last, and waits where a unit's gradients have not
arrived. The link sends one chunk at a time, in one static order, as soon as the chunk's bucket is ready and the chunk
before it has arrived. While both streams work, each may slow down the other (a CPU that computes also moves the
bytes): `compute_share` and `link_share` are the fractions of their speeds that remain.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from kasoku.core import InputError
from kasoku.core.trace import Span


@dataclass(frozen=True)
class LinkModel:
    """The time of an all-reduce of n bytes, latency_s + n / bytes_per_s, and the speeds while both streams work.

    `bytes_per_s` is the rate of the whole collective: a ring of p ranks sends 2 (p - 1) / p of the bytes on each link.
    """

    latency_s: float
    bytes_per_s: float
    compute_share: float = 1.0  # speed of compute during a transfer
    link_share: float = 1.0  # speed of a transfer during compute

    def seconds(self, size: float) -> float:
        """The time of an all-reduce of `size` bytes while nothing else runs."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class UnitTimes:
    """A part of the model that runs as a whole, with its times on one device."""

    name: str
    forward_s: float
    backward_s: float
    update_s: float = 0.0


@dataclass(frozen=True)
class Sized:
    """One gradient tensor: the index of its unit, and its size. Tensors of the same `kind` may share a buffer."""

    unit: int
    elements: int
    size: int
    kind: str = ""
    name: str = ""

    @property
    def width(self) -> float:
        """Bytes per element."""
        return self.size / max(1, self.elements)


@dataclass(frozen=True, order=True)
class Chunk:
    """A slice of a bucket's flat buffer that is sent at once, in elements."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlan:
    """Buckets of tensors (by index), each one flat buffer, and the order in which their chunks are sent."""

    buckets: tuple[tuple[int, ...], ...]
    order: tuple[Chunk, ...]
    policy: str = ""
    ranks: int = 1  # that share each update; above 1 a chunk is two transfers of half its bytes

    def state_dict(self, late: bool) -> dict[str, Any]:
        """Plain values, for a checkpoint; `late`: whether its updates are late."""
        order, kept = [[*astuple(chunk)] for chunk in self.order], {"policy": self.policy, "ranks": self.ranks}
        return {"groups": [*map(list, self.buckets)], "order": order, **kept, "late": late}

    @classmethod
    def of_state(cls, state: dict[str, Any], tensors: int) -> tuple["BucketPlan", bool]:
        """The plan of a checkpoint, and `late`. Raises InputError if it has not this number of tensors."""
        buckets = tuple(tuple(bucket) for bucket in state["groups"])
        if sorted(i for bucket in buckets for i in bucket) != list(range(tensors)):
            raise InputError("checkpoint of Overlap: a plan for another model; resume with the run's recipe")
        order = tuple(Chunk(*chunk) for chunk in state["order"])
        return cls(buckets, order, state["policy"], state.get("ranks", 1)), state["late"]


@dataclass(frozen=True)
class Forecast:
    """The times of a step under a plan.

    `spans`: the timeline from the start of backward to the end of forward, if requested; kinds as in a measured run.
    """

    step_s: float
    compute_s: float
    link_s: float
    spans: tuple[Span, ...] = field(repr=False, default=())

    @property
    def exposed_s(self) -> float:
        """The time that communication adds to compute."""
        return self.step_s - self.compute_s


def forecast(
    units: Sequence[UnitTimes],
    tensors: Sequence[Sized],
    plan: BucketPlan,
    link: LinkModel,
    *,
    next_forward: bool = True,
    timeline: bool = False,
) -> Forecast:
    """The step under a plan of these tensors, in the steady state; the units are in forward order.

    `next_forward`: a unit's update and next forward wait for its own buckets only, not for all. `timeline`: with spans.
    """
    unit_of = [min(tensors[i].unit for i in bucket) for bucket in plan.buckets]  # the first to read it
    width = [tensors[bucket[0]].width for bucket in plan.buckets]
    sizes = [(p.bucket, (p.stop - p.start) * width[p.bucket]) for p in plan.order]
    ready_after = [len(units) - unit_of[bucket] for bucket, _ in sizes]
    if plan.ranks > 1:  # sums behind backward, then parameters in the order of need
        sizes = [(bucket, size / 2) for bucket, size in sizes]
        sizes += sorted(sizes, key=lambda sent: unit_of[sent[0]])
        ready_after += [len(units)] * len(plan.order)
    last = {bucket: i for i, (bucket, _) in enumerate(sizes)}
    first_read: list[list[int]] = [[] for _ in units]
    for bucket in sorted(last, key=lambda b: last[b]):
        first_read[unit_of[bucket] if next_forward else 0].append(bucket)
    elements = [0] * len(units)
    for t in tensors:
        elements[t.unit] += t.elements
    shares = [units[t.unit].update_s * t.elements / max(1, elements[t.unit]) / plan.ranks for t in tensors]

    streams = _Streams(link, sizes, ready_after, timeline=timeline)
    for unit in reversed(units):
        streams.compute(unit.backward_s, "backward", unit.name)
        streams.ended += 1
    for unit, buckets in zip(units, first_read, strict=True):
        for bucket in buckets:
            streams.wait(last[bucket if next_forward else buckets[-1]], unit.name)
            streams.compute(sum(shares[i] for i in plan.buckets[bucket]), "update", bucket)
        streams.compute(unit.forward_s, "forward", unit.name)
    compute_s = sum(unit.backward_s + unit.forward_s + unit.update_s / plan.ranks for unit in units)
    link_s = sum(seconds for _, seconds, _ in streams.chunks)
    return Forecast(streams.now, compute_s, link_s, tuple(streams.spans or ()))


class _Streams:
    """The compute stream and the link, advanced together from event to event.

    `ready_after`: for each chunk, how many backward tasks must have ended before it is sent.
    """

    def __init__(
        self, link: LinkModel, sizes: Sequence[tuple[int, float]], ready_after: Sequence[int], *, timeline: bool
    ) -> None:
        self.link, self.ready_after = link, ready_after
        self.chunks = [(bucket, link.seconds(size), size) for bucket, size in sizes]
        self.now, self.sent, self.ended = 0.0, 0, 0  # time, chunks arrived, backward tasks ended
        self.left = self.chunks[0][1] if self.chunks else 0.0
        self.started: float | None = None  # when the transfer under way began
        self.spans: list[Span] | None = [] if timeline else None

    def compute(self, work_s: float, kind: str, what: str | int) -> None:
        start = self.now
        while work_s > 0 and self.sent < len(self.chunks) and self.ready_after[self.sent] <= self.ended:
            mine, theirs = work_s / self.link.compute_share, self.left / self.link.link_share
            span = min(mine, theirs)
            work_s = 0.0 if mine <= theirs else work_s - span * self.link.compute_share
            self.transfer(span, span * self.link.link_share if mine < theirs else self.left)
        self.now += max(0.0, work_s)
        self.draw(kind, what, start)

    def wait(self, chunk: int, unit: str) -> None:
        start = self.now
        while self.sent <= chunk:
            self.transfer(self.left, self.left)
        self.draw("exposed", f"before {unit}", start)

    def transfer(self, span: float, done: float) -> None:
        if self.started is None:
            self.started = self.now
        self.now += span
        self.left -= done
        if self.left <= 0:
            bucket, _, size = self.chunks[self.sent]
            self.draw("transfer", bucket, self.started, round(size))
            self.sent, self.started = self.sent + 1, None
            self.left = self.chunks[self.sent][1] if self.sent < len(self.chunks) else 0.0

    def draw(self, kind: str, what: str | int, start: float, size: int = 0) -> None:
        """Adds a span that ends now to the timeline; a number is a bucket's."""
        if self.spans is not None and self.now > start:
            name = what if isinstance(what, str) else f"bucket {what}"
            self.spans.append(Span(kind, name, start, self.now, bytes=size))
