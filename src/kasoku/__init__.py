"""kasoku (加速, "acceleration"): trains image classifiers to a wanted accuracy in the least time.

    import kasoku

    recipe = kasoku.load_recipe("digits_cnn_98", ["epochs=4"])
    print(kasoku.train(recipe, out="runs/first").top1)
    print(kasoku.evaluate("runs/first").top5)

Everything else is in packages: kasoku.core (Job, Technique), kasoku.data, kasoku.models, kasoku.optim, kasoku.device,
kasoku.distributed, kasoku.memory, kasoku.testing.

Note: names are imported when they are first used. torch takes 1.2 s to import, and `kasoku --help` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kasoku.core import InputError, Job, Schedule, Technique
    from kasoku.training.api import evaluate, load_recipe, predict, train
else:
    _MODULES = dict.fromkeys(("InputError", "Job", "Schedule", "Technique"), "kasoku.core")
    _MODULES |= dict.fromkeys(("evaluate", "load_recipe", "predict", "train"), "kasoku.training.api")

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'kasoku' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})


__all__ = ["InputError", "Job", "Schedule", "Technique", "evaluate", "load_recipe", "predict", "train"]
