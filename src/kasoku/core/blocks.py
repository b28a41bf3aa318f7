"""The blocks of a model: its parts in order, which are compiled and frozen one by one."""

from torch import nn


def blocks(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The model's blocks with their dotted names after `prefix`, in order of definition.

    A child of the model is a block; a container (Sequential, ModuleList) whose children are modules with children of
    their own (a stage of residual blocks) is opened instead.
    """
    result: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        stage = isinstance(child, nn.Sequential | nn.ModuleList) and any(len(list(c.children())) for c in child)
        result += blocks(child, f"{prefix}{name}.") if stage else [(f"{prefix}{name}", child)]
    return result
