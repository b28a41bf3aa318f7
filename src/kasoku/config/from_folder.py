"""A recipe for photos: network, image size and settings that fit its images."""

import inspect
import io
import random
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image

from kasoku import models
from kasoku.config.recipe import AUTO, Recipe, from_document
from kasoku.config.toml import override
from kasoku.core import InputError
from kasoku.core.files import expanded
from kasoku.data import Encoded
from kasoku.data.datasets.tables import read_photos

_FROM_SCRATCH_UPDATES = 4_000  # about where small networks on small sets stop gaining; epochs follow from it
_FINE_TUNE_UPDATES = 400
_MUON_BATCH = 64  # with fewer images a step, its matrix products take longer than the images
_MUON_EPOCHS, _MUON_UPDATES = 16, 400  # at most, and at least, where there are many or few photos


def recipe_for(data: Path, weights: Path | None, *, freeze: int = 0, settings: Sequence[str] = ()) -> Recipe:
    """A recipe to train on `data`; with published `weights`, the network is theirs.

    Raises InputError for a folder without classes or images, and for weights of no network of ours.
    """
    source, dataset = read_photos(str(data))
    train = cast(Encoded, dataset.train)
    n = len(train)
    side = _usual_side(train)
    batch = min(n, max(8, min(64, n // 8)))
    steps = max(1, n // batch)  # of an epoch
    augment: dict[str, Any] = {"use": "kasoku.data.Augment", "flip": "random", "crop": "random_resized"}
    techniques, curve, warmup = [augment], "Cosine", 1 / 10  # of the training
    optimizer: dict[str, Any] = {"use": "kasoku.optim.sgd", "nesterov": True}
    if weights is not None:
        size, network, epochs = min(224, max(64, side // 32 * 32)), _network_of(weights), _FINE_TUNE_UPDATES / steps
        techniques = [{"use": "kasoku.models.Pretrained", "weights": str(weights.resolve()), "freeze": freeze}, augment]
        optimizer |= {"lr": 0.01 * batch / 64, "weight_decay": 1e-4}
    else:
        size = min(128, max(32, side // 32 * 32))
        network = "resnet18" if size > 48 else "cifar_resnet18"
        epochs = _FROM_SCRATCH_UPDATES / steps
        if batch < _MUON_BATCH:
            optimizer |= {"lr": 0.1 * batch / 128, "weight_decay": 5e-4}
        else:  # the settings of the recipe imagenette_resnet18, which was measured
            epochs = max(min(_MUON_EPOCHS, epochs), _MUON_UPDATES / steps)
            curve, warmup = "Linear", 1 / 16
            rest = {"bias_lr": 0.1, "head_lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
            optimizer = {"use": "kasoku.optim.muon", "lr": 0.08, "momentum": 0.8, "rest": rest}
            augment["scale_min"] = 0.35
            if size > 64 and not any(setting.lstrip().startswith("model") for setting in settings):
                techniques.append({"use": "kasoku.data.LowResolution", "side": size * 3 // 4, "until": 5 / 8})
    document: dict[str, Any] = {
        "batch": batch,
        "epochs": float(max(3, min(60, round(epochs)))),
        "data": {"use": f"kasoku.data.{source.__name__}", "root": str(expanded(data).resolve()), "size": size},
        "model": {"use": f"kasoku.models.{network}"},
        "techniques": techniques,
        "schedule": {"use": f"kasoku.core.{curve}", "warmup": warmup},
        "optimizer": optimizer,
        "loss": {"use": "kasoku.optim.cross_entropy", "smoothing": 0.1},
    }
    for setting in settings:
        override(document, setting)
    if document["batch"] == AUTO:
        document.setdefault("reference_batch", batch)  # of the rates above; tuning begins there
    return from_document(document)


def _usual_side(train: Encoded) -> int:
    """The median shorter side of some of the images, in pixels."""
    sample = random.Random(0).sample(range(len(train)), min(50, len(train)))
    sides = []
    for index in sample:
        with suppress(InputError, OSError, Image.DecompressionBombError):
            image = train.read(index)
            sides.append(min(Image.open(io.BytesIO(image)).size if isinstance(image, bytes) else image.shape[:2]))
    if not sides:
        raise InputError(f"{train.name(sample[0])}: none of {len(sample)} images can be opened: look at the files")
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
        with suppress(InputError):
            models.fill(model, state, weights)
            return name
    advice = "write a recipe with a model of your own"
    raise InputError(f"{weights}: weights of none of our networks (kasoku list): {advice}")
