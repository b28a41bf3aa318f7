"""Simulates a recipe on a cluster: how its ranks share gradients, its steps, its training, its scaling."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kasoku.config.ranks import TEST_PASSES, check_share
from kasoku.config.recipe import Recipe, network
from kasoku.config.updates import data_info, evaluations, growth, pixel_share, updates, updates_in_epoch
from kasoku.core import InputError
from kasoku.data import Facts
from kasoku.distributed import Fixed, Mean, OneBucket, Overlap, PerLayer, Planned, Policy
from kasoku.distributed.ddp.bucket_plan import MIB, Graded
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Sized
from kasoku.simulate import Cluster, ModelCosts, Sharing, SimulatedStep, Simulator
from kasoku.simulate.collectives import flat
from kasoku.simulate.compute_model import model_costs, profiled, remarks

_MS = 1e3
_SLICES = 20  # of an epoch, in each of which all steps are alike
# of a sweep: GPUs with equal shares, GPUs that share the batch, images of a GPU, of a step, MiB of DDP's groups
AXES = ("gpus", "strong", "images", "batch", "bucket_mib")
_JOIN_S = 265 / 98_304  # of each rank in the start of NCCL's communicators, taken as linear (NCCLX, arXiv 2510.20171)
_FEW = 16  # images that share BatchNorm statistics: fewer get a remark (Wu and He 2018, arXiv 1803.08494)


@dataclass(frozen=True)
class AfterBackward(Policy):
    """The buckets of a policy, or one a parameter (AllReduce), of which none is sent before the end of backward."""

    policy: Policy | None = None

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        """The bucket nearest the input is sent first, since its gradients arrive last."""
        if self.policy is not None:
            plan = self.policy.plan([replace(t, unit=0) for t in tensors])
            return replace(plan, order=plan.order[::-1])
        order = tuple(Chunk(i, 0, t.elements) for i, t in enumerate(tensors))
        return BucketPlan(tuple((i,) for i in range(len(tensors))), order, "a parameter")


@dataclass(frozen=True)
class Scenario:
    """A recipe on a cluster. `notes`: remarks on its data."""

    recipe: Recipe
    facts: Facts
    simulator: Simulator
    notes: tuple[str, ...] = ()

    def with_sharing(self, sharing: Sharing) -> "Scenario":
        return replace(self, simulator=replace(self.simulator, sharing=sharing))

    def planned(self, step: SimulatedStep) -> "Scenario":
        """With the groups of a step, which are then not searched again."""
        shared = self.simulator.sharing
        own = replace(shared, policy=step.inputs.plan, next_forward=step.inputs.late)
        return self if shared.asynchronous else self.with_sharing(own)

    def step(self, gpus: int) -> SimulatedStep:
        """A step of the recipe's batch. Raises InputError where the GPUs cannot share it."""
        self.simulator.cluster.nodes_for(gpus)
        check_share(self.recipe, gpus)
        if updates(self.recipe, self.facts.images) < 1:
            given = f"batch={self.recipe.batch}, epochs={self.recipe.epochs:g}, {self.facts.images:,} images"
            raise InputError(f"{given}: not one update: a smaller batch or more epochs")
        return self.simulator.step(gpus, self.recipe.batch, parts=self.recipe.parts(gpus))

    def images_each(self, step: SimulatedStep) -> int:
        """Images a GPU of a step, at least one for each of its parts."""
        return max(self.recipe.parts(step.gpus), step.images // step.gpus)

    def steps(self, step: SimulatedStep) -> list[tuple[SimulatedStep, float]]:
        """The kinds of steps of the training, and their numbers; `step` is one of the recipe's batch."""
        recipe, shared, parts = self.recipe, self.planned(step).simulator.sharing, self.recipe.parts(step.gpus)
        counts: dict[tuple[int, float, bool], float] = defaultdict(float)
        pace, plain = shared.asynchronous, (1, 1.0, False)
        slices = _SLICES if pace or any(technique.changes_resolution for technique in recipe.techniques) else 1
        for epoch in range(math.ceil(recipe.epochs)):
            part, grown = min(1.0, recipe.epochs - epoch), growth(recipe, epoch)  # the last epoch may be a part
            count = round(part * updates_in_epoch(recipe, self.facts.images, epoch)) / slices
            for at in (epoch + part * (i + 0.5) / slices for i in range(slices)):
                synchronous = bool(pace and (at < pace.warmup or 0 < pace.finish <= at))
                counts[grown, pixel_share(recipe, at, self.facts.side), synchronous] += count

        def simulated(grown: int, pixels: float, synchronous: bool) -> SimulatedStep:
            own = Sharing(pace.buckets) if pace and synchronous else shared  # as Asynchronous' own Overlap
            simulator = replace(self.simulator, sharing=own)
            return simulator.step(step.gpus, grown * step.images, parts=grown * parts, pixels=pixels)

        return [(step if kind == plain else simulated(*kind), count) for kind, count in counts.items()]

    def rows(self, step: SimulatedStep) -> dict[str, float]:
        """Seconds of the whole training by item; the items are rows of a measured run's ledger."""
        costs = self.simulator.cluster.costs
        # forward passes of an evaluation: the test images in each view, and the images that recalibrate BatchNorm
        passes = round(TEST_PASSES[self.recipe.evaluate.views] * self.facts.tested)
        if any(layer.norm for layer in self.simulator.net.layers):
            renewing: list[Any] = [t for t in self.recipe.techniques if t.renews_statistics]
            passes += min(sum(t.images or self.facts.images for t in renewing), self.facts.images)
        rows = dict.fromkeys(("forward", "backward", "exposed"), 0.0)
        for own, count in self.steps(step):
            ways = [sum(unit.forward_s for unit in own.inputs.units), sum(unit.backward_s for unit in own.inputs.units)]
            computing = count * (own.compute_s + own.straggler_s) / sum(ways)
            rows["forward"] += computing * ways[0]
            rows["backward"] += computing * ways[1]
            rows["exposed"] += count * own.exposed_s
        evaluate_s = evaluations(self.recipe) * self.simulator.evaluation_s(step.gpus, passes)
        start_s = costs.setup_s or (_JOIN_S * step.gpus if step.gpus > 1 else 0.0)
        return {"start": start_s, "first epoch": costs.first_epoch_s, **rows, "evaluate": evaluate_s}

    def document(self, step: SimulatedStep) -> dict[str, Any]:
        """All figures of a step and of the training, for a JSON file."""
        rows = self.rows(step)
        alone = self.simulator.step(1, self.images_each(step), parts=self.recipe.parts(step.gpus))
        training_s = sum(rows.values())
        return {
            **{name: getattr(step, name) for name in ("gpus", "step_s", "compute_s", "exposed_s", "images_per_s")},
            "batch": step.images,
            "jitter_s": step.straggler_s,
            "exchange_s" if step.inputs.asynchronous else "all_reduce_s": step.link_s,
            "efficiency": step.images_per_s / step.gpus / alone.images_per_s,
            "steps": [
                {"batch": own.images, "pixels": own.pixels, "updates": count, "step_s": own.step_s}
                for own, count in self.steps(step)
            ],
            "rows": rows,
            "training_s": training_s,
            "usd": self.usd(step, training_s),
        }

    def table(self, step: SimulatedStep, document: Mapping[str, Any]) -> dict[str, str]:
        """The rows of a printed table; `document`: the figures of this step."""
        inputs, pace = step.inputs, step.inputs.asynchronous if step.gpus > 1 else None
        cluster, reducer = self.simulator.cluster, self.simulator.sharing.reducer
        device, free = cluster.device, pace and pace.max_staleness is None
        exchanged = "exchanges" if pace else "all-reduces"
        algorithm = inputs.link.choice(max(inputs.sizes(), default=0.0))
        price = f"{document['usd']:,.2f} USD at {device.usd_hour:.2f} an hour a GPU" if device.usd_hour else "no price"
        rows = {
            "GPUs": f"{step.gpus:,} {device.name}, {step.images / step.gpus:g} images each",
            "nodes": f"{cluster.nodes_for(step.gpus):,}",
            "step": f"{_MS * step.step_s:.2f} ms",
            "computing": f"{_MS * step.compute_s:.2f} ms on the median GPU",
            "the slowest rank": "not waited for" if free else f"{_MS * step.straggler_s:.2f} ms more",
            "exposed communication": f"{_MS * step.exposed_s:.2f} ms of {_MS * step.link_s:.2f} ms of {exchanged}",
            "groups": f"{len(inputs.plan.buckets)} ({inputs.plan.policy}); the largest by {algorithm}",
            "reducer": str(reducer) if step.gpus > 1 and reducer != Mean() else "",
            "throughput": f"{step.images_per_s:,.0f} images/s, {document['efficiency']:.1%} of as many GPUs alone",
            "training": f"{document['training_s']:,.1f} s for {self.recipe.epochs:g} epochs; {price}",
            "source": device.source or "the cluster's file",
        }
        return {name: text for name, text in rows.items() if text}

    def usd(self, step: SimulatedStep, seconds: float) -> float:
        """The rent of a step's GPUs for this time; 0 if the price is unknown."""
        return seconds / 3600 * step.gpus * self.simulator.cluster.device.usd_hour

    def remarks(self, step: SimulatedStep) -> list[str]:
        """The limits of these times, a line each."""
        recipe, simulator = self.recipe, self.simulator
        gpu, profile, precision = simulator.cluster.device, simulator.profile, recipe.device.precision
        lines = list(self.notes)
        if step.inputs.asynchronous and step.gpus > 1:
            lines.append("Asynchronous: only links are simulated, not the owners' additions or copies to a host")
        if step.norms_s:
            waits = f"BatchNorms wait for all ranks, {_MS * step.norms_s:.2f} ms of the exposed communication"
            lines.append(f"norm_batch={recipe.norm_batch} is more than a rank has at once: {waits}")
        if not profile and precision not in ("auto", "fp16", gpu.precision):
            lines.append(f"precision = {precision}: {gpu.name} was measured in {gpu.precision}; a profile is surer")
        if not profile and any(technique.saves_memory for technique in recipe.techniques):
            lines.append("SavedMemory: its recomputation is not simulated; a profile includes it")
        shared = recipe.images_per_norm(step.gpus)
        if shared < _FEW and any(layer.norm for layer in simulator.net.layers):
            what = f"BatchNorm over {shared} image{'s' if shared > 1 else ''} at once: noisy statistics cost accuracy"
            lines.append(f"{what}: take a larger norm_batch or batch, a smaller accumulate, or fewer GPUs")
        return lines + remarks(simulator.net, gpu, step.images / (step.gpus * recipe.parts(step.gpus)), profile)


def scenario(
    recipe: Recipe, cluster: Cluster, *, profiles: Sequence[str] = (), like: Scenario | None = None
) -> Scenario:
    """The recipe on the cluster. Raises InputError for settings that are not simulated.

    `profiles`: as `profiled` takes them. `like`: another recipe on this cluster; equal models and data are not
    inspected again.
    """
    if recipe.auto_batch:
        given = 'batch = "auto" is tuned on the machine that trains'
        raise InputError(f"{given}: give --set batch=B, or the recipe of a run that was tuned")
    shared = sharing(recipe)
    if like and (like.recipe.model, like.recipe.data) == (recipe.model, recipe.data):
        other = replace(like.simulator, sharing=shared, norm_batch=recipe.norm_batch)
        return replace(like, recipe=recipe, simulator=other)
    facts, note = data_info(recipe)
    net = _inspect(recipe, facts)
    profile = profiled(profiles, net) if profiles else None
    simulator = Simulator(cluster, net, shared, profile=profile, norm_batch=recipe.norm_batch)
    return Scenario(recipe, facts, simulator, (note,) if note else ())


def _inspect(recipe: Recipe, facts: Facts) -> ModelCosts:
    with torch.device("meta"):
        module = network(recipe, facts.classes, facts.channels, facts.side, weights=False)
    keys, use = recipe.model.keys, recipe.model.use
    name = keys["model_name"].partition(".")[0] if "model_name" in keys else use.rpartition(".")[2]
    return model_costs(name, module, (facts.channels, facts.side, facts.side))


def sharing(recipe: Recipe) -> Sharing:
    """How a recipe's ranks share gradients. Raises InputError for techniques that are not simulated."""
    techniques = recipe.scaled_techniques
    exchanging = sorted((t for t in techniques if t.exchanges_gradients), key=lambda t: t.stage)
    exchange: Any = [*exchanging, Overlap()][0]
    if exchange.is_asynchronous:
        if len(exchanging) > 1:
            beside = type(exchanging[1]).__name__
            raise InputError(f"Asynchronous beside {beside}: nodes are not simulated; leave one of them out")
        return Sharing(exchange.buckets, asynchronous=exchange)
    if not exchange.overlaps_backward:
        return Sharing(AfterBackward())
    if exchange.shard or getattr(exchange.buckets, "shards", False):
        raise InputError("Overlap: sharded updates are not simulated: set shard = false, and shards of Planned")
    flat(exchange.reducer)  # raises for a reducer that is not simulated
    whole = any(t.needs_whole_gradients for t in techniques)
    policy, late = exchange.buckets, exchange.next_forward and not whole
    if recipe.device.graphs:  # for which Planned finds one bucket
        policy, late = AfterBackward(OneBucket() if isinstance(policy, Planned) else policy), False
    return Sharing(policy, late, reducer=exchange.reducer)


def ways(base: Scenario, step: SimulatedStep) -> dict[str, Simulator]:
    """The ways to share gradients that a sweep compares: those of others, and the recipe's own."""
    simulator, pace = base.simulator, base.simulator.sharing.asynchronous
    shared = replace(simulator.sharing, asynchronous=None, next_forward=False)
    # asynchronous ranks are compared with all-reduces in 16 bits
    usual = replace(simulator, net=simulator.net.with_gradients(2)) if pace else simulator
    policies = {
        "one group after backward": OneBucket(),
        "a group a layer behind backward": PerLayer(),
        "DDP's groups behind backward": Fixed(),
        "graded groups behind backward": Graded(),
    }
    simulators = {name: replace(usual, sharing=replace(shared, policy=policy)) for name, policy in policies.items()}
    if pace or step.gpus > 1:
        late = ", also behind the next forward" if step.inputs.late else ""
        simulators["asynchronous" if pace else step.inputs.plan.policy + late] = base.planned(step).simulator
    return simulators


def sweep(
    ways: Mapping[str, Simulator], axis: str, values: Sequence[int], *, gpus: int, batch: int, parts: int = 1
) -> dict[str, list[tuple[int, SimulatedStep]]]:
    """Steps of each way at values of one of AXES; `gpus`, `batch`: what it does not vary."""

    def step(way: Simulator, x: int) -> SimulatedStep:
        if axis == "bucket_mib" and isinstance(way.sharing.policy, Fixed):
            way = replace(way, sharing=replace(way.sharing, policy=Fixed(x * MIB)))
        at = {"gpus": (x, x * (batch // gpus)), "strong": (x, batch), "images": (gpus, x * gpus), "batch": (gpus, x)}
        return way.step(*at.get(axis, (gpus, batch)), parts=parts)

    return {name: [(x, step(way, x)) for x in values] for name, way in ways.items()}


def sizes(cluster: Cluster, low: int, high: int, *, fits: Callable[[int], bool] = lambda _: True) -> list[int]:
    """Numbers of GPUs from low to high that fill their nodes and pass `fits`, as `spaced` takes them.

    Raises InputError for a range that the cluster does not hold.
    """
    if high > cluster.most:
        raise InputError(f"sweep gpus={low}:{high}: {cluster.name} has {cluster.most:,} GPUs: sweep up to these")
    possible = [n for n in range(low, high + 1) if cluster.fills(n) and fits(n)]
    if not possible:
        each = cluster.node.gpus
        raise InputError(f"gpus={low}:{high}: nodes of {each}: none of these numbers fills them and shares the batch")
    return spaced(possible)


def spaced(possible: Sequence[int], count: int = 60, tries: int = 60) -> list[int]:
    """At least `count` of the possible numbers, in order, about evenly spaced in their logarithms; or all of them."""
    apart, numbers = (possible[-1] / possible[0]) ** (1 / tries), [possible[0]]
    for n in possible[1:]:
        if n >= apart * numbers[-1] or n == possible[-1]:
            numbers.append(n)
    return numbers if len(numbers) >= min(count, len(possible)) else spaced(possible, count, 2 * tries)
