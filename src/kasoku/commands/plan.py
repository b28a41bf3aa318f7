"""`kasoku plan`: how many GPUs and which batch for a deadline, a budget, or the least time, and a script for it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kasoku.commands.arguments import CPUS_PER_GPU, PlanArguments
from kasoku.config import trust
from kasoku.config.recipe import batches_of_points, dumps, read_document
from kasoku.config.updates import updates
from kasoku.core import InputError, say
from kasoku.core.files import json_text, write_text
from kasoku.distributed.cluster_jobs import LaunchSpec, sbatch
from kasoku.distributed.ddp.bucket_plan import ddp_caps, search
from kasoku.report import print_table
from kasoku.simulate import load as load_cluster
from kasoku.simulate import plan_search
from kasoku.simulate.cluster import Costs
from kasoku.simulate.plan_search import Choice, planned_recipe
from kasoku.training.run_folder import output_folder

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def run(arguments: PlanArguments) -> int:
    """Plans; returns the exit code."""
    recipe, settings = arguments.recipe, arguments.set
    goals = [f"--{goal}" for goal in ("deadline", "budget", "fastest") if getattr(arguments, goal)]
    if len(goals) != 1:
        given = " beside ".join(goals) or "kasoku plan: what for?"
        raise InputError(f"{given}: give one of --deadline TIME, --budget USD, --fastest")
    deadline_s = _amount("--deadline", arguments.deadline, _SECONDS, "a number with s, min, h or d is wanted, as 10min")
    budget_usd = _amount("--budget", arguments.budget, {"USD": 1.0}, "an amount is wanted, as 100USD")
    cluster = load_cluster(arguments.cluster)
    # the batches of its points, or its own: without points, or with a setting of it
    fixed = any(setting.partition("=")[0].strip() == "batch" for setting in settings)
    batches = [] if fixed else batches_of_points(read_document(recipe, settings))
    recipes = [arguments.load(f"batch={batch}") for batch in batches] or [arguments.load()]
    tried = plan_search.choices(recipes, cluster, arguments.profile)
    chosen = plan_search.with_searched_groups(plan_search.best(tried, deadline_s, budget_usd))
    folder = output_folder(arguments.out, recipe, "plan", written=f"{recipe.stem}.toml")
    for line in chosen.scenario.remarks(chosen.step):
        say(line)
    if cluster.costs == Costs():
        say(f"{cluster.name} has no [costs]: only the start of communicators is expected before the first step")
    document = chosen.scenario.document(chosen.step)
    rows = _rows(chosen, document)
    print_table(f"the best of {len(tried)} ways", rows)
    arguments.document.update(folder=str(folder), **_write(chosen, folder, recipe, {**document, "shown": rows}))
    if arguments.buckets:
        inputs = chosen.step.inputs
        own, _, _ = search(inputs.units, inputs.tensors, inputs.link, next_forward=False)
        arguments.document["bucket_cap_mb_list"] = caps = ddp_caps(own, inputs.tensors)
        print(f"DistributedDataParallel(..., bucket_cap_mb_list={caps})")
    return 0


def _amount(flag: str, text: str, units: Mapping[str, float], wanted: str) -> float:
    """A number above 0 times its unit; 0 for an empty text. Raises InputError for other texts."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if text and (not match or float(match[1]) <= 0):
        raise InputError(f"{flag} {text}: {wanted}")
    return float(match[1]) * units[match[2]] if match else 0.0


def _rows(chosen: Choice, document: Mapping[str, Any]) -> dict[str, str]:
    case, recipe, usd, least, most = chosen.scenario, chosen.scenario.recipe, chosen.usd, chosen.least, chosen.most
    price = f" and {usd * least:,.2f} to {usd * most:,.2f} USD" if usd else ""
    return {
        "batch": f"{recipe.batch:,}" + (f" ({recipe.origin})" if recipe.origin else ""),
        "epochs": f"{recipe.epochs:g}, {updates(recipe, case.facts.images):,} updates",
        "rates": f"x {recipe.rate_scale:.4g}, after a warm-up of {recipe.scaled_schedule.warmup_epochs:g} epochs",
        **case.table(chosen.step, document),
        "ranges": f"{chosen.seconds * least:,.1f} to {chosen.seconds * most:,.1f} s{price}: {least:.2f} to {most:.2f} "
        "times, by jitter, latencies, transfers beside computing, times of GPUs; how epochs scatter is not known",
    }


def _write(chosen: Choice, folder: Path, original: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the planned recipe, the script that trains it, and the figures that are expected; returns these."""
    expected = {**figures, "least": chosen.least, "most": chosen.most, "import_folders": trust.import_folders(original)}
    file = folder / f"{original.stem}.toml"
    nodes = chosen.scenario.simulator.cluster.nodes_for(chosen.step.gpus)
    minutes = max(10, round(2 * chosen.seconds * chosen.most / 60))  # twice the longest expected time
    name = re.sub(r"[^a-z0-9]+", "-", f"kasoku-{original.stem.lower()}")[:63].strip("-")
    each, on_gpus = chosen.step.gpus // nodes, chosen.scenario.recipe.device.kind != "cpu"
    spec = LaunchSpec(name=name, recipe=file, nodes=nodes, each=each, on_gpus=on_gpus, extra=trust.allow_options())
    script = sbatch(spec, time=str(minutes), cpus_per_gpu=CPUS_PER_GPU)
    text = dumps(planned_recipe(chosen))  # raises before anything is written
    write_text(file, text)
    write_text(folder / "launch.sbatch", script)
    write_text(folder / "plan.json", json_text(expected))
    print(f"{folder}: {file.name}, launch.sbatch, plan.json")
    return expected
