"""Searches a batch, a number of GPUs, gradient groups and an all-reduce that meet a deadline or a budget."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kasoku.config.ranks import can_share
from kasoku.config.recipe import Recipe
from kasoku.config.updates import growth, updates
from kasoku.core import InputError
from kasoku.distributed import Graded, Hierarchical, Overlap, Planned
from kasoku.simulate import Cluster, SimulatedStep
from kasoku.simulate.collectives import flat
from kasoku.simulate.from_recipe import Scenario, scenario, sharing, sizes

# Measured over simulated steps, at the best and at the worst of the published runs that calibrate nothing
# (benchmarks/simulate_published.py): the ranges of a plan; no simulated step depends on them. Bounds from physics alone
# were tried (RECORDS.md): too wide to help with a deadline, and one of these runs lay outside
LEAST, MOST = 0.97, 1.19
_SIZES = 24  # numbers of GPUs tried with each batch
_OUTPUTS = 22_228_968  # layer outputs of an image of ResNet-50 at 224 pixels, with which GPUs were measured
_WORTH = 0.99  # searched groups, or an all-reduce by nodes, must take less than this share of the step's time


@dataclass(frozen=True)
class Choice:
    """A batch on a number of GPUs, and the seconds and USD of the training."""

    scenario: Scenario
    step: SimulatedStep
    seconds: float
    usd: float


def choice(base: Scenario, gpus: int) -> Choice:
    """Simulates the recipe on a number of GPUs."""
    step = base.step(gpus)
    seconds = sum(base.rows(step).values())
    return Choice(base, step, seconds, base.usd(step, seconds))


def choices(recipes: Iterable[Recipe], cluster: Cluster, profiles: Sequence[str] = ()) -> list[Choice]:
    """Simulates each recipe on numbers of GPUs that can share its batch, with graded groups.

    The images that surely fit on a GPU are those of its largest measured batch, scaled by the outputs of the network's
    layers. With a technique that saves memory, the whole batch: SavedMemory plans for the available memory. Raises
    InputError if there is no such number.
    """
    simulated: list[Choice] = []
    base: Scenario | None = None
    tight = ""
    for recipe in recipes:
        base = scenario(recipe, cluster, profiles=profiles, like=base)
        largest = recipe.batch * max(growth(recipe, epoch) for epoch in range(math.ceil(recipe.epochs)))
        if largest > base.facts.images or updates(recipe, base.facts.images) < 1:
            continue
        simulator = base.simulator
        outputs = sum(layer.outputs for layer in simulator.net.layers)
        most = int(cluster.device.most * _OUTPUTS / max(1.0, outputs))
        if simulator.profile:
            most = max(most, *simulator.profile.batches)
        if any(technique.saves_memory for technique in recipe.techniques):
            most = recipe.batch
        numbers = range(1, min(cluster.most, recipe.batch) + 1)
        counts = [n for n in numbers if cluster.fills(n) and can_share(recipe, n)]
        fitting = {n for n in counts if recipe.batch <= n * recipe.parts(n) * most}
        if fitting:
            graded, shared = base, simulator.sharing
            if _has_groups(base):
                reducer = flat(shared.reducer)
                graded = base.with_sharing(replace(shared, policy=Graded(), next_forward=False, reducer=reducer))
            counts = sizes(cluster, 1, cluster.most, _SIZES, fits=fitting.__contains__)
            simulated += [_by_nodes(choice(graded, gpus)) for gpus in counts]
        elif counts and not tight:
            fewer = "larger accumulate" if recipe.norm_batch <= most else "smaller norm_batch"
            tight = f", {most:,} images at once each: a {fewer} takes fewer"
    if not simulated:
        raise InputError(f"no batch of this recipe makes an update and can be shared by GPUs of {cluster.name}{tight}")
    return simulated


def _has_groups(base: Scenario) -> bool:
    """Whether the planner may choose groups: a graph gives all gradients at once, asynchronous ranks have no groups."""
    return not (base.recipe.device.graphs or base.simulator.sharing.asynchronous)


def _if_faster(plain: Choice, **changes: Any) -> Choice:
    """The choice with other settings of Sharing, if the planner may choose groups and that is fast enough."""
    base = plain.scenario
    if not _has_groups(base):
        return plain
    other = choice(base.with_sharing(replace(base.simulator.sharing, **changes)), plain.step.gpus)
    return other if other.step.step_s < _WORTH * plain.step.step_s else plain


def _by_nodes(plain: Choice) -> Choice:
    """The choice with gradients averaged first within nodes, between which the recipe's own reducer averages."""
    simulator = plain.scenario.simulator
    if plain.step.gpus <= simulator.cluster.node.gpus:
        return plain
    # a node has as many ranks as a launcher starts on a machine
    return _if_faster(plain, reducer=Hierarchical(0, simulator.sharing.reducer))


def best(tried: Sequence[Choice], deadline_s: float, budget_usd: float) -> Choice:
    """The cheapest by a deadline, or the fastest within a budget, or (both 0) the fastest.

    Raises InputError if no choice meets it; the message has the nearest one.
    """
    fastest = min(tried, key=lambda c: c.seconds)
    if deadline_s:
        in_time = [c for c in tried if c.seconds * MOST <= deadline_s]
        if not in_time:
            takes = f"{fastest.seconds:,.0f} s, at worst {fastest.seconds * MOST:,.0f} s, on {fastest.step.gpus:,} GPUs"
            raise InputError(f"deadline of {deadline_s:,.0f} s: the fastest plan takes {takes}")
        return min(in_time, key=lambda c: (c.usd or c.seconds * c.step.gpus, c.seconds))
    if budget_usd:
        if not fastest.scenario.simulator.cluster.device.usd_hour:
            raise InputError("--budget: the price of a GPU is unknown: set usd_hour in the cluster's [own_gpu]")
        paid = [c for c in tried if c.usd * MOST <= budget_usd]
        if not paid:
            least = min(tried, key=lambda c: c.usd)
            raise InputError(f"budget of {budget_usd:,.2f} USD: the cheapest plan may cost {least.usd * MOST:,.2f} USD")
        return min(paid, key=lambda c: c.seconds)
    return fastest


def with_searched_groups(graded: Choice) -> Choice:
    """The choice with searched groups, if they are fast enough."""
    return _if_faster(graded, policy=Planned(), next_forward=sharing(graded.scenario.recipe).next_forward)


def planned_recipe(chosen: Choice) -> Recipe:
    """The recipe at the chosen batch, with an Overlap of the chosen groups and reducer."""
    recipe, shared = chosen.scenario.recipe, chosen.scenario.simulator.sharing
    if not _has_groups(chosen.scenario):
        return recipe
    own: Any = next((t for t in recipe.techniques if t.overlaps_backward), Overlap())
    own = replace(own, buckets=shared.policy, next_forward=shared.next_forward, reducer=shared.reducer)
    local = tuple(t for t in recipe.techniques if not t.exchanges_gradients)
    return replace(recipe, techniques=(*local, own))
