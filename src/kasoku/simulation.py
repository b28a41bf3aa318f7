"""A recipe on a simulated cluster: how its ranks share gradients, its steps, its training, its curves over sizes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kasoku import meetings, simulate
from kasoku.core import Factory, InputError
from kasoku.core.cost import Piece, Plan, Sized
from kasoku.course import ahead, updates
from kasoku.data import Facts, GrowBatch, LowResolution
from kasoku.device import LossScale
from kasoku.memory import SavedMemory
from kasoku.optim import Clip
from kasoku.parallel import AllReduce, Asynchronous, OneGroup, Overlap, Policy, Recalibrate
from kasoku.parallel.batchnorm import norms
from kasoku.parallel.buckets import Graded
from kasoku.ranks import can_share, check_share
from kasoku.recipe import Recipe, load, own_folders
from kasoku.report.html import Panel
from kasoku.simulate import Cluster, Network, Sharing, Simulator, Step
from kasoku.simulate.compute import Profile
from kasoku.simulate.reducing import exchanges, flat
from kasoku.simulate.sweep import efficiency, scaled

_FEW, _ENOUGH = 16, 32  # images that share BatchNorm statistics: fewer are told of; as many are advised


@dataclass(frozen=True)
class EachAlone(Policy):
    """What AllReduce does: a collective a parameter, in their order, so none before the end of backward."""

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """The input's parameters first."""
        order = tuple(Piece(i, 0, t.elements) for i, t in enumerate(tensors))
        return Plan(tuple((i,) for i in range(len(tensors))), order, "a parameter")


