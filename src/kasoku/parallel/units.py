"""The parts of a model that a step goes through one by one, and whose parameters are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from kasoku.core import Job
from kasoku.core.blocks import blocks
from kasoku.core.cost import Sized


class Units:
    """The blocks of a model that have parameters; a plain Sequential is opened, unless it was compiled as one.

    Attributes:
        modules: (name, module) of each unit; the model itself stands for parameters that are in no block.
        named: (name, parameter) of the parameters that require a gradient, in order of definition.
        users: the units that have a parameter, the first one first.
        tensors: the same parameters as the planner sees them: `unit` is that of its first user.
    """

    def __init__(self, model: nn.Module) -> None:
        self.named: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = [unit for name, block in blocks(model) for unit in _opened(name, block)]
        inside = {p for _, module in found for p in module.parameters()}
        if any(p not in inside for _, p in self.named):
            found.insert(0, ("", model))
        self.modules = found
        self.users: dict[Tensor, list[int]] = {p: [] for _, p in self.named}
        for i, (name, module) in enumerate(found):
            for p in module.parameters():
                if p in self.users and (name or p not in inside):
                    self.users[p].append(i)
        self.order: Sequence[int] = range(len(found))

    @property
    def tensors(self) -> list[Sized]:
        """What the planner plans, by the forward order known so far."""
        place = {unit: i for i, unit in enumerate(self.order)}
        return [
            Sized(
                min(place[u] for u in self.users[p]),
                p.numel(),
                p.numel() * p.element_size(),
                f"{p.dtype} {p.device}",
                n,
            )
            for n, p in self.named
        ]

    def before(self, job: Job, f: Callable[[int], None]) -> None:
        """Calls f(unit) before the forward of each unit, until the job is closed."""
        for i, (_, module) in enumerate(self.modules):
            job.undo(module.register_forward_pre_hook(lambda *_, unit=i: f(unit)).remove)

    def name_of(self, p: Tensor) -> str:
        """The unit that has a parameter."""
        return self.modules[self.users[p][0]][0] or "the model"


def _opened(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential and "forward" not in vars(module):
        for child_name, child in module.named_children():
            yield from _opened(f"{name}.{child_name}", child)
    elif any(True for _ in module.parameters()):
        yield name, module
