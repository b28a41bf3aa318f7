"""The parts of a model that a step goes through one by one, and whose parameters are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from kasoku.core import Job
from kasoku.core.blocks import blocks
from kasoku.core.hooks import ignores_values
from kasoku.distributed.ddp.cost_model import Sized


class Units:
    """The layers of a model that have parameters of their own; a part that was compiled as one stays one.

    Attributes:
        modules: (name, module) of each unit; the model itself stands for parameters that are in no layer.
        blocks: what the model's forward calls one after the other; a unit is a block or lies within one.
        named: (name, parameter) of the parameters that require a gradient, in order of definition.
        users: the units that have a parameter, the first one first.
        order: the units in the order of their forwards, as far as it is known.
        tensors: the same parameters as the planner sees them: `unit` is that of its first user.
    """

    def __init__(self, model: nn.Module) -> None:
        self.named: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.blocks = [block for _, block in blocks(model)]
        found = list(_layers("", model, set()))
        self.modules = [(name, module) for name, module, _ in found]
        self.users: dict[Tensor, list[int]] = {p: [] for _, p in self.named}
        for i, (_, _, params) in enumerate(found):
            for p in params:
                if p in self.users:
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
        """Calls f(unit) before the forward of each unit, until the job is closed.

        A layer that its block did not call in its last training forward begins with the block: attention reads the
        weights of its projection, and never calls it.
        """
        silent, called = set(range(len(self.modules))), set()

        def enter(unit: int) -> None:
            called.add(unit)
            f(unit)

        def enter_block(units: Sequence[int]) -> None:
            for unit in units:
                if unit in silent:
                    f(unit)
            called.difference_update(units)

        def leave_block(block: nn.Module, units: Sequence[int]) -> None:
            if block.training:
                silent.update(units)
                silent.difference_update(called)

        places = {module: i for i, (_, module) in enumerate(self.modules)}
        for block in self.blocks:
            inside = [places[m] for m in block.modules() if m is not block and m in places]
            if inside:
                before = ignores_values(lambda *_, units=inside: enter_block(units))
                after = ignores_values(lambda m, *_, units=inside: leave_block(m, units))
                job.undo(block.register_forward_pre_hook(before).remove)
                job.undo(block.register_forward_hook(after).remove)
        for module, i in places.items():
            job.undo(module.register_forward_pre_hook(ignores_values(lambda *_, unit=i: enter(unit))).remove)

    def name_of(self, p: Tensor) -> str:
        """The unit that has a parameter."""
        return self.modules[self.users[p][0]][0] or "the model"


def _layers(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Each with the parameters that its own forward uses."""
    if module in seen:
        return
    seen.add(module)
    compiled = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    one = compiled or getattr(module, "_compiled_call_impl", None) is not None
    own = list(module.parameters(recurse=one))
    if own:
        yield name, module, own
    if not one:
        for child_name, child in module.named_children():
            yield from _layers(f"{name}.{child_name}".lstrip("."), child, seen)