@dataclass(frozen=True)
class Case:
    """A recipe on a cluster: what its command, its sweep and its plan ask. `norms`: BatchNorm modules of its model."""

    recipe: Recipe
    facts: Facts
    simulator: Simulator
    remarks: list[str] = field(default_factory=list)
    norms: int = 0

    def step(self, gpus: int) -> Step:
        """A step of the recipe's batch on so many GPUs."""
        self.simulator.cluster.nodes_for(gpus)
        check_share(self.recipe, gpus)
        meetings.asked(self.recipe, gpus)  # raises for what ranks at their own pace cannot have
        if updates(self.recipe, self.facts.images) < 1:
            raise InputError(
                f"batch={self.recipe.batch}, epochs={self.recipe.epochs:g}: not one update of {self.facts.images:,} "
                "images: a smaller batch or more epochs"
            )
        return self.simulator.step(gpus, self.recipe.batch, parts=self.recipe.parts(gpus))

    def rows(self, step: Step) -> dict[str, float]:
        """Seconds of the whole training by item, as a measured run's ledger has them."""
        total = updates(self.recipe, self.facts.images)
        costs, parts = self.simulator.cluster.costs, step.compute_s + step.jitter_s
        forward = sum(u.forward_s for u in step.course.units)
        backward = sum(u.backward_s for u in step.course.units)
        share = forward / (forward + backward)
        tested = self.simulator.evaluation_s(step.gpus, self._tested())
        return {
            "start": costs.setup_s,
            "first epoch": costs.first_epoch_s,
            "input": total * step.input_s,
            "forward": total * share * parts,
            "backward": total * (1 - share) * parts,
            "exposed": total * step.exposed_s,
            "evaluate": evaluations(self.recipe) * tested,
        }

    def _tested(self) -> int:
        """Forwards of an evaluation: of the test images as often as their views take, and of those for BatchNorm."""
        from kasoku.evaluate import PASSES

        anew = [
            t.images or self.facts.images for t in self.recipe.techniques if isinstance(t, Recalibrate) and self.norms
        ]
        return round(PASSES[self.recipe.evaluate.views] * self.facts.tested) + min(sum(anew), self.facts.images)

    def said(self, step: Step) -> list[str]:
        """What to know about the times of a step."""
        images = step.images / (step.gpus * self.recipe.parts(step.gpus))
        simulator, pace = self.simulator, step.course.apart if step.gpus > 1 else None
        more = []
        if pace:
            more.append("Asynchronous: links alone are simulated, not what an owner takes to add, nor copies to a host")
        if pace and (pace.warmup or pace.finish):
            more.append(
                f"Asynchronous: epochs of steps together (warmup={pace.warmup:g}, finish={pace.finish:g}) are not "
                "simulated apart: they are taken as the others"
            )
        if step.norms_s:
            more.append(
                f"norm_batch={self.recipe.norm_batch}, more than a rank has at once: BatchNorms wait for all ranks, "
                f"{1e3 * step.norms_s:.2f} ms of the exposed communication"
            )
        known = simulate.remarks(simulator.net, simulator.cluster.device, images, simulator.profile)
        return self.remarks + more + self._else() + self._few(step.gpus) + known

    def _else(self) -> list[str]:
        """A line for each setting whose time is not in these steps, or in other ones than the recipe takes."""
        out, recipe, gpu = [], self.recipe, self.simulator.cluster.device
        if any(isinstance(t, LowResolution) for t in recipe.techniques):
            out.append("LowResolution: its epochs of small images are taken as of whole ones, which take longer")
        if self.simulator.profile:
            return out
        if recipe.device.precision not in ("auto", "fp16", gpu.precision):
            asked = recipe.device.precision
            out.append(f"precision = {asked}: the times of {gpu.name} are of {gpu.precision}; profile it to be sure")
        if any(isinstance(t, SavedMemory) for t in recipe.techniques):
            out.append("SavedMemory: what it computes again is not simulated; profile it to be sure")
        return out

    def _few(self, gpus: int) -> list[str]:
        """A line where so few images share BatchNorm statistics that the training may miss its accuracy."""
        once = self.recipe.batch // (gpus * self.recipe.parts(gpus))
        seen = self.recipe.norm_batch or once
        if not self.norms or seen >= _FEW:
            return []
        return [
            f"BatchNorm over {seen} image{'s' if seen > 1 else ''} at once: of so few its statistics are noisy, and "
            "accuracy is lost (ResNet-50 on ImageNet: 23.6 % errors at 32 images a GPU, 34.7 % at 2; Wu and He 2018, "
            f"arXiv 1803.08494): {self._remedy(gpus, self._norm_batch(gpus, seen))}"
        ]

    def _remedy(self, gpus: int, enough: int) -> str:
        """What makes more images share statistics; `enough`: the norm_batch that does, 0: there is none."""
        recipe = self.recipe
        own = recipe.batch // (gpus * max(1, recipe.accumulate))  # a larger group spans ranks
        waits = " (ranks then wait for statistics)" if enough > own else ""
        ways = [f"--set norm_batch={enough}{waits}" if enough else "a larger batch"]
        if recipe.accumulate > 1 and not (enough and recipe.norm_batch):
            ways.append(f"a smaller accumulate than {recipe.accumulate}")
        if not recipe.norm_batch:
            return " or ".join([*ways, *(["fewer GPUs"] if gpus > 1 else [])])
        return " or ".join(ways) + ("" if enough else ", and then a larger norm_batch")

    def _norm_batch(self, gpus: int, seen: int) -> int:
        """The least norm_batch that is enough and that so many GPUs can share; 0: there is none."""
        recipe = self.recipe
        if recipe.device.graphs or meetings.own_pace(recipe, gpus):
            return 0  # neither goes with statistics of several ranks
        most = recipe.batch // max(1, recipe.accumulate)
        sizes = (n for n in range(max(_ENOUGH, seen + 1), most + 1) if recipe.batch % n == 0)
        return next((n for n in sizes if can_share(replace(recipe, norm_batch=n), gpus)), 0)

    def usd(self, step: Step, seconds: float) -> float:
        """What the GPUs of a step cost for so long; 0 where no price is known."""
        return seconds / 3600 * step.gpus * self.simulator.cluster.device.usd_hour


