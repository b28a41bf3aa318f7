"""Recipes and --set: valid documents with one to three keys changed, so that most pass the first checks."""

from __future__ import annotations

import copy
import math
import random
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from common import FindingError, command, tried

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
_NUMBERS = [0, -1, 1, 2, 3, 7, 0.5, 1e-12, 1e12, 2**31, 2**63 - 1, math.nan, math.inf, -math.inf]
_TEXTS = ["", "x", "a b", "é\u0000", "x" * 1000, "cpu", "cuda", "os.system", "torch.hub.load"]
_TEXTS += ["kasoku.models.resnet18", "kasoku.optim.sgd", "kasoku.core.Linear", "kasoku.data.digits"]
_TEXTS += ["kasoku.distributed.Overlap", "kasoku.memory.SavedMemory"]
_CALLS = [  # of foreign code, as a recipe would name it
    {"use": "os.system", "command": "true"},
    {"use": "subprocess.Popen", "args": ["true"]},
    {"use": "torch.hub.load", "repo_or_dir": "a/b", "model": "x"},
    {"use": "urllib.request.urlopen", "url": "http://127.0.0.1:9/"},
    {"use": "kasoku.report.environment.subprocess.run", "args": ["true"]},
]
_KEYS = ["use", "epochs", "warmup", "x", "", "batch", "points", "kind"]


def leaves(thing: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values, tables and lists in a document."""
    items = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    return [path] * bool(path) + [leaf for key, value in items for leaf in leaves(value, (*path, key))]


def changed(value: Any, draw: random.Random) -> Any:
    """Another value, mostly of the same kind."""
    if draw.random() < 0.1:
        return draw.choice([*_NUMBERS, *_TEXTS, True, [], {}, [1, 2], {"use": "kasoku.core.Linear"}, *_CALLS])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = [value * 2, value / 2, value + 1, -value, value * 10, value * 1.1]
        return type(value)(draw.choice(near)) if draw.random() < 0.7 else draw.choice(_NUMBERS)
    if isinstance(value, str):
        return draw.choice([*_TEXTS, value[:-1], f"{value}x", value.rpartition(".")[0]])
    if isinstance(value, list):
        return draw.choice([[], value[::-1], value + value, value[1:], [changed(v, draw) for v in value]])
    items = list(value.items())
    draw.shuffle(items)
    more = {draw.choice(_KEYS): draw.choice([*_NUMBERS, *_TEXTS])}
    return draw.choice([dict(items[1:]), {**value, **more}, dict(items), draw.choice(_CALLS)])


def varied(text: str, draw: random.Random) -> str:
    """A TOML document with one to three changes."""
    document = tomllib.loads(text)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(leaves(document))
        at = document
        for key in path:
            at = at[key]
        at[last] = copy.deepcopy(changed(at[last], draw))
        if not leaves(document):
            break
    return tomli_w.dumps(document)


def recipes(folder: Path, **settings: Any) -> dict[str, Any]:
    """Each document goes through `kasoku train --dry-run`."""
    file = folder / "recipe.toml"

    def one(draw: random.Random) -> str:
        file.write_text(varied(draw.choice(RECIPES).read_text(), draw))
        return _ended(*command("train", str(file), "--dry-run"))

    return tried("recipe", one, file.read_bytes, **settings)


def overrides(folder: Path, **settings: Any) -> dict[str, Any]:
    """One to three --set over a recipe."""
    words: list[str] = []

    def one(draw: random.Random) -> str:
        recipe = draw.choice(RECIPES)
        document = tomllib.loads(recipe.read_text())
        words[:] = ["train", str(recipe), "--dry-run"]
        for _ in range(draw.randint(1, 3)):
            path = draw.choice(leaves(document))
            at: Any = document
            for key in path:
                at = at[key]
            text = tomli_w.dumps({"v": changed(at, draw)}).partition("=")[2].strip() or "x"
            name = ".".join(map(str, path))
            if draw.random() < 0.1:
                name = draw.choice([f"{name}.x", f"{name}.0", name[:-1], f".{name}", f"{name}."])
            words.extend(["--set", f"{name}={text}"])
        return _ended(*command(*words))

    return tried("set", one, lambda: "\n".join(words).encode(), **settings)


def _ended(code: int, out: str, err: str) -> str:
    lines = err.splitlines()
    if code == 2 and (len(lines) != 1 or len(lines[0]) > 1500):
        raise FindingError(f"{len(lines)} lines, the first of {len(lines[0])} letters: {err[:300]}")
    return "refused" if code else "taken"


KINDS = {"recipe": recipes, "set": overrides}
