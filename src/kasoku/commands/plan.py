"""`kasoku plan`: how many GPUs and which batch for a deadline, a budget, or the least time, and a script for it.

It writes the recipe with the chosen batch, groups and reducer; launch.sbatch, which trains it; and plan.json with the
times that are expected, item by item. `kasoku plan --compare RUN` compares them with a run of that recipe.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kasoku.commands.arguments import CPUS_PER_GPU, PlanArguments
from kasoku.config import trust
from kasoku.config.recipe import dumps
from kasoku.config.updates import updates
from kasoku.core import InputError, say
from kasoku.core.files import check_regular, is_number, read_json, write_text
from kasoku.distributed.cluster_jobs import LaunchSpec, sbatch
from kasoku.distributed.ddp.bucket_plan import ddp_caps, search
from kasoku.report import print_table
from kasoku.simulate import load as load_cluster
from kasoku.simulate import plan_search
from kasoku.simulate.cluster import Costs
from kasoku.simulate.plan_search import LEAST, MOST, Choice, planned_recipe
from kasoku.training.run_folder import load_recipe, output_folder

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BEFORE = "before the first step"  # the item of all rows that are not below
_ITEMS = {  # row of a plan or of a run's ledger: item of their comparison
    **dict.fromkeys(("input", "copy", "transforms"), "input"),
    **dict.fromkeys(("forward", "backward", "update"), "computing"),
    "exposed": "exposed communication",
    "evaluate": "evaluation",
    "save": "the rest",
    "other": "the rest",
}


def run(arguments: PlanArguments) -> int:
    """Plans, or compares a run with its plan; returns the exit code."""
    if arguments.compare:
        arguments.document.update(_compare(arguments.compare))
        return 0
    recipe = arguments.recipe
    if not recipe or not arguments.cluster:
        raise InputError("kasoku plan: RECIPE and --cluster are wanted, or --compare RUN")
    goals = [f"--{goal}" for goal in ("deadline", "budget", "fastest") if getattr(arguments, goal)]
    if len(goals) != 1:
        given = " beside ".join(goals) or "kasoku plan: what for?"
        raise InputError(f"{given}: give one of --deadline TIME, --budget USD, --fastest")
    trust.allow_beside(recipe)
    deadline_s = _amount("--deadline", arguments.deadline, _SECONDS, "a number with s, min, h or d is wanted, as 10min")
    budget_usd = _amount("--budget", arguments.budget, {"USD": 1.0}, "an amount is wanted, as 100USD")
    cluster = load_cluster(arguments.cluster)
    recipes = plan_search.candidates(recipe, arguments.set)
    tried = plan_search.choices(recipes, cluster, arguments.profile)
    chosen = plan_search.with_searched_groups(plan_search.best(tried, deadline_s, budget_usd))
    folder = output_folder(arguments.out, recipe, "plan", written=[f"{recipe.stem}.toml"])
    for line in chosen.scenario.remarks(chosen.step):
        say(line)
    if cluster.costs == Costs():
        say(f"{cluster.name} has no [costs]: 0 s are expected before the first step")
    document = chosen.scenario.document(chosen.step)
    rows = _rows(chosen, document)
    print_table(f"the best of {len(tried)} ways", rows)
    if arguments.buckets:
        inputs = chosen.step.inputs
        own, _, _ = search(inputs.units, inputs.tensors, inputs.link, next_forward=False)
        arguments.document["bucket_cap_mb_list"] = caps = ddp_caps(own, inputs.tensors)
        print(f"DistributedDataParallel(..., bucket_cap_mb_list={caps})")
    arguments.document.update(folder=str(folder), **_write(chosen, folder, recipe, {**document, "shown": rows}))
    return 0


def _amount(flag: str, text: str, units: Mapping[str, float], wanted: str) -> float:
    """A number above 0 times its unit; 0 for an empty text. Raises InputError for other texts."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if text and (not match or float(match[1]) <= 0):
        raise InputError(f"{flag} {text}: {wanted}")
    return float(match[1]) * units[match[2]] if match else 0.0