def case(arguments: argparse.Namespace, cluster: str, *, like: Case | None = None) -> Case:
    """The recipe on the cluster. Raises InputError for whatever cannot be simulated.

    `like`: of the same arguments with other settings; what these left as it was is not looked at again.
    """
    if not like:
        sys.path.extend(own_folders(arguments.recipe))
    batch = [f"batch={arguments.batch}"] if getattr(arguments, "batch", None) is not None else []
    recipe = load(arguments.recipe, [*arguments.set, *batch])
    if recipe.auto_batch:
        raise InputError('batch = "auto": give --set batch=B, or the recipe of a run that was tuned')
    if any(isinstance(t, GrowBatch) for t in recipe.techniques):
        raise InputError("technique GrowBatch: a batch that grows is not simulated: leave it out, and give one batch")
    on = like.simulator.cluster if like else simulate.load(cluster)
    shared = sharing(recipe, getattr(arguments, "allreduce", ""))
    precision = on.device.precision if recipe.device.precision == "auto" else recipe.device.precision
    shared = replace(shared, needs_all=precision == "fp16")
    if like and (like.recipe.model, like.recipe.data) == (recipe.model, recipe.data):
        other = replace(like.simulator, sharing=shared, norm_batch=recipe.norm_batch)
        return replace(like, recipe=recipe, simulator=other)
    facts, remark = ahead(recipe)
    net, found = _inspect(recipe.model, facts)
    profile = _profile(arguments, net) if getattr(arguments, "profile", None) else None
    simulator = simulate.Simulator(on, net, shared, profile=profile, norm_batch=recipe.norm_batch)
    return Case(recipe, facts, simulator, [remark] if remark else [], found)


def _inspect(model: Factory, facts: Facts) -> tuple[Network, int]:
    """The network of a recipe, and how many BatchNorms it has."""
    with torch.device("meta"):
        made = model(num_classes=facts.classes, in_channels=facts.channels, image_size=facts.side)
        found = len(norms(made))
    return simulate.network(model.use.rpartition(".")[2], made, (facts.channels, facts.side, facts.side)), found


def sharing(recipe: Recipe, algorithm: str = "") -> Sharing:
    """How a recipe's ranks share gradients. Raises InputError for what no simulation knows."""
    techniques = meetings.asked(recipe, 1)
    pace = next((t for t in techniques if isinstance(t, Asynchronous)), None)
    if pace:
        return _apart(recipe, pace, algorithm)
    if any(isinstance(t, AllReduce) for t in techniques) or recipe.device.graphs:
        return Sharing(EachAlone(), next_forward=False, wire_bytes=4, algorithm=algorithm or "auto")
    overlap = next((t for t in techniques if isinstance(t, Overlap)), Overlap())
    late = overlap.next_forward and not any(isinstance(t, Clip | LossScale) for t in techniques)
    alike = flat(overlap.reducer)  # raises for what no simulation knows
    if algorithm not in ("", "auto") and exchanges(alike):
        raise InputError(
            f'--allreduce {algorithm}: reducer Wire with sums="fp32" makes no all-reduce, but an all-to-all and an '
            'all-gather: leave it out, or give Wire sums="wire"'
        )
    reducer = alike if algorithm else overlap.reducer
    return Sharing(overlap.buckets, late, algorithm=algorithm or "auto", reducer=reducer)


def _apart(recipe: Recipe, pace: Asynchronous, algorithm: str) -> Sharing:
    """Updates that ranks exchange at their own pace. Raises InputError for what a training refuses beside them."""
    names = [type(t).__name__ for t in recipe.techniques] + ["Graphs"] * bool(recipe.device.graphs)
    for name in names:
        if name in pace.refuses:
            raise InputError(f"techniques {name} and Asynchronous cannot be combined: leave one of them out")
    if algorithm:
        raise InputError(f"--allreduce {algorithm}: ranks at their own pace send no all-reduces: leave it out")
    return Sharing(pace.buckets, next_forward=False, apart=pace)


