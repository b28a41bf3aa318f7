"""Simulates one step of data-parallel training on a cluster: its time, item by item, and its timeline.

Note: asynchronous ranks send no all-reduces. Each of N ranks owns an Nth of the weights. A rank sends to each owner
that part of its update and receives as many bytes: two all-to-alls, bounded by the busiest link. Not simulated: the
owners' additions, copies between a GPU and its host, requests for data. There is no timeline of them.

The causes of a step's time, the law of the slowest rank among them, and their sources: docs/simulate.md.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch

from kasoku.core import InputError
from kasoku.distributed import Asynchronous, Hierarchical, Mean, Reducer
from kasoku.distributed.async_sgd.worker import CODECS, most_local_steps
from kasoku.distributed.ddp.bucket_plan import Graded, Planned, Policy, search
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Forecast, Sized, UnitTimes, forecast
from kasoku.simulate import collectives, compute_model
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.collectives import Fastest
from kasoku.simulate.compute_model import MeasuredTimes, ModelCosts

_FP32 = 4  # bytes of an element
_POINTS = 4001  # of an integral
_UNSURE = 0.059  # of computing: half of an 80 % prediction interval from the residuals of V100's published steps
_JITTERS = 0.0118, 0.0447  # of the releases of software that logged the least and the most


@dataclass(frozen=True)
class Sharing:
    """The way in which ranks share gradients.

    Args:
        policy: the groups and their order; or a plan of an earlier search, since one takes seconds.
        next_forward: the next forward waits for groups; False: the step waits.
        asynchronous: the settings of asynchronous ranks, which exchange updates; None: ranks all-reduce gradients.
        reducer: Overlap's reducer, by which fewer bytes than those of the gradients may be sent; these plan the groups.
    """

    policy: Policy | BucketPlan = field(default_factory=Graded)
    next_forward: bool = False
    asynchronous: Asynchronous | None = None
    reducer: Reducer = field(default_factory=Mean)

    def fits(self, gpus: int) -> bool:
        """Whether this number of GPUs fills whole nodes of Hierarchical."""
        node = self.reducer.node if isinstance(self.reducer, Hierarchical) else 0
        return gpus == 1 or not node or gpus % node == 0


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's forecast."""

    units: Sequence[UnitTimes]
    tensors: Sequence[Sized]
    plan: BucketPlan
    link: Fastest
    late: bool  # the next forward waits for a unit's groups; False: the step waits for all groups
    asynchronous: Asynchronous | None = None  # the pieces are updates of such ranks; None: gradients in all-reduces

    def sizes(self) -> list[float]:
        """Bytes of each piece in the order of sending; with a reducer, before its compression."""
        width = [self.tensors[group[0]].width for group in self.plan.buckets]
        return [(p.stop - p.start) * width[p.bucket] for p in self.plan.order]

    def forecast(self, *, timeline: bool = False) -> Forecast:
        """The step in the steady state; of asynchronous ranks the mean of a rank, without a timeline."""
        if pace := self.asynchronous:
            compute_s, times_s = _computing(self.units, 1), [*map(self.link.seconds, self.sizes())]
            link_s = sum(times_s) / pace.every
            return Forecast(max(compute_s, link_s) if pace.hidden else compute_s + link_s, compute_s, link_s)
        return forecast(self.units, self.tensors, self.plan, self.link, next_forward=self.late, timeline=timeline)


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step in seconds; of an asynchronous rank, the mean of its own steps.

    Attributes:
        compute_s: compute of the GPU of median speed.
        straggler_s: the additional time until the slowest GPU has computed.
        exposed_s: communication that is not hidden.
        link_s: all communication, hidden or not.
        inputs: of the forecast; with several micro-batches, of the last one, which can hide communication.
        norms_s: the part of `exposed_s` in which BatchNorms wait for the statistics of other ranks.
        pixels: the share of the images' pixels that is computed with.
    """

    gpus: int
    images: int
    compute_s: float
    straggler_s: float
    exposed_s: float
    link_s: float
    inputs: StepInputs = field(repr=False)
    norms_s: float = 0.0
    pixels: float = 1.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.straggler_s + self.exposed_s

    @property
    def images_per_s(self) -> float:
        """Images/s of all GPUs together."""
        return self.images / self.step_s


@dataclass(frozen=True)
class Simulator:
    """Simulates steps of any size of a network on a cluster.

    Args:
        spread: standard deviation of the logarithm of the ranks' times; None: that of the cluster's GPUs and steps.
        chance: that no rank of a step is slower than simulated; None: the expected step.
        profile: measured times of the network's blocks, in place of the GPU's shipped times.
        norm_batch: images that share BatchNorm statistics, of several ranks if one has fewer; 0: a rank's own.
    """

    cluster: Cluster
    net: ModelCosts
    sharing: Sharing = field(default_factory=Sharing)
    spread: float | None = None
    profile: MeasuredTimes | None = None
    norm_batch: int = 0
    chance: float | None = None

    def step(self, gpus: int, batch: int, *, parts: int = 1, pixels: float = 1.0) -> SimulatedStep:
        """A step of `batch` images over `gpus` GPUs; each takes its share in `parts` micro-batches.

        `pixels`: the share of the images' pixels that is computed with. Raises InputError if the cluster has no such
        GPUs, or they cannot share the batch.
        """
        self.cluster.nodes_for(gpus)
        if batch < gpus * parts:
            raise InputError(f"batch={batch} on {gpus} GPUs: at least {gpus * parts}; raise batch, or take fewer GPUs")
        images = -(-batch // (gpus * parts))  # of the GPU with the most
        pace, gpu = self.sharing.asynchronous if gpus > 1 else None, self.cluster.device
        # slow GPUs stay slow, so with bounded staleness all ranks finally wait for the slowest, but not in each step
        spread = math.hypot(gpu.spread, 0.0 if pace else gpu.jitter) if self.spread is None else self.spread
        if pace and (pace.max_staleness == 0 or self.norm_batch > images):  # BatchNorm's groups would span ranks
            given = f"max_staleness={pace.max_staleness}, {images} images at once"
            allowed = "max_staleness above 0, and norm_batch at most these images"
            raise InputError(f"{given}: asynchronous ranks are simulated with {allowed}")
        slower = 1.0 if pace and pace.max_staleness is None else slowest(spread, gpus, self.chance)
        compute_s = _computing(self.units(images * pixels), parts)
        slow = self.units(images * pixels, slower=slower)
        waits = [0.0] * len(slow)
        if gpus > 1 and self.norm_batch > batch / (gpus * parts):
            # a group of images spans ranks: BatchNorms wait, forward and backward, as in `distributed.batchnorm`, for
            # two numbers of each channel, gathered from all ranks
            link = collectives.fastest(self.cluster, [("all-gather", collectives.gather(self.cluster, gpus))])
            waits = [link.seconds(gpus * 2 * _FP32 * layer.norm) if layer.norm else 0.0 for layer in self.net.layers]
        times = parts if pace else 1  # an exchange overlaps all of a share, an all-reduce its last part
        both = zip(slow, waits, strict=True)
        waiting = [replace(u, forward_s=times * u.forward_s + s, backward_s=times * u.backward_s + s) for u, s in both]
        inputs = self._inputs(waiting, gpus)
        step = inputs.forecast()
        norms_s, late_s = 2 * parts * sum(waits), _computing(slow, parts) - compute_s
        # a rank looks for gradients at any moment of a cycle; all wait for the last, after n / (n + 1) of it, the mean
        # of the largest of n uniform numbers; only before the last collective does nothing else hide this
        polled_s = 0.0 if gpus == 1 or pace or inputs.late else 1e-3 * self.cluster.cycle_ms * gpus / (gpus + 1)
        exposed = norms_s + polled_s + max(0.0, step.exposed_s)  # rounding may leave a negative time
        return SimulatedStep(gpus, batch, compute_s, late_s, exposed, step.link_s, inputs, norms_s, pixels)

    def _inputs(self, units: Sequence[UnitTimes], gpus: int) -> StepInputs:
        """The inputs of the forecast: gradients, groups, link, and whether the next forward waits."""
        sharing, late = self.sharing, self.sharing.next_forward
        if asynchronous := sharing.asynchronous:
            tensors = self.net.with_gradients(CODECS[asynchronous.wire].dtype.itemsize).tensors
            plan = asynchronous.buckets.plan(self.net.defined)  # by the bytes in fp32, whatever type is sent
            sizes = [sum(self.net.defined[i].elements for i in bucket) for bucket in plan.buckets]
            plan = replace(plan, order=tuple(Chunk(i, 0, size) for i, size in enumerate(sizes)))  # each sent whole
            link = collectives.exchange_link(self.cluster, gpus)
            inputs = StepInputs(units, tensors, plan, link, False, asynchronous)
            once = replace(inputs, asynchronous=replace(asynchronous, every=1)).forecast()
            steps = math.ceil(once.link_s / (once.compute_s or math.inf) - 1e-9)  # that an exchange of all groups lasts
            most = most_local_steps(asynchronous.max_staleness) if asynchronous.hidden else 1
            steps = asynchronous.every or min(most, max(1, steps))
            return replace(inputs, asynchronous=replace(asynchronous, every=steps))
        link, tensors, groups = collectives.link(self.cluster, gpus, sharing.reducer), self.net.tensors, sharing.policy
        if isinstance(groups, Planned) and gpus > 1:
            groups, _, late = search(units, tensors, link, next_forward=late)
        elif isinstance(groups, Policy):  # as Overlap does before the first forward
            groups = groups.plan(self.net.defined)
        return StepInputs(units, tensors, groups, link, late)

    def units(self, images: float, *, slower: float = 1.0) -> list[UnitTimes]:
        """The times of the layers on one GPU."""
        return compute_model.units(self.net, self.cluster.device, images, self.profile, slower)

    def evaluation_s(self, gpus: int, images: int) -> float:
        """Seconds of one evaluation: forward, and a small all-reduce of the counts; at least the cluster file's."""
        forward = sum(u.forward_s for u in self.units(max(1, -(-images // gpus))))
        return max(self.cluster.costs.evaluation_s, forward + collectives.link(self.cluster, gpus).seconds(8))


def extremes(simulator: Simulator) -> list[Simulator]:
    """A fast and a slow case of all that is not certain; each figure has its source in docs/simulate.md."""
    cluster, gpu, cases = simulator.cluster, simulator.cluster.device, []
    for chance, by, share, latency, jitter in (
        (0.1, 1 - _UNSURE, 1.0, 1.0, min(gpu.jitter, _JITTERS[0])),
        (0.9, 1 + _UNSURE, min(gpu.compute_share, 1 / 1.4), 3.5, max(gpu.jitter, _JITTERS[1])),
    ):
        own = replace(gpu, alpha_ms=by * gpu.alpha_ms, beta_ms=by * gpu.beta_ms, compute_share=share, jitter=jitter)
        other = replace(cluster, gpu="", own_gpu=own, latency=latency * cluster.latency)
        cases.append(replace(simulator, cluster=other, chance=chance))
    return cases


def _computing(units: Sequence[UnitTimes], parts: int) -> float:
    """Seconds of a share in `parts` micro-batches, each with forward and backward, and of one update after them."""
    return sum(parts * (u.forward_s + u.backward_s) + u.update_s for u in units)


@lru_cache(maxsize=4096)
def slowest(spread: float, ranks: int, chance: float | None = None) -> float:
    """The expected factor of the slowest of `ranks`, or the one that is not exceeded with `chance`; the median has 1.

    Maths: the mean of a maximum is the integral of the probability that some rank still computes.
    """
    if chance is not None:
        return math.exp(spread * NormalDist().inv_cdf(chance ** (1 / ranks)))
    if spread == 0 or ranks == 1:  # one rank waits for nobody
        return 1.0
    x = torch.linspace(math.exp(-9 * spread), math.exp(9 * spread), _POINTS, dtype=torch.float64)
    below = torch.special.ndtr(x.log() / spread)  # the share of ranks with at most x
    return float(x[0] + torch.trapezoid(1 - below**ranks, x))


def timeline(step: SimulatedStep) -> dict[str, Any]:
    """A timeline.json for the report page: the steady state from the start of backward to the end of forward."""
    spans = step.inputs.forecast(timeline=True).spans
    return {"spans": [{**asdict(s), "stream": "link" if s.kind == "transfer" else "compute"} for s in spans]}
