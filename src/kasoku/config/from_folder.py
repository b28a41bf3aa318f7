"""A recipe for a folder of photos: network, image size and settings that fit its images."""

import inspect
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image

from kasoku import models
from kasoku.config.recipe import AUTO, Recipe, from_document
from kasoku.config.toml import override
from kasoku.core import InputError
from kasoku.data import Files, folder

_FROM_SCRATCH_UPDATES = 4_000  # about where small networks on small sets stop gaining; epochs follow from it
_FINE_TUNE_UPDATES = 400


def recipe_for(data: Path, weights: Path | None, *, freeze: int = 0, settings: Sequence[str] = ()) -> Recipe:
    """A recipe to train on `data`; with published `weights`, the network is theirs.

    Raises InputError for a folder without classes or images, and for weights of no network of ours.
    """
    dataset = folder(str(data))
    paths = cast(Files, dataset.train).paths  # a folder is files
    n = len(paths)
    side = _usual_side(paths)
    batch = min(n, max(8, min(64, n // 8)))
    if weights is not None:
        size = min(224, max(64, side // 32 * 32))
        updates, lr, decay = _FINE_TUNE_UPDATES, 0.01 * batch / 64, 1e-4
        network = _network_of(weights)
        start = [{"use": "kasoku.models.Pretrained", "weights": str(weights.resolve()), "freeze": freeze}]
    else:
        size = min(128, max(32, side // 32 * 32))
        updates, lr, decay = _FROM_SCRATCH_UPDATES, 0.1 * batch / 128, 5e-4
        network = "resnet18" if size > 48 else "cifar_resnet18"
        start = []
    epochs = float(max(3, min(60, round(updates / max(1, n // batch)))))
    document: dict[str, Any] = {
        "batch": batch,
        "epochs": epochs,
        "data": {"use": "kasoku.data.folder", "root": str(data.resolve()), "size": size},
        "model": {"use": f"kasoku.models.{network}"},
        "techniques": [*start, {"use": "kasoku.data.Augment", "flip": "random", "crop": "random_resized"}],
        "optimizer": {"use": "kasoku.optim.sgd", "lr": lr, "nesterov": True, "weight_decay": decay},
        "loss": {"use": "kasoku.optim.cross_entropy", "smoothing": 0.1},
    }
    for setting in settings:
        if setting.partition("=")[0].strip() in ("batch", "epochs"):
            override(document, setting)
    if document["batch"] == AUTO:
        document["reference_batch"] = batch  # of the rates above; tuning begins there
    if isinstance(document["epochs"], int | float):
        epochs = document["epochs"]  # the warm-up follows them
    document["schedule"] = {"use": "kasoku.core.Cosine", "warmup": epochs / 10}
    return from_document(document, settings)


def _usual_side(paths: tuple[str, ...]) -> int:
    """The median shorter side of some of the images, in pixels."""
    sample = random.Random(0).sample(paths, min(50, len(paths)))
    sides = []
    for path in sample:
        try:
            with Image.open(path) as image:
                sides.append(min(image.size))
        except (OSError, Image.DecompressionBombError):
            continue
    if not sides:
        raise InputError(f"{Path(sample[0]).parent}: none of {len(sample)} images can be opened: look at the files")
    return int(statistics.median(sides))


def _network_of(weights: Path) -> str:
    """The name of our network whose tensors a file holds, its head apart."""
    state = models.read(weights)
    for name in models.__all__:
        factory = getattr(models, name)
        if not inspect.isfunction(factory) or "num_classes" not in inspect.signature(factory).parameters:
            continue
        with torch.device("meta"):
            model = factory()
        try:
            models.fill(model, state, weights)
        except InputError:
            continue
        return name
    raise InputError(
        f"{weights}: weights of none of our networks (kasoku list): write a recipe with a model of your own"
    )
