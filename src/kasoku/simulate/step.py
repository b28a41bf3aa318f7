"""One step of data-parallel training on a cluster: what it takes, item by item, and what each stream does when.

Note: whose order. Groups and their order are those of the policies in `parallel.buckets` that `Overlap` goes by, and
the step is core's recursion (`cost.forecast`), which `Overlap` on a `SimComm` takes to 1e-12 (tests/parallel). `spans`
replays the same recursion for the timeline; both agree to 1e-9 (tests/simulate/test_step.py). Ranks at their own pace
wait for no all-reduce: their steps are those of `apart`. What is sent of a gradient may be less than it is in memory:
see `reducing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kasoku.core import InputError, Span
from kasoku.core.cost import Forecast, Link, Plan, Sized, Unit, forecast
from kasoku.parallel import Asynchronous, Reducer
from kasoku.parallel.buckets import Graded, OneGroup, Planned, Policy, search
from kasoku.simulate import allreduce, apart, compute, reducing
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.compute import Network, Profile
from kasoku.simulate.jitter import Jitter

_FP32 = 4  # bytes of an element
_TRIES = 1000  # to improve each of the plans that a search found: the same on a fast machine and a slow one


@dataclass(frozen=True)
class Sharing:
    """How gradients are shared.

    Args:
        policy: the groups and their order.
        next_forward: groups are waited for by the next forward; False: by the step.
        wire_bytes: of an element under way, by which groups are planned too.
        algorithm: of the all-reduce.
        apart: ranks at their own pace exchange updates so, by its groups and in its type; None: they all-reduce.
        reducer: what Overlap averages by: it says what is under way, and groups are planned by fp32, as Overlap plans
            them; `wire_bytes` counts for nothing then. None: another engine, which plans by what it sends.
        needs_all: no update before all gradients are there, as fp16's loss scaling asks: never by the next forward.
    """

    policy: Policy = field(default_factory=Graded)
    next_forward: bool = False
    wire_bytes: int = 2
    algorithm: str = "auto"
    apart: Asynchronous | None = None
    reducer: Reducer | None = None
    needs_all: bool = False


@dataclass(frozen=True)
class Course:
    """What a step goes through. `late`: groups are waited for by the next forward; else by the step.

    `apart`: the pieces are updates that ranks exchange at their own pace; None: gradients that they all-reduce.
    """

    units: Sequence[Unit]
    tensors: Sequence[Sized]
    plan: Plan
    link: Link
    late: bool
    apart: Asynchronous | None = None

    def sizes(self) -> list[float]:
        """Bytes of each piece, in the order they are sent; of a reducer those of the gradients, as it is given them."""
        width = [self.tensors[group[0]].width for group in self.plan.groups]
        return [(p.stop - p.start) * width[p.group] for p in self.plan.order]

    @property
    def link_s(self) -> float:
        """Seconds that the link is busy, a step."""
        steps = apart.turn(self.apart, len(self.plan.groups)) if self.apart else 1
        return sum(self.link.seconds(size) for size in self.sizes()) / steps

    def forecast(self) -> Forecast:
        """Its time, in the steady state."""
        if self.apart:
            return apart.forecast(self.apart, self.units, self.link_s)
        return forecast(self.units, self.tensors, self.plan, self.link, next_forward=self.late)


@dataclass(frozen=True)
class Step:
    """What was found. Seconds; `compute_s` of the middle GPU, `jitter_s` more until the slowest has computed.

    Of ranks at their own pace: what each of them takes for its own step, on the mean. `norms_s` of `exposed_s`: what
    BatchNorms wait for the statistics of other ranks.
    `course`: of a batch in parts that of the last one, which communication can hide behind.
    """

    gpus: int
    images: int
    compute_s: float
    jitter_s: float
    exposed_s: float
    input_s: float
    course: Course = field(repr=False)
    norms_s: float = 0.0

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.jitter_s + self.exposed_s + self.input_s

    @property
    def images_per_s(self) -> float:
        """Of all GPUs together."""
        return self.images / self.step_s

    @property
    def link_s(self) -> float:
        """All-reduces or exchanges alone, hidden or not."""
        return self.course.link_s


@dataclass(frozen=True)
class Simulator:
    """A network on a cluster; steps of any size are asked of it.

    Args:
        cluster: what it runs on.
        net: what is trained.
        sharing: how gradients are shared.
        jitter: how ranks differ; None: as the cluster's GPUs do.
        profile: measured times of the network's blocks, in place of the GPU's shipped ones.
        norm_batch: images that share BatchNorm statistics, of several ranks where one has fewer; 0: its own.
    """

    cluster: Cluster
    net: Network
    sharing: Sharing = field(default_factory=Sharing)
    jitter: Jitter | None = None
    profile: Profile | None = None
    norm_batch: int = 0

    def step(self, gpus: int, batch: int, *, parts: int = 1) -> Step:
        """A step of `batch` images over so many GPUs, which each take their share in `parts`, one after the other.

        Raises InputError where there are no such GPUs, or they cannot
        share the batch.
        """
        self.cluster.nodes_for(gpus)
        if batch < gpus * parts:
            raise InputError(f"batch={batch} on {gpus} GPUs: at least 1 image each; raise batch, or take fewer GPUs")
        images = -(-batch // (gpus * parts))  # the GPU with the most sets the time
        jitter = self.jitter if self.jitter is not None else Jitter(self.cluster.device.spread)
        pace = self.sharing.apart
        if pace and gpus > 1:
            apart.check(pace, parts)
        # with a bound slow GPUs, which stay slow, hold up all others in the end
        slower = 1.0 if pace and pace.max_staleness is None else jitter.slowest(gpus)
        compute_s = _computing(self.units(images), parts)
        slow = self.units(images, slower=slower)
        course = self._course(self._with_norms(slow, gpus, batch / (gpus * parts)), gpus)
        seen = course.forecast()
        node = self.cluster.node
        fed = batch / gpus * min(gpus, node.gpus) / node.input_images_s if node.input_images_s else 0.0
        slowest_s = _computing(slow, parts)
        norms_s = _computing(course.units, parts) - slowest_s
        exposed = norms_s + max(0.0, seen.exposed_s)  # rounding may leave less than nothing
        waits = max(0.0, fed - slowest_s - exposed)
        return Step(gpus, batch, compute_s, slowest_s - compute_s, exposed, waits, course, norms_s)

    def _course(self, units: Sequence[Unit], gpus: int) -> Course:
        """The gradients, their groups, what they go over, and whether the next forward waits for them."""
        sharing, late = self.sharing, self.sharing.next_forward and not self.sharing.needs_all
        if sharing.apart:
            tensors, _ = self.net.carried(apart.wire_bytes(sharing.apart))
            plan = apart.plan(sharing.apart, self.net.defined)  # groups do not depend on what is sent of an element
            course = Course(units, tensors, plan, apart.link(self.cluster, gpus), False, sharing.apart)
            exchange_s = sum(course.link.seconds(size) for size in course.sizes())
            return replace(course, apart=apart.settled(sharing.apart, units, exchange_s, len(plan.groups)))
        if sharing.reducer:
            link = reducing.link(self.cluster, gpus, sharing.reducer, sharing.algorithm)
            tensors, defined = self.net.carried(_FP32)
        else:
            link = allreduce.link(self.cluster, gpus, sharing.algorithm)
            tensors, defined = self.net.carried(sharing.wire_bytes)
        if isinstance(sharing.policy, Planned) and gpus > 1:
            plan, _, late = search(units, tensors, link, next_forward=late, limit_s=math.inf, tries=_TRIES)
            return Course(units, tensors, plan, link, late)
        # as Overlap does, when no forward was seen yet
        return Course(units, tensors, sharing.policy.plan(defined), link, late)

    def _with_norms(self, units: Sequence[Unit], gpus: int, images: float) -> Sequence[Unit]:
        """The same with what BatchNorms wait for, both ways, where a rank has fewer images than share statistics.

        As `parallel.batchnorm` does it: two numbers a channel, gathered from all ranks.
        """
        if gpus == 1 or self.norm_batch <= images:
            return units
        link = allreduce.gathering(self.cluster, gpus)
        waits = [link.seconds(gpus * 2 * _FP32 * layer.norm) if layer.norm else 0.0 for layer in self.net.layers]
        return [
            replace(u, forward_s=u.forward_s + wait_s, backward_s=u.backward_s + wait_s)
            for u, wait_s in zip(units, waits, strict=True)
        ]

    def units(self, images: float, *, slower: float = 1.0) -> list[Unit]:
        """The layers' times on one GPU."""
        gpu = self.cluster.device
        if self.profile is not None:
            return compute.units_of(self.profile, self.net, gpu, images, slower=slower)
        return compute.units(self.net, gpu, images, slower=slower)

    def evaluation_s(self, gpus: int, images: int) -> float:
        """One evaluation on so many images: forward, and a small all-reduce of what was counted.

        What the cluster's file says of one was seen on many GPUs, so it is what even these cannot go below.
        """
        forward = sum(u.forward_s for u in self.units(max(1, -(-images // gpus))))
        shared = allreduce.link(self.cluster, gpus, self.sharing.algorithm).seconds(8)
        return max(self.cluster.costs.evaluation_s, forward + shared)


def _computing(units: Sequence[Unit], parts: int) -> float:
    """Seconds of a share in so many parts: each goes forward and backward, and one update follows all."""
    return sum(parts * (u.forward_s + u.backward_s) + u.update_s for u in units)


def spans(step: Step) -> list[Span]:
    """The steady state from the start of backward to the end of forward; the kinds are those of a measured run.

    Of ranks at their own pace: from an exchange on, over the steps in which every group is exchanged once.
    """
    course = step.course
    if course.apart:
        return apart.spans(course.apart, course.units, [(course.link.seconds(size), size) for size in course.sizes()])
    out: list[Span] = []
    now, ready = 0.0, {}
    for i in reversed(range(len(course.units))):
        out.append(Span("backward", course.units[i].name, now, now + course.units[i].backward_s))
        now = ready[i] = now + course.units[i].backward_s
    arrived, free = {}, 0.0
    for piece, size in zip(course.plan.order, course.sizes(), strict=True):
        start = max(free, ready[min(course.tensors[i].unit for i in course.plan.groups[piece.group])])
        arrived[piece.group] = free = start + course.link.seconds(size)
        if free > start:
            out.append(Span("transfer", f"group {piece.group}", start, free, bytes=round(size)))
    waiting = dict(arrived)
    for i, unit in enumerate(course.units):
        mine = [g for g in waiting if not course.late or i in {course.tensors[t].unit for t in course.plan.groups[g]}]
        late = max((waiting.pop(g) for g in mine), default=0.0)
        if late > now:
            out.append(Span("exposed", f"before {unit.name}", now, late))
            now = late
        if unit.update_s:
            out.append(Span("update", unit.name, now, now + unit.update_s))
            now += unit.update_s
        out.append(Span("forward", unit.name, now, now + unit.forward_s))
        now += unit.forward_s
    return out


def timeline(step: Step) -> dict[str, Any]:
    """The spans as a page of a measured run draws them; see `spans` for where a step begins."""
    link = {"transfer"}
    return {
        "spans": [
            {
                "kind": span.kind,
                "name": span.name,
                "start": span.start,
                "stop": span.stop,
                "rank": 0,
                "bytes": span.bytes,
                "stream": "link" if span.kind in link else "compute",
            }
            for span in spans(step)
        ]
    }


WITHOUT = Sharing(policy=OneGroup(), next_forward=False)  # nothing hidden: what [000] calls baseline
