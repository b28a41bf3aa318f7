"""One step of data-parallel training on a cluster: its time, item by item, and its timeline.

Note: one recursion. The groups and their order come from the policies in `parallel.buckets`, as in `Overlap`. Times
and timelines come from core's recursion (`cost.forecast`), which `Overlap` on a virtual clock takes to 1e-12
(tests/parallel). Asynchronous ranks wait for no all-reduce: see `apart`. Gradients may be sent in fewer bytes than they
have in memory: see `reducing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kasoku.core import InputError, Span
from kasoku.distributed import Asynchronous, Reducer
from kasoku.distributed.async_sgd.quantization import CODECS
from kasoku.distributed.ddp.bucketing import Graded, OneGroup, Planned, Policy, search
from kasoku.distributed.ddp.cost_model import BucketPlan, Forecast, LinkModel, Sized, UnitTimes, forecast
from kasoku.simulate import async_exchange as apart
from kasoku.simulate import collectives as allreduce
from kasoku.simulate import compressed as reducing
from kasoku.simulate import compute_model as compute
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.compute_model import MeasuredTimes, ModelCosts
from kasoku.simulate.stragglers import Stragglers

_FP32 = 4  # bytes of an element
_TRIES = 1000  # to improve each plan of a search: a number and no time limit, so that every machine finds the same plan


@dataclass(frozen=True)
class Sharing:
    """How gradients are shared.

    Args:
        policy: the groups and their order.
        next_forward: groups are waited for by the next forward; False: by the step.
        wire_bytes: of an element under way, by which groups are planned too.
        algorithm: of the all-reduce.
        asynchronous: ranks at their own pace exchange updates so, by its groups and in its type; None: they all-reduce.
        reducer: what Overlap averages by: it says what is under way, and groups are planned by fp32, as Overlap plans
            them; `wire_bytes` counts for nothing then. None: another engine, which plans by what it sends.
        needs_all: no update before all gradients are there, as fp16's loss scaling asks: never by the next forward.
    """

    policy: Policy = field(default_factory=Graded)
    next_forward: bool = False
    wire_bytes: int = 2
    algorithm: str = "auto"
    asynchronous: Asynchronous | None = None
    reducer: Reducer | None = None
    needs_all: bool = False


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's forecast.

    Attributes:
        late: the next forward waits for a unit's groups; False: the step waits for all groups.
        asynchronous: the pieces are updates that asynchronous ranks exchange; None: gradients in all-reduces.
    """

    units: Sequence[UnitTimes]
    tensors: Sequence[Sized]
    plan: BucketPlan
    link: LinkModel
    late: bool
    asynchronous: Asynchronous | None = None

    def sizes(self) -> list[float]:
        """Bytes of each piece in the order of sending; with a reducer, before its compression."""
        width = [self.tensors[group[0]].width for group in self.plan.groups]
        return [(p.stop - p.start) * width[p.group] for p in self.plan.order]

    def timed(self) -> list[tuple[float, float]]:
        """Seconds and bytes of each piece."""
        return [(self.link.seconds(size), size) for size in self.sizes()]

    def forecast(self, *, timeline: bool = False) -> Forecast:
        """The step in the steady state."""
        if self.asynchronous:
            return apart.forecast(self.asynchronous, self.units, self.timed(), timeline=timeline)
        given = self.units, self.tensors, self.plan, self.link
        return forecast(*given, next_forward=self.late, timeline=timeline)


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step in seconds; of an asynchronous rank, the mean of its own steps.

    Attributes:
        compute_s: of the GPU of median speed.
        straggler_s: the additional time until the slowest GPU has computed.
        exposed_s: communication that nothing hides.
        input_s: waiting for decoded images.
        link_s: all communication, hidden or not.
        inputs: of a batch in parts, the last part, which communication can hide behind.
        norms_s: the part of `exposed_s` in which BatchNorms wait for the statistics of other ranks.
    """

    gpus: int
    images: int
    compute_s: float
    straggler_s: float
    exposed_s: float
    input_s: float
    link_s: float
    inputs: StepInputs = field(repr=False)
    norms_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.straggler_s + self.exposed_s + self.input_s

    @property
    def images_per_s(self) -> float:
        """Of all GPUs together."""
        return self.images / self.step_s


@dataclass(frozen=True)
class Simulator:
    """A network on a cluster; steps of any size are asked of it.

    Args:
        cluster: what it runs on.
        net: what is trained.
        sharing: how gradients are shared.
        stragglers: how ranks differ; None: as the cluster's GPUs do.
        profile: measured times of the network's blocks, in place of the GPU's shipped ones.
        norm_batch: images that share BatchNorm statistics, of several ranks where one has fewer; 0: its own.
    """

    cluster: Cluster
    net: ModelCosts
    sharing: Sharing = field(default_factory=Sharing)
    stragglers: Stragglers | None = None
    profile: MeasuredTimes | None = None
    norm_batch: int = 0

    def step(self, gpus: int, batch: int, *, parts: int = 1) -> SimulatedStep:
        """A step of `batch` images over so many GPUs, which each take their share in `parts`, one after the other.

        Raises InputError where there are no such GPUs, or they cannot
        share the batch.
        """
        self.cluster.nodes_for(gpus)
        if batch < gpus * parts:
            raise InputError(f"batch={batch} on {gpus} GPUs: at least 1 image each; raise batch, or take fewer GPUs")
        images = -(-batch // (gpus * parts))  # the GPU with the most sets the time
        stragglers = self.stragglers if self.stragglers is not None else Stragglers(self.cluster.device.spread)
        pace = self.sharing.asynchronous if gpus > 1 else None
        if pace:
            apart.check(pace, parts)
        # slow GPUs stay slow, so where ranks may be only so far ahead, all wait for the slowest in the end
        slower = 1.0 if pace and pace.max_staleness is None else stragglers.slowest(gpus)
        compute_s = _computing(self.units(images), parts)
        slow = self.units(images, slower=slower)
        inputs = self._inputs(self._with_norms(slow, gpus, batch / (gpus * parts)), gpus)
        seen = inputs.forecast()
        node = self.cluster.node
        fed = batch / gpus * min(gpus, node.gpus) / node.input_images_s if node.input_images_s else 0.0
        slowest_s = _computing(slow, parts)
        norms_s = _computing(inputs.units, parts) - slowest_s
        exposed = norms_s + max(0.0, seen.exposed_s)  # rounding may leave less than nothing
        waits = max(0.0, fed - slowest_s - exposed)
        return SimulatedStep(
            gpus, batch, compute_s, slowest_s - compute_s, exposed, waits, seen.link_s, inputs, norms_s
        )

    def _inputs(self, units: Sequence[UnitTimes], gpus: int) -> StepInputs:
        """The gradients, their groups, what they go over, and whether the next forward waits for them."""
        sharing, late = self.sharing, self.sharing.next_forward and not self.sharing.needs_all
        if sharing.asynchronous:
            tensors, _ = self.net.carried(CODECS[sharing.asynchronous.wire].dtype.itemsize)
            plan = apart.plan(sharing.asynchronous, self.net.defined)  # by fp32, whatever type is sent
            inputs = StepInputs(units, tensors, plan, apart.link(self.cluster, gpus), False, sharing.asynchronous)
            return replace(inputs, asynchronous=apart.settled(sharing.asynchronous, units, inputs.timed()))
        if sharing.reducer:
            link = reducing.link(self.cluster, gpus, sharing.reducer, sharing.algorithm)
            tensors, defined = self.net.carried(_FP32)
        else:
            link = allreduce.link(self.cluster, gpus, sharing.algorithm)
            tensors, defined = self.net.carried(sharing.wire_bytes)
        if isinstance(sharing.policy, Planned) and gpus > 1:
            plan, _, late = search(units, tensors, link, next_forward=late, limit_s=math.inf, tries=_TRIES)
            return StepInputs(units, tensors, plan, link, late)
        # as Overlap does, when no forward was seen yet
        return StepInputs(units, tensors, sharing.policy.plan(defined), link, late)

    def _with_norms(self, units: Sequence[UnitTimes], gpus: int, images: float) -> Sequence[UnitTimes]:
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

    def units(self, images: float, *, slower: float = 1.0) -> list[UnitTimes]:
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


def _computing(units: Sequence[UnitTimes], parts: int) -> float:
    """Seconds of a share in so many parts: each goes forward and backward, and one update follows all."""
    return sum(parts * (u.forward_s + u.backward_s) + u.update_s for u in units)


def spans(step: SimulatedStep) -> Sequence[Span]:
    """The timeline of the steady state from the start of backward to the end of forward.

    Of asynchronous ranks: from the start of an exchange on, over the steps that exchange every group once.
    """
    return step.inputs.forecast(timeline=True).spans


def timeline(step: SimulatedStep) -> dict[str, Any]:
    """The spans in the form that the page of a measured run draws."""
    return {"spans": [{**asdict(s), "stream": "link" if s.kind == "transfer" else "compute"} for s in spans(step)]}


WITHOUT = Sharing(policy=OneGroup(), next_forward=False)  # no communication is hidden: the baseline of [000]