def _profile(arguments: argparse.Namespace, net: Network) -> Profile:
    folders: list[Path] = []
    batches: list[int] = []
    for given in arguments.profile:
        folder, _, images = given.rpartition(":")
        if not folder or not images.isdecimal() or int(images) < 1:
            raise InputError(f"--profile {given}: DIR:IMAGES is wanted, the folder and the images of its steps")
        folders.append(Path(folder))
        batches.append(int(images))
    return simulate.profiled(folders, net, batches)


def document(asked: Case, step: Step) -> dict[str, Any]:
    """All figures of a step and of the training."""
    rows = asked.rows(step)
    parts = asked.recipe.parts(step.gpus)
    alone = asked.simulator.step(1, max(parts, asked.recipe.batch // step.gpus), parts=parts)
    whole = sum(rows.values())
    return {
        "gpus": step.gpus,
        "batch": step.images,
        "step_s": step.step_s,
        "compute_s": step.compute_s,
        "jitter_s": step.jitter_s,
        "exposed_s": step.exposed_s,
        "input_s": step.input_s,
        "exchange_s" if step.course.apart else "all_reduce_s": step.link_s,
        "images_per_s": step.images_per_s,
        "efficiency": step.images_per_s / step.gpus / alone.images_per_s,
        "rows": rows,
        "training_s": whole,
        "usd": asked.usd(step, whole),
    }


def swept(
    asked: Case, gpus: Sequence[int], step: Step, *, what: tuple[str, Cluster | None]
) -> tuple[dict[str, Any], list[Panel]]:
    """Throughput and efficiency over the number of GPUs, each with the images of `step`: points, and curves of them."""
    simulator, parts = asked.simulator, asked.recipe.parts(step.gpus)
    images = max(parts, step.images // step.gpus)
    lines = {
        name: scaled(replace(simulator, sharing=way), gpus, images=images, parts=parts)
        for name, way in _ways(simulator.sharing, step).items()
    }
    change, cluster = what
    if cluster is not None:
        lines[f"{list(lines)[-1]}; {change}"] = scaled(
            replace(simulator, cluster=cluster, sharing=list(_ways(simulator.sharing, step).values())[-1]),
            gpus,
            images=images,
            parts=parts,
        )
    rates = {name: [(s.gpus, s.images_per_s) for s in steps] for name, steps in lines.items()}
    shares = {name: list(zip(gpus, efficiency(steps), strict=True)) for name, steps in lines.items()}
    panels = [Panel("images/s", rates, log=True), Panel("efficiency", shares)]
    points = {name: [[s.gpus, s.step_s, s.images_per_s] for s in steps] for name, steps in lines.items()}
    return {"images_a_gpu": images, "parts": parts, "points": points}, panels


@dataclass(frozen=True)
class Found(Policy):
    """A plan that was made already: a search at each size of a sweep would take minutes."""

    made: Plan

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """That plan."""
        return self.made


def _ways(shared: Sharing, step: Step) -> dict[str, Sharing]:
    """Ways to share gradients that a sweep compares: nothing hidden, behind backward, and as the recipe has it."""
    ways = {
        "one group after backward": replace(shared, policy=OneGroup(), next_forward=False, apart=None),
        "graded groups behind backward": replace(shared, policy=Graded(), next_forward=False, apart=None),
    }
    if shared.apart:
        return {**ways, "asynchronous": shared}
    plan, late = step.course.plan, step.course.late
    if step.gpus > 1:
        name = f"{plan.policy}{', also behind the next forward' if late else ''}"
        ways[name] = replace(shared, policy=Found(plan), next_forward=late)
    return ways


def evaluations(recipe: Recipe) -> int:
    """How many there are: every so many epochs from the start on, and at the end."""
    every, start = recipe.evaluate.every, recipe.evaluate.start
    inside = [k for k in range(1, int(recipe.epochs / every) + 1) if start <= k * every < recipe.epochs]
    return len(inside) + 1
