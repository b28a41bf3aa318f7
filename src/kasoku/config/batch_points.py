"""Recipes with `points`: settings that are known at some batches, and interpolated between them."""

import math
from typing import Any

from kasoku.core import InputError


def batches_of_points(document: dict[str, Any]) -> list[int]:
    """The batches of the points of a document; empty if it has no points."""
    points = document.get("points")
    return [p["batch"] for p in points if isinstance(p, dict) and "batch" in p] if isinstance(points, list) else []


def at_batch(document: dict[str, Any], points: Any) -> dict[str, Any]:
    """The document with the settings of its `points` for its batch.

    A point is a table of settings that hold at its `batch`. Between two points, numbers are interpolated linearly in
    the logarithm of the batch. Raises InputError for points that are not such tables, and for a batch outside them.
    """
    batch = document.get("batch")
    valid = isinstance(points, list) and all(isinstance(p, dict) and type(p.get("batch")) is int for p in points)
    if not valid or any(p["batch"] < 1 for p in points) or len({p["batch"] for p in points}) < len(points):
        raise InputError("points: [[points]] tables are wanted, each of another batch (at least 1), with its settings")
    ordered = sorted(points, key=lambda point: int(point["batch"]))
    if not ordered or type(batch) is not int:
        return document
    below = [p for p in ordered if p["batch"] <= batch]
    above = [p for p in ordered if p["batch"] >= batch]
    if not below or not above:
        advice = "choose one of these, or --set points=[] and give the settings yourself"
        smallest, largest = ordered[0]["batch"], ordered[-1]["batch"]
        raise InputError(f"batch={batch}: this recipe has settings for {smallest} to {largest}; {advice}")
    low, high = below[-1], above[0]
    if low is high:
        return _merged(document, {**low, "origin": f"the point {batch:,}"})
    fraction = math.log(batch / low["batch"]) / math.log(high["batch"] / low["batch"])
    origin = f"between the points {low['batch']:,} and {high['batch']:,}, interpolated: ours"
    return _merged(document, {**_between(low, high, fraction), "batch": batch, "origin": origin})


def _between(low: Any, high: Any, fraction: float) -> Any:
    if isinstance(low, dict):
        if not isinstance(high, dict) or low.keys() != high.keys():
            raise InputError(f"points: {sorted(low)} beside {high}: all of them must give the same settings")
        return {key: _between(low[key], high[key], fraction) for key in low}
    if low == high:
        return low
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in (low, high)):
        raise InputError(f"points: between {low} and {high} nothing can be interpolated; choose the batch of a point")
    return low + (high - low) * fraction


def _merged(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    out = dict(document)
    for key, value in part.items():
        deeper = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if deeper else value
    return out
