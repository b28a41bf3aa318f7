"""The blocks of a model: its parts in order, which are compiled and frozen one by one."""

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's blocks with their dotted names, in order of definition.

    A child of the model is a block; a container (Sequential, ModuleList) whose children are modules with children of
    their own (a stage of residual blocks) is opened instead.
    """
    result: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, _CONTAINERS) and any(len(list(c.children())) for c in child.children()):
                visit(path + ".", child)
            else:
                result.append((path, child))

    visit("", model)
    return result