def _rows(chosen: Choice, document: Mapping[str, Any]) -> dict[str, str]:
    case, recipe, usd = chosen.scenario, chosen.scenario.recipe, chosen.usd
    price = f" and {usd * LEAST:,.2f} to {usd * MOST:,.2f} USD" if usd else ""
    return {
        "batch": f"{recipe.batch:,}" + (f" ({recipe.origin})" if recipe.origin else ""),
        "epochs": f"{recipe.epochs:g}, {updates(recipe, case.facts.images):,} updates",
        "rates": f"x {recipe.rate_scale:.4g}, after a warm-up of {recipe.scaled_schedule.warmup_epochs:g} epochs",
        **case.table(chosen.step, document),
        "ranges": f"{chosen.seconds * LEAST:,.1f} to {chosen.seconds * MOST:,.1f} s{price}: {LEAST} to {MOST} times, "
        "what the steps of three published runs of ResNet-50 took of those simulated; how epochs scatter is not known",
    }


def _write(chosen: Choice, folder: Path, original: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the planned recipe, the script that trains it, and the figures that are expected; returns these."""
    expected = {**figures, "least": LEAST, "most": MOST, "import_folders": trust.import_folders(original)}
    file = folder / f"{original.stem}.toml"
    nodes = chosen.scenario.simulator.cluster.nodes_for(chosen.step.gpus)
    minutes = max(10, round(2 * chosen.seconds * MOST / 60))  # twice the longest expected time
    limit = f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    plain = re.sub(r"[^a-z0-9]+", "-", original.stem.lower()).strip("-")
    name = (plain if plain[:1].isalpha() else f"kasoku-{plain}")[:63].strip("-")  # a job's begins with a letter
    each, on_gpus = chosen.step.gpus // nodes, chosen.scenario.recipe.device.kind != "cpu"
    spec = LaunchSpec(name=name, recipe=file, nodes=nodes, each=each, on_gpus=on_gpus, extra=trust.allow_options())
    script = sbatch(spec, time=limit, cpus_per_gpu=CPUS_PER_GPU)
    text = dumps(planned_recipe(chosen))  # raises before anything is written
    write_text(file, text)
    write_text(folder / "launch.sbatch", script)
    write_text(folder / "plan.json", json.dumps(expected, indent=1) + "\n")
    print(f"{folder}: {file.name}, launch.sbatch, plan.json")
    return expected


def _compare(run: Path) -> dict[str, Any]:
    """Prints and returns the plan of a run beside its ledger, item by item; the print has the error of each."""
    check_regular(run)
    command = read_json(run / "environment.json").get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    folders = [run, *(Path(word).parent for word in words if word.endswith(".toml"))][:2]  # or beside its recipe
    files = [folder / "plan.json" for folder in folders if (folder / "plan.json").is_file()]
    if not files:
        raise InputError(f"{run}: no plan.json there, nor beside its recipe: train a recipe that kasoku plan wrote")
    plan = _figures(files[0], "not what kasoku plan writes: plan anew", "gpus", "batch", "images_per_s")
    recipe, ledger = load_recipe(run), _figures(run / "ledger.json", "it has no rows of seconds: train anew")
    ranks = len(ledger["ranks"]) if isinstance(ledger.get("ranks"), list) else 1
    if (ranks, recipe.batch) != (plan["gpus"], plan["batch"]):
        planned = f"the plan is of {plan['gpus']} and batch={plan['batch']}"
        remedy = "train it as planned, or plan what was trained"
        raise InputError(f"{run}: {ranks} ranks and batch={recipe.batch}, {planned}: {remedy}")
    pairs = {item: [0.0, 0.0] for item in (_BEFORE, *_ITEMS.values())}
    for side, seconds in enumerate((plan["rows"], ledger["rows"])):
        for row, s in seconds.items():
            pairs[_ITEMS.get(row, _BEFORE)][side] += s
    pairs["in all"] = [sum(side) for side in zip(*pairs.values(), strict=True)]
    rows = {}
    for item, (a, b) in pairs.items():
        rows[item] = f"{a:,.2f} s expected, {b:,.2f} s taken" + (f": {a / b - 1:+.1%}" if b else "")
    rate, reached = plan["images_per_s"], read_json(run / "result.json").get("images_per_s")
    if is_number(reached) and reached:
        rows["throughput"] = f"{rate:,.0f} images/s expected, {reached:,.0f} reached: {rate / reached - 1:+.1%}"
    print_table(f"{run}", rows)
    return {"seconds": pairs, "images_per_s": [rate, reached]}


def _figures(file: Path, otherwise: str, *keys: str) -> dict[str, Any]:
    """The table in a JSON file, with numbers in its `rows` and at `keys`; raises InputError, which says `otherwise`."""
    table = read_json(file)
    rows = table.get("rows")
    if not isinstance(rows, dict) or not all(map(is_number, [*rows.values(), *map(table.get, keys)])):
        raise InputError(f"{file}: {otherwise}")
    return table
