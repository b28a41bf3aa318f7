"""kasoku plan --compare: a run held against what its plan expected, item by item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kasoku.core import InputError

# of the items that both have: rows of the plan, rows of the run's ledger
_ITEMS = {
    "input": (("input",), ("input", "copy")),
    "computing": (("forward", "backward"), ("forward", "backward", "update")),
    "exposed communication": (("exposed",), ("exposed",)),
    "evaluation": (("evaluate",), ("evaluate",)),
    "the rest": ((), ("save", "other")),
}


def compare(run: Path) -> int:
    """Prints what was expected of a run against what its ledger says, item by item, with the error of each."""
    from kasoku.config.recipe import load
    from kasoku.report import print_table
    from kasoku.training.run_folder import allow_own_modules

    expected = _expected(run)
    ledger, result = _read(run / "ledger.json"), _read(run / "result.json")
    took = ledger.get("rows")
    if not isinstance(took, dict):
        raise InputError(f"{run}: its ledger.json has no rows; train it anew")
    allow_own_modules(run)
    ranks, batch = len(ledger.get("ranks") or [0]), load(run / "recipe.toml").batch
    if (ranks, batch) != (expected["gpus"], expected["batch"]):
        raise InputError(
            f"{run}: {ranks} ranks and batch={batch}, the plan is of {expected['gpus']} and batch={expected['batch']}: "
            "train it as planned, or plan what was trained"
        )
    planned = expected["rows"]
    pairs = {"before the first step": (_left(planned, 0), _left(took, 1))}
    for item, names in _ITEMS.items():
        a, b = (sum(rows.get(name, 0.0) for name in of) for rows, of in zip((planned, took), names, strict=True))
        pairs[item] = a, b
    pairs["in all"] = sum(a for a, _ in pairs.values()), sum(b for _, b in pairs.values())
    rows = {}
    for item, (a, b) in pairs.items():
        rows[item] = f"{a:,.2f} s expected, {b:,.2f} s taken" + (f": {a / b - 1:+.1%}" if b else "")
    speed = result.get("images_per_s")
    if isinstance(speed, int | float) and speed:
        rows["throughput"] = (
            f"{expected['images_per_s']:,.0f} images/s expected, {speed:,.0f} reached: "
            f"{expected['images_per_s'] / speed - 1:+.1%}"
        )
    print_table(f"{run}", rows)
    return 0


def _left(rows: dict[str, float], side: int) -> float:
    """Seconds of the rows that no item names: whatever was done before the first step."""
    named = {name for names in _ITEMS.values() for name in names[side]}
    return sum(seconds for row, seconds in rows.items() if row not in named)


def _expected(run: Path) -> dict[str, Any]:
    """The plan of a run: in its folder, or beside the recipe that it was trained from."""
    command = _read(run / "environment.json").get("command") or []
    recipe = next((Path(word) for word in command if isinstance(word, str) and word.endswith(".toml")), None)
    for folder in (run, *([recipe.parent] if recipe else [])):
        if (folder / "plan.json").is_file():
            found = _read(folder / "plan.json")
            numbers = [found.get(key) for key in ("gpus", "batch", "images_per_s")]
            rows = found.get("rows")
            if isinstance(rows, dict) and all(isinstance(x, int | float) for x in (*numbers, *rows.values())):
                return found
            raise InputError(f"{folder / 'plan.json'}: not what kasoku plan writes: plan anew")
    raise InputError(f"{run}: no plan.json there, nor beside its recipe: train a recipe that kasoku plan wrote")


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}): the folder of a training is wanted") from error
    return found if isinstance(found, dict) else {}
