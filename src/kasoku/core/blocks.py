"""The blocks of a model: its parts in order, which are compiled, timed and frozen one by one; hooks on them."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from kasoku.core.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


def blocks(model: nn.Module, prefix: str = "", least: float = 0.0) -> list[tuple[str, nn.Module]]:
    """The model's blocks with their dotted names after `prefix`, in order of definition.

    A child of the model is a block; a container (Sequential, ModuleList) whose children are modules with children of
    their own (a stage of residual blocks) is opened instead. So is a backbone or an encoder: a module that has such a
    stage in it and more weights than `least`, by default half of the model's.
    """
    result: list[tuple[str, nn.Module]] = []
    least = least or _weights(model) / 2
    for name, child in model.named_children():
        opened = _is_stage(child) or (_weights(child) > least and any(map(_is_stage, child.modules())))
        result += blocks(child, f"{prefix}{name}.", least) if opened else [(f"{prefix}{name}", child)]
    return result


def _is_stage(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList) and any(len(list(c.children())) for c in module)


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def ignores_values(hook: F) -> F:
    """Declares that a module hook neither changes inputs and outputs nor depends on their values.

    A technique may then call the hook with other tensors, or leave out a forward hook, where it runs several layers at
    once (`SavedMemory`). Layers with any other hook run as torch runs them.
    """
    hook.ignores_values = True  # type: ignore[attr-defined]
    return hook


def stays_in_place(module: nn.Module) -> bool:
    """Whether `SavedMemory` has replaced the module's forward: no other may. For a BatchNorm it obeys `steering`."""
    return "saved_memory" in vars(module)


def steering(norm: nn.Module) -> Any:
    """What groups the images of this BatchNorm in training now (`Steer`); None where torch's own forward holds."""
    steer = vars(norm).get("steer")
    return steer if norm.training and steer is not None and steer.norm is norm else None  # not of a deep copy


def values_of_group(x: Tensor) -> int:
    """The values a channel of images that share statistics in a BatchNorm. Raises InputError for a single one."""
    n = x.numel() // x.shape[1]
    if n < 2:
        raise InputError("BatchNorm of one image of one pixel has no variance: at least 2 images must share statistics")
    return n
