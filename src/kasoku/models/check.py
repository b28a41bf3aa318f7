"""Checks before training: settings of networks, and whether a network takes images of a given size."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from torch import nn

from kasoku.core import InputError, Range

Count = Annotated[int, Range("give 1 or more", at_least=1)]  # of classes, of channels
Stem = Literal["imagenet", "cifar"]
USUAL_SIZES = (8, 16, 28, 32, 48, 64, 96, 128, 160, 192, 224, 256, 299, 384, 512)


def check_widths(widths: Sequence[int], stages: int) -> None:
    """Raise InputError unless these are channels of so many stages."""
    if len(widths) != stages or min(widths) < 1:
        raise InputError(f"widths={widths}: channels of {stages} stages, each 1 or more")


def check_fits(
    model: nn.Module,
    image_shape_CHW: Sequence[int],
    model_name: str,
    *,
    classes: int = 0,
    at: Callable[[int], nn.Module] | None = None,
) -> int:
    """Run the model once on the meta device; if that fails, raise an error that names the size it needs.

    Return the number of outputs for an image, or 0 if it is unknown; with `classes`, raise if there are fewer. `at`
    makes the network for images of another size, if it depends on it.

    Nothing is computed and the model does not change: meta tensors replace its parameters and buffers during the
    run. A model that cannot run on the meta device (it reads values, or creates tensors on a fixed device) computes two
    images with copies of them instead. Call this before hooks are registered, since they would run too.

    Raises:
        InputError: the model does not take images of this size or of this number of channels, or has too few outputs.
    """
    channels, height, width = image_shape_CHW
    outputs = _outputs(model, channels, height, width)
    if isinstance(outputs, int):
        if 0 < outputs < classes:
            few = f"{model_name} has fewer outputs than the data has classes ({classes})"
            raise InputError(f"{few}: give it num_classes")
        return outputs
    got = f"{model_name} does not fit images of {channels}x{height}x{width}"
    wanted = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), channels)
    if wanted != channels:
        raise InputError(f"{got}, since it takes {wanted} channels; those of kasoku and timm are built for {channels}")

    def fits(size: int) -> bool:
        try:
            other = at(size) if at else model
        except (AssertionError, RuntimeError, ValueError):  # InputError is a ValueError
            return False
        return isinstance(_outputs(other, channels, size, size), int)

    fitting = [size for size in USUAL_SIZES if fits(size)]
    if not fitting:
        raise InputError(f"{got}, nor any size from {USUAL_SIZES[0]} to {USUAL_SIZES[-1]}: {outputs}")
    if len(fitting) < len([size for size in USUAL_SIZES if size >= fitting[0]]):  # the head is made for one size
        sizes = ", ".join(f"{size}x{size}" for size in fitting)
        raise InputError(f"{got}: it takes {sizes}; resize the images or choose another model")
    least = 1 + bisect_left(range(1, fitting[0]), True, key=fits)
    raise InputError(f"{got}: it needs at least {least}x{least}; enlarge the images or choose another model")


def _outputs(
    model: nn.Module, channels: int, height: int, width: int, device: str | torch.device = "meta"
) -> int | str:
    """The outputs for an image of this size, 0 if unknown; or the error of the run on the meta device, in one line."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
    first = next(model.parameters(), torch.empty(0))
    images_NCHW = torch.zeros(2, channels, height, width, device=device, dtype=first.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = torch.func.functional_call(model, state, (images_NCHW,))
    except (AssertionError, RuntimeError, ValueError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if device != "meta":
            return 0  # the training will say so
        for_real = isinstance(error, NotImplementedError) or "meta" in line
        return _outputs(model, channels, height, width, first.device) if for_real else line
    return out.shape[1] if isinstance(out, torch.Tensor) and out.ndim == 2 else 0
