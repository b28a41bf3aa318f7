"""The code that a recipe may name in `use`.

Note: what is trusted. To import a module is to run it, and recipes are passed around. So a recipe may name kasoku's
public names and the modules of other packages in PACKAGES. A recipe that is given to a command may also name modules
that lie beside it or in the current folder, as a script may import them. A run folder may not: `--allow NAME` names a
module or package that its recipe may use, and has its import folders searched.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kasoku.core import InputError, Schedule, Technique

PACKAGES = ("torch.nn", "torch.optim", "torchvision.models", "torchvision.transforms", "timm.models")
_REFUSED = ("timm.models._hub",)  # fetches pickles from any address
_PUBLIC = ("core", "optim", "models", "device", "data", "distributed", "memory", "tune")  # of kasoku
_KINDS = (Technique, Schedule, nn.Module, Optimizer)
_names: set[str] = set()
_folders: set[Path] = set()
_used: set[str] = set()  # modules beside a recipe that it names


def allow(names: Iterable[str]) -> None:
    """Lets recipes of this process name these modules and packages, and what is in them."""
    _names.update(names)


def allow_beside(recipe: Path | None) -> None:
    """Lets a recipe that the user gives name the modules in its folder and in the current one."""
    folders = [Path.cwd(), *([recipe.resolve().parent] if recipe else [])]
    _folders.update(folders)
    _search(map(str, folders))
    if recipe:
        search_recorded(recipe)


def search_recorded(recipe: Path) -> None:
    """Searches the import folders of a run's recipe, if `--allow` names anything."""
    if _names:
        _search(import_folders(recipe))


def options() -> list[str]:
    """The options of a command that goes on with what this one began: the recipe will lie elsewhere by then."""
    return [word for name in sorted(_names | _used) for word in ("--allow", name)]


def import_folders(recipe: Path | None) -> list[str]:
    """The folders of a recipe's own modules: the current one, its own, and those of the recipe that it was made from.

    The last are beside it: in the plan.json of `kasoku plan`, and in the environment.json of a run.
    """
    folders = [str(Path.cwd()), *([str(recipe.resolve().parent)] if recipe else [])]
    for file in [recipe.parent / name for name in ("plan.json", "environment.json")] if recipe else []:
        with suppress(OSError, ValueError, KeyError, TypeError):
            folders += map(str, json.loads(file.read_text())["import_folders"])
    return folders


def check_import(dotted: str, path: str) -> None:
    """Raises InputError unless the module of a dotted name may be imported."""
    top = dotted.partition(".")[0]
    if top in {"kasoku", *(package.partition(".")[0] for package in PACKAGES)}:
        return
    if _is_users(dotted):
        _used.update({top} if not _within(dotted, _names) else ())
        return
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise InputError(
            f'{path} = "{dotted}": there is no module {top}: a dotted name that can be imported; for a module that a '
            f"run folder names, --allow {top}"
        )
    raise InputError(f'{path} = "{dotted}": {_refusal(top)}')


def check_object(thing: Any, dotted: str, path: str) -> None:
    """Raises InputError unless what a dotted name stands for may be called: its own module decides, not the name."""
    if _is_users(dotted):
        return
    module = getattr(thing, "__module__", None)
    module = module if isinstance(module, str) else ""
    if module.partition(".")[0] == "kasoku":
        good = (isinstance(thing, type) and issubclass(thing, _KINDS)) or _is_public(thing)
        if not good:
            raise InputError(f'{path} = "{dotted}": not a name for recipes; kasoku list shows those')
    elif not (_within(module, PACKAGES) and not _within(module, _REFUSED)) and not _is_users(module):
        raise InputError(f'{path} = "{dotted}": {_refusal(module or "a builtin")}')


def _refusal(where: str) -> str:
    return (
        f"code of {where}, which a recipe may name only if it lies beside a recipe that is given to the command; "
        f"if you trust it, give --allow {where}"
    )


def _search(folders: Iterable[str]) -> None:
    sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_users(name: str) -> bool:
    """Whether a name is of a module that the user has named, or that lies in a folder the user has given."""
    if _within(name, _names):
        return True
    top = name.partition(".")[0]
    try:
        module = sys.modules.get(top)
        spec = module.__spec__ if module else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    return any(Path(place).resolve().parent in _folders for place in places)


def _is_public(thing: Any) -> bool:
    name = getattr(thing, "__name__", "")
    packages = (importlib.import_module(f"kasoku.{package}") for package in _PUBLIC)
    return any(
        name in package.__all__ and inspect.unwrap(getattr(package, name)) is inspect.unwrap(thing)
        for package in packages
    )
