"""The code that a recipe may name in `use`.

Note: what is trusted. To import a module is to run it, and recipes are passed around. So a recipe may name kasoku's
public names, layers, losses and optimizers of torch, networks of torchvision and timm, and transform classes of
torchvision. A recipe that is given to a command may also name modules that lie beside it or in the current folder, as a
script may import them. A run folder may not: `--allow NAME` names a module or package that its recipe may use, and has
its import folders searched.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kasoku.core import InputError, Schedule, Technique
from kasoku.core.files import read_json

_TIMM = "timm.create_model"
_PACKAGES = ("torch.nn", "torch.optim", "torchvision.models", "torchvision.transforms", "timm.models", _TIMM)
EXTRAS = ("timm", "torchvision")  # of kasoku, each with the package of that name
_FUNCTIONS = ("torch.nn.functional", "torch.nn.init")  # whose functions may be named
_PUBLIC = ("core", "optim", "models", "device", "data", "distributed", "memory", "tune", "tracking")  # of kasoku
_KINDS = (Technique, Schedule, nn.Module, Optimizer, LRScheduler)
_allowed: set[str] = set()  # modules and packages that the user has named
_folders: set[Path] = set()  # of recipes that the user has given
_own_used: set[str] = set()  # modules beside a recipe that it names


def allow(names: Iterable[str]) -> None:
    """Lets recipes of this process name these modules and packages, and what is in them."""
    _allowed.update(names)


@contextmanager
def only(names: Iterable[str]) -> Iterator[None]:
    """Allows these modules and packages, and forgets the rest until the end: for a command, or a run of anybody's."""
    global _allowed, _folders, _own_used
    before, (_allowed, _folders, _own_used) = (_allowed, _folders, _own_used), (set(names), set(), set())
    try:
        yield
    finally:
        _allowed, _folders, _own_used = before


def allow_beside(recipe: Path | None) -> None:
    """Lets a recipe that the user gives name the modules in its folder and in the current one."""
    folders = [Path.cwd(), *([recipe.resolve().parent] if recipe else [])]
    _folders.update(folders)
    _search([*map(str, folders), *(import_folders(recipe) if _allowed else [])])


def search_import_folders(recipe: Path) -> None:
    """Puts the import folders of a run's recipe on the import path, if `--allow` names anything."""
    if _allowed:
        _search(import_folders(recipe))


def allow_options() -> list[str]:
    """The --allow options to repeat in a follow-up command, whose recipe lies in another folder."""
    return [word for name in sorted(_allowed | _own_used) for word in ("--allow", name)]


def import_folders(recipe: Path | None) -> list[str]:
    """The folders of a recipe's own modules: the current one, its own, and those of the recipe that it was made from.

    The last are beside it: in the plan.json of `kasoku plan`, and in the environment.json of a run.
    """
    folders = [str(Path.cwd()), *([str(recipe.resolve().parent)] if recipe else [])]
    for file in [recipe.parent / name for name in ("plan.json", "environment.json")] if recipe else []:
        with suppress(InputError, KeyError, TypeError):
            folders += map(str, read_json(file)["import_folders"])
    return folders


def check_name(dotted: str, path: str) -> None:
    """Raises InputError unless what is at this dotted name may be imported."""
    if _is_own(dotted):
        _own_used.update(() if _within(dotted, _allowed) else {dotted.partition(".")[0]})
    elif not _within(dotted, ("kasoku", *_PACKAGES)) or any(part.startswith("_") for part in dotted.split(".")):
        raise _refusal(dotted, path)


def check_callable(thing: Any, dotted: str, path: str) -> None:
    """Raises InputError unless what a dotted name stands for may be called: where it was defined decides."""
    module = str(getattr(thing, "__module__", ""))
    if _is_own(dotted):
        return
    if _within(module, ("kasoku",)):
        good = _is_kind(thing) or _is_public(thing, module)
    elif isinstance(thing, type):
        good = _within(module, _PACKAGES) and (_is_kind(thing) or _within(module, ("torchvision.transforms",)))
    else:
        good = (inspect.isfunction(thing) and module in _FUNCTIONS) or _is_registered(thing)
    if not good:
        raise _refusal(dotted, path)


def check_keys(thing: Any, keys: Mapping[str, Any], path: str) -> None:
    """Raises InputError for arguments with which timm would read a pickle."""
    module = str(getattr(thing, "__module__", ""))
    if _within(module, ("timm",)) and not _within(module, _allowed):
        for key, value in keys.items():
            safe = key == "checkpoint_path" and str(value).endswith(".safetensors")
            folder = key == "model_name" and ":" in str(value)  # local-dir:, hf-hub:
            if folder or (not safe and (key.startswith("pretrained_") or key == "checkpoint_path")):
                wanted = "a name alone with checkpoint_path = FILE.safetensors, or kasoku.models.Pretrained"
                advice = f"give {wanted}; if you trust the file, add --allow timm"
                raise InputError(f"{path}.{key}: makes timm load a file that can run code: {advice}")


def _refusal(dotted: str, path: str) -> InputError:
    if _within(dotted, ("kasoku",)):
        return InputError(f'{path} = "{dotted}": not a name for recipes; kasoku list shows those')
    top = dotted.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        lacking = f"there is no module {top} on the import path; if the run used its own, add --allow {top}"
        return InputError(f'{path} = "{dotted}": {lacking}')
    advice = "" if top in sys.stdlib_module_names else f"; if you trust it, add --allow {top}"
    wanted = (
        "kasoku's names, layers and functions of torch.nn, networks and transforms of torchvision, networks of timm"
    )
    return InputError(f'{path} = "{dotted}": not a name that a recipe may use ({wanted}){advice}')


def _search(folders: Iterable[str]) -> None:
    sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_own(name: str) -> bool:
    """Whether a name is of a module that the user has named, or that lies in a folder the user has given."""
    if _within(name, _allowed):
        return True
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    return any(Path(place).parent.resolve() in _folders for place in places)


def _is_kind(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, _KINDS)


def _is_public(thing: Any, module: str) -> bool:
    """Whether one of kasoku's packages exports it."""
    _, name, *_ = [*module.split("."), ""]
    package, thing_name = sys.modules.get(f"kasoku.{name}"), getattr(thing, "__name__", "")
    if name not in _PUBLIC or package is None or thing_name not in package.__all__:
        return False
    return inspect.unwrap(getattr(package, thing_name)) is inspect.unwrap(thing)


def _is_registered(thing: Any) -> bool:
    """Whether torchvision or timm lists the function among its networks, or it makes timm's by name."""
    name, vision, timm = getattr(thing, "__name__", ""), *map(sys.modules.get, ("torchvision.models", "timm.models"))
    if vision and any(vision.get_model_builder(model) is thing for model in vision.list_models()):
        return True
    listed = timm and timm.is_model(name) and timm.model_entrypoint(name) is thing
    return bool(timm and (listed or thing is getattr(timm, "create_model", None)))
