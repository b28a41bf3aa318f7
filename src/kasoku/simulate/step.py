"""One step of data-parallel training on a cluster: what it takes, item by item, and what each stream does when.

Note: whose order. Groups and their order are those of the policies in `parallel.buckets` that `Overlap` goes by, and
the step is core's recursion (`cost.forecast`), which `Overlap` on a `SimComm` takes to 1e-12 (tests/parallel). `spans`
replays the same recursion for the timeline; both agree to 1e-9 (tests/simulate/test_step.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kasoku.core import InputError, Span
from kasoku.core.cost import Link, Plan, Sized, Unit, forecast
from kasoku.parallel.buckets import Graded, OneGroup, Planned, Policy, search
from kasoku.simulate import allreduce, compute
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.compute import Network, Profile
from kasoku.simulate.jitter import Jitter


@dataclass(frozen=True)
class Sharing:
    """How gradients are shared.

    Args:
        policy: the groups and their order.
        next_forward: groups are waited for by the next forward; False: by the step.
        wire_bytes: of an element under way.
        algorithm: of the all-reduce.
    """

    policy: Policy = field(default_factory=Graded)
    next_forward: bool = False
    wire_bytes: int = 2
    algorithm: str = "auto"


@dataclass(frozen=True)
class Course:
    """What a step goes through. `late`: groups are waited for by the next forward; else by the step."""

    units: Sequence[Unit]
    tensors: Sequence[Sized]
    plan: Plan
    link: Link
    late: bool

    def sizes(self) -> list[float]:
        """Bytes of each piece, in the order they are sent."""
        width = [self.tensors[group[0]].width for group in self.plan.groups]
        return [(p.stop - p.start) * width[p.group] for p in self.plan.order]


@dataclass(frozen=True)
class Step:
    """What was found. Seconds; `compute_s` of the middle GPU, `jitter_s` more until the slowest has computed.

    `course`: of a batch in parts that of the last one, which communication can hide behind.
    """

    gpus: int
    images: int
    compute_s: float
    jitter_s: float
    exposed_s: float
    input_s: float
    course: Course = field(repr=False)

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
        """All-reduces alone, hidden or not."""
        return sum(self.course.link.seconds(size) for size in self.course.sizes())


@dataclass(frozen=True)
class Simulator:
    """A network on a cluster; steps of any size are asked of it.

    Args:
        cluster: what it runs on.
        net: what is trained.
        sharing: how gradients are shared.
        jitter: how ranks differ; None: as the cluster's GPUs do.
        profile: measured times of the network's blocks, in place of the GPU's shipped ones.
    """

    cluster: Cluster
    net: Network
    sharing: Sharing = field(default_factory=Sharing)
    jitter: Jitter | None = None
    profile: Profile | None = None

    def step(self, gpus: int, batch: int, *, parts: int = 1, search_s: float = 5.0) -> Step:
        """A step of `batch` images over so many GPUs, which each take their share in `parts`, one after the other.

        Planned groups are searched for so many seconds. Raises InputError where there are no such GPUs, or they cannot
        share the batch.
        """
        self.cluster.nodes_for(gpus)
        if batch < gpus * parts:
            raise InputError(f"batch={batch} on {gpus} GPUs: at least 1 image each; raise batch, or take fewer GPUs")
        images = -(-batch // (gpus * parts))  # the GPU with the most sets the time
        jitter = self.jitter if self.jitter is not None else Jitter(self.cluster.device.spread)
        slower = jitter.slowest(gpus)
        middle = sum(u.forward_s + u.backward_s + u.update_s for u in self.units(images))
        units = self.units(images, slower=slower)
        link = allreduce.link(self.cluster, gpus, self.sharing.algorithm)
        tensors, plan, late = self._plan(units, link, search_s if gpus > 1 else 0.0)
        seen = forecast(units, tensors, plan, link, next_forward=late)
        node = self.cluster.node
        fed = batch / gpus * min(gpus, node.gpus) / node.input_images_s if node.input_images_s else 0.0
        waits = max(0.0, fed - seen.step_s - (parts - 1) * seen.compute_s)
        slowest = parts * (seen.compute_s - middle)
        exposed = max(0.0, seen.exposed_s)  # rounding may leave less than nothing
        return Step(gpus, batch, parts * middle, slowest, exposed, waits, Course(units, tensors, plan, link, late))

    def _plan(self, units: Sequence[Unit], link: Link, search_s: float) -> tuple[list[Sized], Plan, bool]:
        """The gradients, their groups, and whether the next forward waits for them."""
        sharing = self.sharing
        tensors, defined = self.net.carried(sharing.wire_bytes)
        if isinstance(sharing.policy, Planned) and search_s > 0:
            plan, _, late = search(units, tensors, link, next_forward=sharing.next_forward, limit_s=search_s)
            return tensors, plan, late
        # as Overlap does, when no forward was seen yet
        return tensors, sharing.policy.plan(defined), sharing.next_forward

    def units(self, images: float, *, slower: float = 1.0) -> list[Unit]:
        """The layers' times on one GPU."""
        gpu = self.cluster.device
        if self.profile is not None:
            return compute.units_of(self.profile, self.net, gpu, images, slower=slower)
        return compute.units(self.net, gpu, images, slower=slower)

    def evaluation_s(self, gpus: int, images: int) -> float:
        """One evaluation on so many images: forward alone, and a small all-reduce of what was counted."""
        if self.cluster.costs.evaluation_s:
            return self.cluster.costs.evaluation_s
        forward = sum(u.forward_s for u in self.units(max(1, -(-images // gpus))))
        return forward + allreduce.link(self.cluster, gpus, self.sharing.algorithm).seconds(8)


def spans(step: Step) -> list[Span]:
    """The steady state from the start of backward to the end of forward; the kinds are those of a measured run."""
    course = step.course
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
    """The spans as a page of a measured run draws them; the order of a step begins with its backward."""
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
