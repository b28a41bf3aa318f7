"""Image classifiers of Hugging Face's transformers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kasoku.core.errors import InputError, nearest
from kasoku.core.files import read_json

_SHAPE = ("num_channels", "image_size")  # settings that only some networks have
_FOREIGN_CODE = re.compile(r'_implementation\w*": "[^"]*/|"auto_map"')  # that transformers may download and run


def huggingface(model_name: str, *, pretrained: bool = False, **settings: Any) -> nn.Module:
    """An image classifier of transformers, by its kind or from a folder.

    Args:
        model_name: a kind of network, such as "vit", "convnext" or "resnet", or a folder as save_pretrained writes it.
        pretrained: start from the weights in the folder, .safetensors; the head starts fresh for other classes.
        **settings: of its config, such as hidden_size; kasoku gives num_labels, num_channels and image_size.

    Raises:
        InputError: without transformers; for a name or a setting that it lacks; for weights of another network.
    """
    try:
        from transformers import AutoConfig, AutoModelForImageClassification
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    except ImportError as error:
        raise InputError(f"kasoku.models.huggingface: {error}: pip install 'kasoku[huggingface]'") from error
    folder, here = Path(model_name), {"local_files_only": True, "trust_remote_code": False}
    document = read_json(folder / "config.json")
    kind = document.get("model_type", model_name)
    if kind not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        close = nearest(str(kind), MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
        raise InputError(f'model_name = "{kind}": transformers has no such image classifier, nor is it a folder{close}')
    if _FOREIGN_CODE.search(json.dumps({**document, **settings}, default=str)):
        raise InputError(f"{model_name}: its config names code of a hub, which is not run: remove it there")
    known = AutoConfig.for_model(kind)
    for name in settings:
        if not hasattr(known, name) and name not in _SHAPE:
            raise InputError(f"{name}: {type(known).__name__} has no such setting{nearest(name, known.to_dict())}")
    given = {name: value for name, value in settings.items() if hasattr(known, name) and name != "num_labels"}
    config = AutoConfig.from_pretrained(folder, **here, **given) if document else AutoConfig.for_model(kind, **given)
    config.num_labels = settings.get("num_labels", config.num_labels)  # as an argument it would warn of other labels
    if not pretrained:
        model: nn.Module = AutoModelForImageClassification.from_config(config, dtype=torch.float32)
        return model
    if not document:
        raise InputError(f'pretrained = true: "{model_name}" is a kind of network; give the folder of its weights')
    here |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = AutoModelForImageClassification.from_pretrained(folder, config=config, dtype=torch.float32, **here)
    misshapen = [name for name, own, other in info["mismatched_keys"] if own[1:] != other[1:]]  # the head is not
    if wrong := [*info["missing_keys"], *info["unexpected_keys"], *misshapen]:
        advice = "position embeddings are of one image size: give the data's `size` that of the weights"
        raise InputError(f"{folder}: not weights of this {type(model).__name__} ({', '.join(wrong[:3])}); {advice}")
    return model
