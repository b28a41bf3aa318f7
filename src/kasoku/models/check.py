"""Checks before training: counts, options, and whether a network takes images of a given size."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import nn

from kasoku.core.errors import InputError

USUAL_SIZES = (8, 16, 28, 32, 48, 64, 96, 128, 160, 192, 224, 256, 299, 384, 512)

_TOO_FEW = "too few outputs"


def check_counts(**counts: int) -> None:
    """Raise InputError for a count (classes, channels) below 1."""
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name}={count}: give 1 or more")


def check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise InputError for an option that is not one of the allowed words."""
    if value not in allowed:
        raise InputError(f"{name}={value!r}: one of {', '.join(allowed)}")


def check_widths(widths: Sequence[int], stages: int) -> None:
    """Raise InputError unless these are channels of so many stages."""
    if len(widths) != stages or min(widths) < 1:
        raise InputError(f"widths={widths}: channels of {stages} stages, each 1 or more")


def check_fits(model: nn.Module, image_shape_CHW: Sequence[int], model_name: str, *, classes: int = 0) -> None:
    """Run the model once on the meta device; if that fails, raise an error that names the size it needs.

    With `classes`, also if it has fewer outputs.

    Nothing is computed and the model does not change: meta tensors replace its parameters and buffers during the
    run. A model that cannot run on the meta device (it reads values, or creates tensors on a fixed device) passes
    unchecked. Call this before hooks are registered, since they would run too.

    Raises:
        InputError: the model does not take images of this size or of this number of channels, or has too few outputs.
    """
    channels, height, width = image_shape_CHW
    why = _failure(model, channels, height, width, classes)
    if why is None:
        return
    if why == _TOO_FEW:
        raise InputError(f"{model_name} has fewer outputs than the data has classes ({classes}): give it num_classes")
    got = f"{model_name} does not fit images of {channels}x{height}x{width}"
    wanted = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), channels)
    if wanted != channels:
        raise InputError(f"{got}: it takes {wanted} channels; build it with in_channels={channels}")
    fitting = [size for size in USUAL_SIZES if _failure(model, channels, size, size) is None]
    if not fitting:
        raise InputError(f"{got}, nor any size from {USUAL_SIZES[0]} to {USUAL_SIZES[-1]}: {why}")
    if len(fitting) < len([size for size in USUAL_SIZES if size >= fitting[0]]):  # the head is made for one size
        sizes = ", ".join(f"{size}x{size}" for size in fitting)
        raise InputError(f"{got}: it takes {sizes}; resize the images or choose another model")
    sizes_below = range(1, fitting[0])
    least = 1 + bisect_left(sizes_below, True, key=lambda size: _failure(model, channels, size, size) is None)
    raise InputError(f"{got}: it needs at least {least}x{least}; enlarge the images or choose another model")


def _failure(model: nn.Module, channels: int, height: int, width: int, classes: int = 0) -> str | None:
    """The error of a run with this image size, in one line; None if it runs or cannot run on the meta device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    images_NCHW = torch.empty(2, channels, height, width, device="meta", dtype=dtype)
    try:
        with torch.no_grad():
            out = torch.func.functional_call(model, state, (images_NCHW,))
    except NotImplementedError:
        return None
    except (RuntimeError, ValueError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None if "meta" in line else line
    return _TOO_FEW if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] < classes else None
