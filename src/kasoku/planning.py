"""kasoku plan: how many GPUs and which batch for a deadline, a budget, or the least time, and a script for it.

Written into the folder: the recipe at the batch chosen, with its groups and its reducer; launch.sbatch, which trains
it; plan.json: what is expected, item by item, which `kasoku plan --compare RUN` holds against a run of that recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kasoku.core import InputError

if TYPE_CHECKING:
    from kasoku.core import Schedule
    from kasoku.recipe import Recipe
    from kasoku.simulate import Step
    from kasoku.simulation import Case

# What a step really took over what was simulated, at the best and at the worst of the published ones that calibrate
# nothing (benchmarks/simulate_published.py): the ranges of a plan, on which no simulated step depends. Bounds from
# physics alone were tried (RECORDS.md): wider than helps a deadline, and one of these steps lay outside
_LEAST, _MOST = 0.97, 1.19
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = 24  # of a batch
_OUTPUTS = 22_228_968  # of an image of ResNet-50 at 224 pixels: of these a GPU held as many as it was measured with
_WORTH = 0.99  # of a step as it is planned first: what searched groups, or an all-reduce by nodes, must promise


@dataclass(frozen=True)
class Choice:
    """A batch on so many GPUs: the training's seconds and USD, and what a deadline has to hold out."""

    case: Case
    step: Step
    seconds: float
    usd: float

    @property
    def late_s(self) -> float:
        """The training, if steps are as much slower as any that was simulated and measured."""
        return self.seconds * _MOST


def add_parser(commands: Any) -> None:
    """Adds `plan` to the command's parsers."""
    plan = commands.add_parser("plan", help="GPUs, batch and groups for a deadline or a budget; a recipe and a script")
    plan.add_argument("recipe", nargs="?", type=Path, help="a recipe file (TOML)")
    plan.add_argument("--cluster", metavar="NAME|FILE", help="abci, mn2, dgx-a100, ..., or a file")
    goal = plan.add_mutually_exclusive_group()
    goal.add_argument("--deadline", default="", metavar="TIME", help="the cheapest within 90s, 10min, 2h")
    goal.add_argument("--budget", default="", metavar="USD", help="the fastest within 100USD")
    goal.add_argument("--fastest", action="store_true", help="the fastest, whatever it costs")
    plan.add_argument("--compare", type=Path, metavar="RUN", help="what was expected of a run against what it took")
    plan.add_argument("--noise-scale", type=float, metavar="B", help="of gradients, by kasoku tune")
    plan.add_argument(
        "--profile", action="append", default=[], metavar="DIR:IMAGES", help="times of kasoku profile at a batch"
    )
    plan.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    plan.add_argument("--out", type=Path, metavar="DIR", help="the folder for it all (default: runs/NAME-plan-N)")
    plan.set_defaults(run=_plan, stays="nothing was written")


def _plan(arguments: argparse.Namespace) -> int:
    from kasoku.planned import compare
    from kasoku.recipe import own_folders
    from kasoku.report import print_table
    from kasoku.runs import own_folder
    from kasoku.simulate.cluster import Costs

    if arguments.compare:
        return compare(arguments.compare)
    _check(arguments)
    sys.path.extend(own_folders(arguments.recipe))
    deadline_s, budget = _seconds(arguments.deadline), _usd(arguments.budget)
    choices = list(_choices(arguments))
    chosen = _searched(_best(choices, deadline_s, budget))
    folder = own_folder(arguments.out, arguments.recipe, "plan", written=[f"{arguments.recipe.stem}.toml"])
    for line in chosen.case.said(chosen.step):
        print(f"kasoku: {line}", file=sys.stderr)
    on = chosen.case.simulator.cluster
    if on.costs == Costs():
        print(f"kasoku: {on.name} has no [costs]: 0 s are expected before the first step", file=sys.stderr)
    print_table(f"the best of {len(choices)} ways", _rows(chosen))
    _write(chosen, folder, arguments.recipe)
    print(f"{folder}: {arguments.recipe.stem}.toml, launch.sbatch, plan.json")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.recipe or not arguments.cluster:
        raise InputError("kasoku plan: RECIPE and --cluster are wanted, or --compare RUN")
    if not (arguments.deadline or arguments.budget or arguments.fastest):
        raise InputError("kasoku plan: what for? one of --deadline TIME, --budget USD, --fastest")
    if arguments.noise_scale is not None and not 0 < arguments.noise_scale < math.inf:
        raise InputError(f"--noise-scale {arguments.noise_scale:g}: images, above 0 and finite")


