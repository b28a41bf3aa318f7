"""Python runs this file as it starts where its folder is in PYTHONPATH: so `kasoku profile -- COMMAND` gets in.

It runs the sitecustomize.py that it hides, and follows the script as soon as torch is imported, if it ever is.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace


def _find_torch(name: str, *_: object) -> ModuleSpec | None:
    if name != "torch":
        return None
    sys.meta_path.remove(_finder)
    spec = find_spec(name)
    if spec and spec.loader:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            import_module("kasoku.report.script_timer").follow_script(Path(os.environ["KASOKU_PROFILE"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


_finder = SimpleNamespace(find_spec=_find_torch)
if "KASOKU_PROFILE" in os.environ and find_spec("kasoku"):
    sys.meta_path.insert(0, _finder)
_folder = Path(__file__).resolve().parent
_hidden = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p).resolve() != _folder])
if _hidden and _hidden.loader:
    sys.modules["sitecustomize"] = _module = module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)
