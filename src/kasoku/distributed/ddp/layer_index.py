"""The layers of a model in the order of their forwards, and which layer uses which parameter."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from kasoku.core import InputError, Job
from kasoku.core.blocks import blocks, ignores_values
from kasoku.core.torch_internals import is_compiled
from kasoku.distributed.ddp.cost_model import Sized


class LayerIndex:
    """The layers of a model that have parameters of their own; a module compiled as a whole counts as one layer.

    `whole`: so does the model, since a captured graph runs the forward of no layer.
    """

    def __init__(self, model: nn.Module, *, whole: bool = False) -> None:
        # the parameters that require a gradient, in order of definition
        self.named: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not self.named:
            raise InputError(f"{type(model).__name__} has no parameter that requires a gradient: unfreeze some")
        self._blocks = [block for _, block in blocks(model)]  # a layer is a block or lies within one
        names = {module: name for name, module in model.named_modules()}
        layers = list(_layers(model, set(), whole=whole))
        self.modules = [(names[module], module) for module, _ in layers]  # the model: parameters outside of any layer
        self.users: dict[Tensor, list[int]] = {p: [] for _, p in self.named}  # the layers that use it
        for i, (_, params) in enumerate(layers):
            for p in self.users.keys() & params:
                self.users[p].append(i)
        self.order: Sequence[int] = range(len(layers))  # of their forwards, as far as it is known

    @property
    def tensors(self) -> list[Sized]:
        """The same parameters for the planner: `unit` is the place of the first user in `order`."""
        place = {layer: i for i, layer in enumerate(self.order)}
        first = {p: min(place[user] for user in users) for p, users in self.users.items()}
        return [Sized(first[p], p.numel(), p.nbytes, f"{p.dtype} {p.device}", name) for name, p in self.named]

    def before(self, job: Job, f: Callable[[int], None]) -> None:
        """Calls f(layer) before the forward of each layer, until the job is closed.

        A layer that its block did not call in its last training forward begins with the block: attention reads the
        weights of its projection without calling it.
        """
        silent, called = set(range(len(self.modules))), set()

        def enter(layer: int) -> None:
            called.add(layer)
            f(layer)

        def enter_block(layers: Sequence[int]) -> None:
            for layer in layers:
                if layer in silent:
                    f(layer)
            called.difference_update(layers)

        def leave_block(block: nn.Module, layers: Sequence[int]) -> None:
            if block.training:
                silent.update(layers)
                silent.difference_update(called)

        places = {module: i for i, (_, module) in enumerate(self.modules)}
        for block in self._blocks:
            if inside := [places[m] for m in block.modules() if m is not block and m in places]:
                before = ignores_values(lambda *_, layers=inside: enter_block(layers))
                after = ignores_values(lambda m, *_, layers=inside: leave_block(m, layers))
                job.on_close(block.register_forward_pre_hook(before).remove)
                job.on_close(block.register_forward_hook(after).remove)
        for module, i in places.items():
            job.on_close(module.register_forward_pre_hook(ignores_values(lambda *_, layer=i: enter(layer))).remove)


def _layers(module: nn.Module, seen: set[nn.Module], *, whole: bool) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The layers, each with the parameters that its own forward uses."""
    if module in seen:
        return
    seen.add(module)
    whole |= is_compiled(module)
    if own := list(module.parameters(recurse=whole)):
        yield module, own
    for child in module.children() if not whole else ():
        yield from _layers(child, seen, whole=False)
