"""CUDA graphs: a step's kernels launched at once."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job, Stage, Technique

CAPTURED_ON = "cuda"  # the type of device whose kernels can be captured


@dataclass(frozen=True)
class Graphs(Technique, stage=Stage.COMPILE, captures_graph=True):
    """Replays the model's forward and backward as CUDA graphs, where launching kernels costs more than they do.

    The graph is captured at the first training batch, and again where two batches in a row have another shape. A single
    batch of another shape, and evaluation, run as usual. Python inside the model (hooks on its layers) does not run in
    a replay, and all gradients come at once, at the end of backward. No GPU has run it yet.

    Saves: time for small models and small batches: one launch for hundreds of kernels.
    Costs: the memory of a graph's buffers; three batches of warm-up before the first step; a copy of the gradients with
        accumulation; on several ranks a small collective a step, for the mean of BatchNorm's running statistics.
    Ref: torch.cuda.make_graphed_callables.
    """

    def apply(self, job: Job) -> None:
        """Puts the graph in front of the forward. Raises InputError off CUDA."""
        kinds = {p.device.type for p in job.model.parameters()}
        if kinds != {CAPTURED_ON}:
            raise InputError(f"Graphs needs a model on CUDA, this one is on {', '.join(sorted(kinds)) or 'nothing'}")
        for p in job.model.parameters():
            if p.requires_grad:
                hook: Any = p.register_hook
                job.on_close(hook(functools.partial(_keep, job, p)).remove)
        job.patch(job.model, "forward", _Graphed(job.model, job.model.forward))
        running = [x for name, x in job.model.named_buffers() if name.endswith(("running_mean", "running_var"))]
        if job.comm.size > 1 and running:
            job.before_step(functools.partial(_average_statistics, job, running))


def _keep(job: Job, p: Tensor, gradient: Tensor) -> Tensor | None:
    """A copy of the first of several gradients: `p.grad` would be the graph's own memory, which a replay overwrites."""
    if p.grad is None:
        return gradient.clone() if job.accumulate > 1 else None
    if p.grad.data_ptr() == gradient.data_ptr():
        got = "Graphs: a second backward has overwritten the gradients of the first"
        advice = "call optimizer.zero_grad() after each step; for k backwards a step, Job(accumulate=k)"
        raise InputError(f"{got}: {advice}")
    return None


@torch.no_grad()
def _average_statistics(job: Job, running: list[Tensor]) -> None:
    """BatchNorm's running statistics become their means over ranks, whose graphs take those of their own batches."""
    if job.step_comm.size > 1:
        flat = torch.cat([x.flatten() for x in running])
        job.step_comm.all_reduce(flat, op="mean").wait()
        for x, mean in zip(running, torch.split(flat, [x.numel() for x in running]), strict=True):
            x.copy_(mean.view_as(x))


class _Graphed:
    """Stands in for forward: the graph for training batches of the captured shape, the inner forward otherwise."""

    def __init__(self, model: nn.Module, inner: Callable[..., Any]) -> None:
        self._model, self._inner = model, inner
        self._graph: Callable[[Tensor], Any] | None = None
        self._captured: Any = None  # the shape of its batch
        self._last: Any = None  # the shape of the last training batch

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Graphed":
        """A copy of the model captures a graph of its own."""
        return _Graphed(copy.deepcopy(self._model, memo), copy.deepcopy(self._inner, memo))

    def __call__(self, x: Tensor) -> Any:
        if not (self._model.training and torch.is_grad_enabled()):
            return self._inner(x)
        look = x.shape, x.dtype, x.stride(), x.requires_grad
        if look != self._captured and (self._graph is None or look == self._last):
            self._graph = None  # frees its memory first
            self._graph, self._captured = self._capture(x), look
        self._last = look
        return self._graph(x) if self._graph is not None and look == self._captured else self._inner(x)

    def _capture(self, x: Tensor) -> Callable[[Tensor], Any]:
        """Captures forward and backward; warm-up moves buffers (BatchNorm's) and random states, which are put back."""
        buffers = [(b, b.clone()) for b in self._model.buffers()]
        kind = x.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Autocast's cache of converted weights must not outlive a capture.
        uncached = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
        with torch.random.fork_rng([x.device] if x.is_cuda else []), uncached:
            shell = nn.Module()  # what torch captures: the model's parameters, with the inner forward
            shell.model, shell.forward = self._model, self._inner
            graph: Callable[[Tensor], Any] = torch.cuda.make_graphed_callables(shell, (x.detach().clone(),))
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return graph
