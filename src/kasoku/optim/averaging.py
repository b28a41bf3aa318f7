"""An average of the weights, for evaluation.

Note: partial updates. Each parameter counts its own updates, in `after_update`. So a technique that updates parts of
the model at different times gives the same average as a plain step. Buffers (BatchNorm's statistics) are averaged
once a step. An average starts as a copy of the weights at its first round, so it includes weights that were loaded
after `apply`.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Range, Technique

_REFUSED = {"averages_weights": "both evaluate with averaged weights; leave one of them out"}


@dataclass(frozen=True)
class EMA(Technique, refuses=_REFUSED, averages_weights=True):
    """Evaluates an exponential moving average of the weights; training itself is not changed.

    With Asynchronous, the average is updated at sync points only, and keeps decay^n after n steps.

    Args:
        decay: share of the average kept at each step, from 0 to below 1; 0: the weights themselves.
        every: steps between rounds, at least 1; a round keeps decay^every, so `decay` is always per step.
        warmup: keep at most (1 + n) / (10 + n) at round n, so that the first weights are forgotten soon.

    Saves: steps: an averaged model is as accurate as one trained longer at a lower rate.
    Costs: a copy of the weights, and a pass over them each round.
    Maths: average = decay * average + (1 - decay) * w.
    Ref: Polyak and Juditsky 1992; Morales-Brotons et al. 2024 (arXiv 2411.18704).
    """

    decay: Annotated[float, Range(at_least=0, below=1)] = 0.999
    every: Annotated[int, Range(at_least=1)] = 1
    warmup: bool = True

    def apply(self, job: Job) -> None:
        _Average(job, self)

    def kept(self, updates: int, steps: float) -> float:
        """The share of the average that a round of `steps` keeps after so many updates."""
        n = updates // self.every
        most: float = ((1 + n) / (10 + n)) ** (steps / self.every) if self.warmup else 1.0
        return min(float(self.decay**steps), most)


class _Average:
    """The averaged tensors by name, and how many updates each has seen."""

    def __init__(self, job: Job, ema: EMA) -> None:
        self.job, self.ema = job, ema
        self.params: dict[str, Tensor] = {n: p for n, p in job.model.named_parameters() if p.requires_grad}
        self.names = {p: n for n, p in self.params.items()}
        self.averages: dict[str, Tensor] = {}
        self.updates: dict[str, int] = {}
        self.frozen: list[tuple[str, Tensor]] = []  # before this step, or of another optimizer: no update tells of them
        job.after_update(lambda params: self.advance((self.names[p], p) for p in params if p in self.names))
        job.before_step(self.note_frozen)
        job.after_step(lambda: self.advance([*self.frozen, *self.buffers().items()]))
        job.at_sync_point(lambda steps: self.advance({**self.params, **self.buffers()}.items(), steps))
        job.keep("ema", self)
        job.around_evaluation(self.stepped_in)

    def note_frozen(self) -> None:
        own = {p for group in self.job.optimizer.param_groups for p in group["params"]}
        frozen = (p for p in self.names if p not in own or (p.grad is None and not p.requires_grad))
        self.frozen = [(self.names[p], p) for p in frozen]

    def buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in self.job.model.named_buffers() if b.is_floating_point()}

    @torch.no_grad()
    def advance(self, named: Iterable[tuple[str, Tensor]], steps: float = 0.0) -> None:
        """Counts an update of each of these tensors, or `steps` at a sync point, and averages those that are due."""
        if not steps and self.job.step_comm is not self.job.comm:
            return  # until the next sync point ranks have different weights
        due: dict[int, list[tuple[Tensor, Tensor]]] = {}  # averages and their weights, by the updates so far
        for name, x in named:
            self.updates[name] = n = self.updates.get(name, 0) + (round(steps) or 1)
            if steps or n % self.ema.every == 0:
                if name not in self.averages:
                    self.averages[name] = x.detach().clone()
                due.setdefault(n, []).append((self.averages[name], x.detach()))
        for n, pairs in due.items():
            averages, weights = (list(tensors) for tensors in zip(*pairs, strict=True))
            torch._foreach_lerp_(averages, weights, 1 - self.ema.kept(n, steps or self.ema.every))

    @contextmanager
    def stepped_in(self) -> Iterator[None]:
        """Swaps the averages into the model; no values are copied."""
        tensors = {**self.params, **self.buffers()}
        with ExitStack() as stack:
            for name, average in self.averages.items():
                stack.callback(setattr, tensors[name], "data", tensors[name].data)
                tensors[name].data = average
            yield

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.averages), "updates": dict(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        tensors = {**self.params, **self.buffers()}
        if unknown := set(state["averages"]) - set(tensors):
            raise InputError(f"the checkpoint averages {sorted(unknown)[0]}, which this model does not have")
        self.averages = {n: torch.empty_like(tensors[n].detach()).copy_(x) for n, x in state["averages"].items()}
        self.updates = dict(state["updates"])
