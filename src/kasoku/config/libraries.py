"""Networks of timm, torchvision and transformers: their arguments, the normalisation of their images, their configs.

The functions take **kwargs, so that their signatures do not tell what they take. A library is imported where a recipe
names it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kasoku import models
from kasoku.config.toml import Factory, resolve, table
from kasoku.core.errors import InputError, nearest
from kasoku.core.files import read_json

_SOURCES = ("use", "model_name", "checkpoint_path", "weights")  # keys that name a network or its first weights
_LAYERS = {"classifier", "first_conv", "fixed_input_size"}  # of timm's configs: what holds whatever the weights are


def build(model: Factory, classes: int, channels: int, side: int, *, weights: bool = True) -> Any:
    """Calls a recipe's `model` with what follows from the data, and with its keys, which go first.

    `weights`: loads those that the keys name.
    """
    library, keys = library_of(model), dict(model.keys)
    if library in ("timm", "huggingface") and not weights:
        keys["pretrained"] = False
    if not library:
        network = model(num_classes=classes, in_channels=channels, image_size=side)
    elif library == "torchvision":  # published weights decide the number of classes
        network = model.call(**({} if keys.get("weights") else {"num_classes": classes}), **keys)
    elif library == "timm":
        file = keys.pop("checkpoint_path", "")
        sized = {"img_size": side} if _timm_config(model).fixed_input_size else {}
        network = model.call(**{"num_classes": classes, "in_chans": channels, **sized, **keys})
        if file and weights:
            models.load(network, file)
    else:
        network = model.call(**{"num_labels": classes, "num_channels": channels, "image_size": side, **keys})
    if any(kind.__module__.startswith("transformers.") for kind in type(network).__mro__):
        network.register_forward_hook(logits_of)
    return network


def logits_of(model: object, images: object, output: Any) -> Any:
    """A forward hook: the logits in an output of transformers."""
    return getattr(output, "logits", output)


def normalisation(model: Factory) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and standard deviation in the network's own config; None without one."""
    if library_of(model) == "timm":
        config = _timm_config(model)
        return tuple(config.mean), tuple(config.std)
    file = Path(str(model.keys.get("model_name"))) / "preprocessor_config.json"
    if library_of(model) != "huggingface" or not file.is_file():
        return None
    found = read_json(file)
    try:
        return tuple(map(float, found["image_mean"])), tuple(map(float, found["image_std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: image_mean and image_std are wanted, with a number for each channel") from error


def hub_config(model: Factory, network: Any, classes: Sequence[str], images: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a trained network in a model hub: transformers' own for its networks, timm's form for others.

    `images`: what the network takes, by the names in timm's pretrained_cfg: input_size, mean, std, ...
    """
    library = library_of(model)
    if library == "huggingface":
        numbers = {name: number for number, name in enumerate(classes)}
        named = {"id2label": {number: name for name, number in numbers.items()}, "label2id": numbers}
        return {**network.config.to_dict(), **named, "architectures": [type(network).__name__]}
    keys = {k: v for k, v in table(model).items() if k not in _SOURCES and not k.startswith("pretrained")}
    known = network.pretrained_cfg if library == "timm" else {}
    return {
        "architecture": known.get("architecture", model.name),
        "num_classes": len(classes),
        "label_names": list(classes),
        "model_args": keys,
        "pretrained_cfg": {**{k: known[k] for k in _LAYERS & known.keys()}, **images, "num_classes": len(classes)},
    }


def library_of(model: Factory) -> str:
    """The library of a network's function: timm, torchvision, huggingface; empty for others, and for classes."""
    function = resolve(model.use, "model.use")
    top = "" if isinstance(function, type) else str(function.__module__).partition(".")[0]
    return "huggingface" if function is models.huggingface else top if top in ("timm", "torchvision") else ""


def _timm_config(model: Factory) -> Any:
    """Timm's config of a network. Raises InputError with the nearest name for one that timm does not have."""
    import timm

    name = str(model.keys.get("model_name", model.use.rpartition(".")[2]))
    if timm.is_model(name):
        with suppress(RuntimeError):  # it has no such tag
            return timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
    tagged = timm.list_models(f"{name.partition('.')[0]}.*", include_tags=True)
    close = nearest(name, tagged or timm.list_models()) or "; timm.list_models() has all"
    raise InputError(f'model.model_name = "{name}": timm has no such network{close}')
