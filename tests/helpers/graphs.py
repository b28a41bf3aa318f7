"""CUDA graphs on a CPU: a stand-in for torch.cuda.make_graphed_callables, with which `Graphs` runs in tests.

As the real one, it runs the callable a few times to warm up, records the operators of one forward and of one backward,
and then replays them on the same tensors. So no Python inside the callable runs in a replay, a replay overwrites what
the one before has left, and all gradients of the parameters come at once, when the whole backward has been replayed.
Random operators draw anew in each replay. Only the operators run: a recorder sits below autograd and autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

WARM_UPS = 3


class Recorder(TorchDispatchMode):
    """Records the operators that run within it, with the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the same operators on the same tensors."""
        with torch.autocast("cpu", enabled=False):
            for func, args, kwargs, out in self.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                        old.copy_(new)


@dataclass
class Counts:
    """How many graphs were captured, and how many forwards and backwards were replayed."""

    captured: int = 0
    forwards: int = 0
    backwards: int = 0


@contextmanager
def captured_on_cpu() -> Iterator[Counts]:
    """Within it, `Graphs` takes models on the CPU, and captures and replays them by the stand-in."""
    counts = Counts()

    def make(module: nn.Module, sample: tuple[Tensor, ...]) -> Callable[..., Any]:
        counts.captured += 1
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
            raise RuntimeError("make_graphed_callables does not support the autocast caching")
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise AssertionError("Modules must not have hooks registered at the time they are passed")
        return _graphed(module, sample, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kasoku.device.cuda_graphs.CAPTURED_ON", "cpu")
        patch.setattr(torch.cuda, "make_graphed_callables", make)
        yield counts


def _graphed(module: nn.Module, sample: tuple[Tensor, ...], counts: Counts) -> Callable[..., Any]:
    params = tuple(module.parameters())
    surface = (*sample, *params)
    learned = tuple(x for x in surface if x.requires_grad)

    def forward() -> tuple[tuple[Tensor, ...], Any]:
        leaves, spec = tree_flatten(module(*sample))
        return tuple(leaves), spec

    def backward(outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad([x for x in outputs if x.requires_grad], learned, grads)

    for _ in range(WARM_UPS):
        outputs, _ = forward()
        backward(outputs, tuple(torch.empty_like(x) for x in outputs if x.requires_grad))
    with Recorder() as forwards:
        outputs, spec = forward()
    static_grads = tuple(torch.empty_like(x) if x.requires_grad else None for x in outputs)
    with Recorder() as backwards:
        found = iter(backward(outputs, tuple(g for g in static_grads if g is not None)))
    results = tuple(next(found) if x.requires_grad else None for x in surface)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            counts.forwards += 1
            for static, x in zip(sample, inputs, strict=False):
                static.copy_(x)
            forwards.replay()
            return tuple(x.detach() for x in outputs)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            counts.backwards += 1
            for static, grad in zip(static_grads, grads, strict=True):
                if static is not None:
                    static.copy_(grad)
            backwards.replay()
            return tuple(x.detach() if x is not None else None for x in results)

    def replayed(*inputs: Tensor) -> Any:
        return tree_unflatten(list(Graphed.apply(*inputs, *params)), spec)

    return replayed