def _seconds(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", given)
    if given and (not match or float(match[1]) <= 0):
        raise InputError(f"--deadline {given}: a number with s, min, h or d is wanted, as 10min")
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _usd(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)USD", given)
    if given and (not match or float(match[1]) <= 0):
        raise InputError(f"--budget {given}: an amount is wanted, as 100USD")
    return float(match[1]) if match else 0.0


def _choices(arguments: argparse.Namespace) -> Iterator[Choice]:
    """Every batch of the recipe on sizes of the cluster that can share it, with graded groups.

    Raises InputError where there is none.
    """
    from kasoku.course import updates
    from kasoku.parallel import Graded, Mean
    from kasoku.ranks import can_share
    from kasoku.simulate.reducing import flat
    from kasoku.simulate.sweep import sizes
    from kasoku.simulation import case

    before, found, tight = None, False, ""
    for settings in _batches(arguments):
        given = argparse.Namespace(**{**vars(arguments), "set": [*arguments.set, *settings], "batch": None})
        asked = before = case(given, arguments.cluster, like=before)
        simulator, recipe = asked.simulator, asked.recipe
        if recipe.batch > asked.facts.images or updates(recipe, asked.facts.images) < 1:
            continue
        if not (recipe.device.graphs or simulator.sharing.apart):  # no groups of gradients, or groups of updates
            alike = flat(simulator.sharing.reducer or Mean())
            sharing = replace(simulator.sharing, policy=Graded(), next_forward=False, reducer=alike)
            asked = replace(asked, simulator=replace(simulator, sharing=sharing))
        each, most = simulator.cluster.node.gpus, _at_once(asked)
        fits = [n for n in range(1, simulator.cluster.most + 1) if n <= recipe.batch and can_share(recipe, n)]
        fits = [n for n in fits if n <= each or n % each == 0]
        known = {n for n in fits if recipe.batch <= n * recipe.parts(n) * most}
        if not known:
            tight = tight or (f", {most:,} images at once each: {_smaller(recipe, most)}" if fits else "")
            continue
        found = True
        for gpus in sizes(simulator.cluster, 1, simulator.cluster.most, _SIZES, fits=known.__contains__):
            yield _by_nodes(_priced(asked, asked.step(gpus)))
    if not found:
        raise InputError(
            f"{arguments.recipe}: no batch of this recipe makes an update and can be shared by GPUs of "
            f"{arguments.cluster}{tight}"
        )


def _at_once(asked: Case) -> int:
    """How many images a GPU surely holds: as many as it was measured with, each with what its layers put out.

    With SavedMemory, which plans for the memory that there is, all of them.
    """
    from kasoku.memory import SavedMemory

    simulator = asked.simulator
    if any(isinstance(t, SavedMemory) for t in asked.recipe.techniques):
        return asked.recipe.batch
    outputs = sum(layer.outputs for layer in simulator.net.layers)
    most = int(simulator.cluster.device.most * _OUTPUTS / max(1.0, outputs))
    return max([most, *(images for images, _ in simulator.profile.measured)]) if simulator.profile else most


def _smaller(recipe: Recipe, most: int) -> str:
    """What takes fewer images at once."""
    return "a larger accumulate takes fewer" if recipe.norm_batch <= most else "a smaller norm_batch takes fewer"


def _by_nodes(plain: Choice) -> Choice:
    """The same, averaged node by node where that promises enough: within nodes first, or within rows of nodes.

    The reducer is Hierarchical, whose nodes may be any ranks of consecutive numbers: so a row may be several machines,
    and the whole a 2-D torus. What is sent across keeps the recipe's type.
    """
    from kasoku.parallel import Hierarchical
    from kasoku.simulate.allreduce import square

    asked, gpus = plain.case, plain.step.gpus
    sharing, each = asked.simulator.sharing, asked.simulator.cluster.node.gpus
    if sharing.reducer is None or gpus <= each:
        return plain
    best = plain
    for row in sorted({each, square(gpus, each)} - {1, gpus}):
        node = 0 if row == each else row  # 0: as many as a launcher starts on a machine
        grouped = replace(sharing, reducer=Hierarchical(node, sharing.reducer))
        other = replace(asked, simulator=replace(asked.simulator, sharing=grouped))
        found = _priced(other, other.step(gpus))
        if found.step.step_s < min(_WORTH * plain.step.step_s, best.step.step_s):
            best = found
    return best


def _priced(asked: Case, step: Step) -> Choice:
    seconds = sum(asked.rows(step).values())
    return Choice(asked, step, seconds, asked.usd(step, seconds))


def _batches(arguments: argparse.Namespace) -> list[list[str]]:
    """Settings for each batch: by the noise scale; or the recipe's points; or its own batch alone."""
    from kasoku.recipe import points

    known = points(arguments.recipe, arguments.set)
    if arguments.noise_scale is not None:
        if known:
            raise InputError(
                "--noise-scale: the recipe's points give the epochs of each batch: leave it out, or --set points=[]"
            )
        return _by_noise(arguments)
    own = any(setting.partition("=")[0].strip() == "batch" for setting in arguments.set)
    return [[]] if own or not known else [[f"batch={batch}"] for batch in known]


def _by_noise(arguments: argparse.Namespace) -> list[list[str]]:
    """Twice and half the recipe's batch and so on, with the epochs each would take; what it cannot have is left out.

    Maths: epochs(B) = epochs(B0) (1 + B / noise) / (1 + B0 / noise). Ref: McCandlish et al. 2018 (arXiv 1812.06162).
    """
    from kasoku.recipe import load

    recipe, noise = load(arguments.recipe, arguments.set), arguments.noise_scale
    out, left = [], []
    for batch in sorted({max(1, round(recipe.batch * 2.0**k)) for k in range(-3, 8)}):
        longer = (1 + batch / noise) / (1 + recipe.batch / noise)
        settings = [
            f"batch={batch}",
            f"epochs={recipe.epochs * longer:.6g}",
            f"reference_batch={recipe.reference_batch or recipe.batch}",
            *_stretched(recipe.schedule, longer),
        ]
        try:
            load(arguments.recipe, [*arguments.set, *settings])
            out.append(settings)
        except InputError as error:
            left.append((batch, error))
    if left:
        batches = ", ".join(f"{batch:,}" for batch, _ in left)
        print(f"kasoku: --noise-scale: without batches of {batches} (the first: {left[0][1]})", file=sys.stderr)
    return out


def _stretched(schedule: Schedule, longer: float) -> list[str]:
    """The settings by which a schedule's curve takes so many times its epochs, its warm-up as it is."""
    from kasoku.core import schedule as curves

    if isinstance(schedule, curves.Constant):
        return []
    if isinstance(schedule, curves.Step):
        return [f"schedule.milestones={[round(longer * epoch, 6) for epoch in schedule.milestones]}"]
    epochs = getattr(schedule, "epochs", None)
    if not isinstance(epochs, int | float):
        raise InputError(
            f"--noise-scale: {type(schedule).__name__} cannot be made for other epochs: take a schedule with epochs, "
            "or plan without"
        )
    return [f"schedule.epochs={longer * epochs:.6g}"]


def _best(choices: list[Choice], deadline_s: float, budget: float) -> Choice:
    """Raises InputError where none will do, with the nearest that would."""
    fastest = min(choices, key=lambda c: c.seconds)
    if deadline_s:
        in_time = [c for c in choices if c.late_s <= deadline_s]
        if not in_time:
            raise InputError(
                f"deadline of {deadline_s:,.0f} s: the fastest way takes {fastest.seconds:,.0f} s, or "
                f"{fastest.late_s:,.0f} s at worst, on {fastest.step.gpus:,} GPUs"
            )
        return min(in_time, key=lambda c: (c.usd or c.seconds * c.step.gpus, c.seconds))
    if budget:
        if not fastest.case.simulator.cluster.device.usd_hour:
            raise InputError("--budget: what a GPU costs is not known: give usd_hour in the cluster's [own_gpu]")
        paid = [c for c in choices if c.usd * _MOST <= budget]
        if not paid:
            least = min(choices, key=lambda c: c.usd)
            raise InputError(f"budget of {budget:,.2f} USD: the cheapest way may cost {least.usd * _MOST:,.2f} USD")
        return min(paid, key=lambda c: c.seconds)
    return fastest


def _searched(chosen: Choice) -> Choice:
    """The same with searched groups, where they promise enough."""
    from kasoku.parallel import Planned
    from kasoku.simulation import sharing

    asked, before = chosen.case, chosen.case.simulator.sharing
    if asked.recipe.device.graphs or before.apart:
        return chosen
    planned = replace(before, policy=Planned(), next_forward=sharing(asked.recipe).next_forward)
    other = replace(asked, simulator=replace(asked.simulator, sharing=planned))
    found = _priced(other, other.step(chosen.step.gpus))
    return found if found.step.step_s < _WORTH * chosen.step.step_s else chosen


def _rows(chosen: Choice) -> dict[str, str]:
    from kasoku import course

    asked, step = chosen.case, chosen.step
    recipe, device = asked.recipe, asked.simulator.cluster.device
    nodes = asked.simulator.cluster.nodes_for(step.gpus)
    largest = max(step.course.sizes(), default=0.0)
    sent = "exchange" if step.course.apart else "all-reduce"
    cost = (
        f"{chosen.usd:,.2f} USD ({chosen.usd * _LEAST:,.2f} to {chosen.usd * _MOST:,.2f}), {device.usd_hour:.2f} an "
        "hour a GPU"
        if chosen.usd
        else "no price"
    )
    return {
        "GPUs": f"{step.gpus:,} {device.name} in {nodes:,} nodes",
        "batch": f"{recipe.batch:,}, {step.images / step.gpus:g} a GPU"
        + (f" ({recipe.origin})" if recipe.origin else ""),
        "epochs": f"{recipe.epochs:g}, {course.updates(recipe, asked.facts.images):,} updates",
        "rates": f"x {recipe.rate_scale:.4g}, after a warm-up of {recipe.course.warmup:g} epochs",
        "groups": f"{len(step.course.plan.groups)} ({step.course.plan.policy})",
        sent: str(getattr(step.course.link, "choice", lambda _: "")(largest)) + _reducer(chosen),
        "step": f"{1e3 * step.step_s:.2f} ms, {1e3 * step.exposed_s:.2f} ms of it exposed communication",
        "throughput": f"{step.images_per_s:,.0f} images/s",
        "time to the end": f"{chosen.seconds:,.1f} s ({chosen.seconds * _LEAST:,.1f} to {chosen.late_s:,.1f})",
        "cost": cost,
        "ranges": f"{_LEAST} to {_MOST} times: what the steps of three published runs of ResNet-50 took of those "
        "simulated; how epochs scatter is not known",
        "source": device.source or "the cluster's file",
    }


def _reducer(chosen: Choice) -> str:
    """What the recipe has for it, where ranks average more than in one all-reduce of fp32."""
    from kasoku.parallel import Hierarchical, Mean
    from kasoku.simulate.reducing import flat

    reducer = chosen.case.simulator.sharing.reducer
    if reducer is None or chosen.step.gpus == 1:
        return ""
    alike = "" if isinstance(flat(reducer), Mean) else type(flat(reducer)).__name__
    if isinstance(reducer, Hierarchical):
        row = f", node={reducer.node}" if reducer.node else ""
        return f"; reducer Hierarchical{row}" + (f", across={alike}" if alike else "")
    return f"; reducer {alike}" if alike else ""


def _write(chosen: Choice, folder: Path, planned: Path) -> None:
    """The recipe, the script that trains it, and what is expected."""
    from kasoku.meetings import asked as as_trained
    from kasoku.parallel import Overlap
    from kasoku.recipe import dumps, own_folders
    from kasoku.runs import put
    from kasoku.simulation import document

    asked, step = chosen.case, chosen.step
    recipe, shared = asked.recipe, asked.simulator.sharing
    if not (recipe.device.graphs or shared.apart):
        techniques = as_trained(recipe, 1)  # Overlap in the place of an Asynchronous that lets no rank be ahead
        own = next((t for t in techniques if isinstance(t, Overlap)), Overlap())
        reducer = shared.reducer or own.reducer
        own = replace(own, buckets=shared.policy, next_forward=shared.next_forward, reducer=reducer)
        others = tuple(t for t in techniques if type(t).__name__ not in ("Overlap", "AllReduce"))
        recipe = replace(recipe, techniques=(*others, own))
    expected = {**document(asked, step), "least": _LEAST, "most": _MOST, "shown": _rows(chosen)}
    expected["import_folders"] = own_folders(planned)
    file = folder / f"{planned.stem}.toml"
    text, script = dumps(recipe), _script(file, chosen)  # before anything is written
    put(file, text)
    put(folder / "launch.sbatch", script)
    put(folder / "plan.json", json.dumps(expected, indent=1) + "\n")


def _script(recipe: Path, chosen: Choice) -> str:
    """As `kasoku launch slurm` writes it; its limit is twice what may be needed."""
    from kasoku.manifest import SlurmSpec, sbatch

    nodes = chosen.case.simulator.cluster.nodes_for(chosen.step.gpus)
    minutes = max(10, round(2 * chosen.late_s / 60))
    limit = f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    plain = re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")
    name = (plain if plain[:1].isalpha() else f"kasoku-{plain}")[:63].strip("-")  # a job's begins with a letter
    each, on_gpus = chosen.step.gpus // nodes, chosen.case.recipe.device.kind != "cpu"
    return sbatch(SlurmSpec(name=name, recipe=recipe, nodes=nodes, each=each, on_gpus=on_gpus, time=limit))
