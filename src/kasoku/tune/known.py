"""What is kept of a search for a minibatch: its file, and what is known from earlier searches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kasoku.core import Comm, Job, Solo
from kasoku.core.hardware import cores
from kasoku.core.run import write_atomically
from kasoku.data.kept import cache_folder, keep
from kasoku.parallel.agree import facts_of_model, version_facts
from kasoku.tune.sample import Found, Sample
from kasoku.tune.strategies import Strategy


def as_json(found: Found) -> dict[str, Any]:
    """What tuning.json holds; null: not known."""
    epochs: list[float | None] = [*found.epochs] or [None] * len(found.samples)
    samples = []
    for sample, takes in zip(found.samples, epochs, strict=True):
        plain = {k: _plain(v) for k, v in asdict(sample).items()}
        goodput = sample.images_per_s / takes if takes else None
        samples.append({**plain, "images_per_s": sample.images_per_s, "epochs": takes, "goodput": goodput})
    return {
        "what": "minibatch",
        "strategy": found.strategy,
        "chosen": found.batch,
        "samples": samples,
        "spent_s": found.spent_s,
        "budget_s": _plain(found.budget_s),
        "why": found.why,
        "in_time": found.in_time,
        "speeds": list(found.speeds),
    }


def from_json(told: dict[str, Any]) -> Found:
    """Back from `as_json`. Raises KeyError or TypeError for anything else."""
    nothing = {"step_s": math.inf, "low_s": math.inf, "high_s": math.inf, "utilisation": math.nan}
    names = ("batch", "step_s", "low_s", "high_s", "input_s", "utilisation", "noise", "failed", "steps", "parts")
    samples = []
    for one in told["samples"]:
        own: dict[str, Any] = {k: nothing.get(k) if one[k] is None else one[k] for k in names}
        samples.append(Sample(**own))
    epochs = tuple(one["epochs"] for one in told["samples"] if one["epochs"] is not None)
    budget_s = math.inf if told["budget_s"] is None else told["budget_s"]
    return Found(
        told["chosen"],
        tuple(samples),
        told["why"],
        told["spent_s"],
        told["in_time"],
        epochs,
        told["strategy"],
        budget_s,
        tuple(told["speeds"]),
    )


def save(found: Found, path: Path) -> None:
    """Writes tuning.json. Raises InputError where that cannot be."""
    write_atomically(path, lambda part: part.write_text(json.dumps(as_json(found), indent=1)))


def facts(job: Job, strategy: Strategy, **more: object) -> dict[str, Any]:
    """What a result depends on: model, techniques, data, device, versions; `more`: what else, such as the range."""
    plain = job.plain_loader
    dataset = getattr(plain, "dataset", None)
    device = next((p.device for p in job.model.parameters()), torch.device("cpu"))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {cores()} cores"
    return {
        "model": {"class": type(job.model).__name__, **facts_of_model(job.model)},
        "job": [type(job.optimizer).__name__, job.accumulate, job.comm.size, [repr(t) for t in job.applied]],
        "data": [getattr(dataset, "name", ""), getattr(dataset, "image_size", ""), getattr(plain, "images", 0)],
        "loader": [type(plain).__name__, getattr(plain, "batch", 0), getattr(plain, "parts", 1)],
        "device": [here, torch.get_num_threads()],
        "versions": version_facts(),
        "strategy": repr(strategy),
        "more": {name: str(value) for name, value in more.items()},
    }


def cached(
    key: dict[str, Any],
    search: Callable[[], Found],
    *,
    comm: Comm | None = None,
    cache: str = "",
    fresh: bool = False,
) -> Found:
    """What `search()` found for this key before, or finds now; only what was found in time is kept.

    The ranks' speeds are not: they are of these hosts at this hour.

    Args:
        key: what the result depends on, such as `facts` gives; plain values.
        search: gives the result; on several ranks all do it, or none.
        comm: the ranks; rank 0's key and cache count.
        cache: a folder; empty: the user's cache folder.
        fresh: search in any case; what is found takes the place of what was.
    """
    comm = comm or Solo()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    path = cache_folder(cache) / "tuning" / f"{digest}.json"
    known = None if fresh else comm.broadcast_object(_read(path) if comm.rank == 0 else None)
    if known is not None:
        return known
    found = search()
    if found.in_time and comm.rank == 0:
        keep(path, json.dumps(as_json(replace(found, speeds=()))).encode())
    return found


def _read(path: Path) -> Found | None:
    try:
        return from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
