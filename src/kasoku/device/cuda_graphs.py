"""CUDA graphs: a step's kernels launched at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job, Stage, Technique


@dataclass(frozen=True)
class Graphs(Technique, stage=Stage.COMPILE, captures_graph=True):
    """Replays the model's forward and backward as CUDA graphs, where launching kernels costs more than they do.

    The graph is captured at the first training batch; batches of another shape, and evaluation, run as usual. Python
    inside the model (hooks on its layers) does not run in a replay. It has not yet been seen on a GPU.

    Saves: time for small models and small batches: one launch for hundreds of kernels.
    Costs: the memory of a graph's buffers; three batches of warm-up before the first step.
    Ref: torch.cuda.make_graphed_callables.
    """

    def apply(self, job: Job) -> None:
        """Puts the graph in front of the forward. Raises InputError off CUDA."""
        kinds = {p.device.type for p in job.model.parameters()}
        if kinds != {"cuda"}:
            raise InputError(f"Graphs needs a model on CUDA, this one is on {', '.join(sorted(kinds)) or 'nothing'}")
        job.patch(job.model, "forward", _Graphed(job.model))


class _Shell(nn.Module):
    """A module of the model's parameters whose forward is the inner one: what torch captures."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._inner = model, forward

    def forward(self, x: Tensor) -> Any:
        # Autocast's cache of converted weights must not outlive a capture.
        enabled = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled=enabled, cache_enabled=False):
            return self._inner(x)


class _Graphed:
    """Stands in for forward: the graph for training batches of the first one's shape, the inner forward otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._inner = model, model.forward
        self._graph: Callable[[Tensor], Any] | None = None
        self._captured: tuple[Any, ...] = ()

    def __call__(self, x: Tensor) -> Any:
        if not (self._model.training and torch.is_grad_enabled()):
            return self._inner(x)
        if self._graph is None:
            self._captured = _look(x)
            # Warm-up moves buffers (BatchNorm's statistics) and random states; both are put back.
            buffers = [(b, b.clone()) for b in self._model.buffers()]
            random = torch.cuda.get_rng_state(x.device)
            with torch.autocast("cuda", enabled=False):
                graph: Any = torch.cuda.make_graphed_callables(_Shell(self._model, self._inner), (x.detach().clone(),))
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            torch.cuda.set_rng_state(random, x.device)
            self._graph = graph
        return self._graph(x) if _look(x) == self._captured else self._inner(x)


def _look(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride(), x.requires_grad
