"""Searches a batch, a number of GPUs, gradient groups and an all-reduce that meet a deadline or a budget."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kasoku.config.ranks import can_share
from kasoku.config.recipe import Recipe
from kasoku.config.updates import growth, images_in_epoch, updates
from kasoku.core import InputError
from kasoku.distributed import Graded, Hierarchical, Overlap, Planned
from kasoku.simulate import Cluster, SimulatedStep
from kasoku.simulate.collectives import flat
from kasoku.simulate.from_recipe import Scenario, scenario, sharing, spaced
from kasoku.simulate.step import extremes

_SIZES = 24  # numbers of GPUs tried with each batch
_OUTPUTS = 22_228_968  # layer outputs of an image of ResNet-50 at 224 pixels, with which GPUs were measured
_WORTH = 0.99  # searched groups, or an all-reduce by nodes, must take less than this share of the step's time


@dataclass(frozen=True)
class Choice:
    """A batch on a number of GPUs, the seconds and USD of the training, and factors on them in fast and slow cases."""

    scenario: Scenario
    step: SimulatedStep
    seconds: float
    usd: float
    least: float
    most: float


def choice(base: Scenario, gpus: int) -> Choice:
    """Simulates the recipe on a number of GPUs."""
    step = base.step(gpus)
    seconds = sum(base.rows(step).values())
    cases = extremes(base.planned(step).simulator)
    least, most = (replace(base, simulator=case).step(gpus).step_s / step.step_s for case in cases)
    return Choice(base, step, seconds, base.usd(step, seconds), least, most)


def choices(recipes: Iterable[Recipe], cluster: Cluster, profiles: Sequence[str] = ()) -> list[Choice]:
    """Simulates each recipe on numbers of GPUs that can share its batch, with graded groups.

    The images that surely fit on a GPU are those of its largest measured batch, scaled by the outputs of the network's
    layers. With a technique that saves memory, the whole batch: SavedMemory plans for the available memory. Raises
    InputError if there is no such number.
    """
    simulated, tight = list[Choice](), ""
    base: Scenario | None = None
    for recipe in recipes:
        base = scenario(recipe, cluster, profiles=profiles, like=base)
        epochs, images = range(math.ceil(recipe.epochs)), base.facts.images
        too_large = any(recipe.batch * growth(recipe, i) > images_in_epoch(recipe, images, i) for i in epochs)
        if too_large or updates(recipe, base.facts.images) < 1:
            continue
        simulator = base.simulator
        most = int(cluster.device.most * _OUTPUTS / max(1.0, sum(layer.outputs for layer in simulator.net.layers)))
        if simulator.profile:
            most = max(most, *simulator.profile.batches)
        if any(technique.saves_memory for technique in recipe.techniques):
            most = recipe.batch
        counts = [n for n in range(1, min(cluster.most, recipe.batch) + 1) if cluster.fills(n) and can_share(recipe, n)]
        fitting = [n for n in counts if recipe.batch <= n * recipe.parts(n) * most]
        if fitting:
            graded, shared = base, simulator.sharing
            if _has_groups(base):
                reducer = flat(shared.reducer)
                graded = base.with_sharing(replace(shared, policy=Graded(), next_forward=False, reducer=reducer))
            # averaged first within nodes of as many ranks as a launcher starts on a machine, if that is faster
            nodes, each = Hierarchical(0, graded.simulator.sharing.reducer), cluster.node.gpus
            plain = (choice(graded, gpus) for gpus in spaced(fitting, _SIZES, _SIZES))
            simulated += [_if_faster(c, reducer=nodes) if c.step.gpus > each else c for c in plain]
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


def best(tried: Sequence[Choice], deadline_s: float, budget_usd: float) -> Choice:
    """The cheapest by a deadline, or the fastest within a budget, or (both 0) the fastest.

    Raises InputError if no choice meets it; the message has the nearest one.
    """
    fastest = min(tried, key=lambda c: c.seconds)
    if deadline_s:
        in_time = [c for c in tried if c.seconds * c.most <= deadline_s]
        if not in_time:
            worst_s = fastest.seconds * fastest.most
            takes = f"{fastest.seconds:,.0f} s, at worst {worst_s:,.0f} s, on {fastest.step.gpus:,} GPUs"
            raise InputError(f"deadline of {deadline_s:,.0f} s: the fastest plan takes {takes}")
        return min(in_time, key=lambda c: (c.usd or c.seconds * c.step.gpus, c.seconds))
    if budget_usd:
        if not fastest.scenario.simulator.cluster.device.usd_hour:
            raise InputError("--budget: the price of a GPU is unknown: set usd_hour in the cluster's [own_gpu]")
        paid = [c for c in tried if c.usd * c.most <= budget_usd]
        if not paid:
            least_usd = min(c.usd * c.most for c in tried)
            raise InputError(f"budget of {budget_usd:,.2f} USD: the cheapest plan may cost {least_usd:,.2f} USD")
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
