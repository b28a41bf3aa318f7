"""The technique: a network looked at once, a plan under a budget, and the plan put in place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.memory import linear_in_backward as dense
from kasoku.memory.bound import Bound
from kasoku.memory.inspection import Hook, another_way, half_of, install
from kasoku.memory.linear_in_backward import LinearInBackward
from kasoku.memory.network import InspectedNetwork, look, state_bytes
from kasoku.memory.ops import Numerics
from kasoku.memory.solver import MemoryPlan
from kasoku.memory.step_in_backward import StepInBackward

SURE = 0.98  # of a budget: the least of what was foreseen over what was measured was 0.983
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class SavedMemory(Technique):
    """Keeps less between forward and backward, so that a larger batch fits in the same memory.

    In the first training forward it looks at the network on two images of the batch, adds up the bytes that backward
    takes, and chooses for every stretch of layers what is kept and what is computed again: the least time under the
    budget. Max-pools keep 2 bits for each output (8 unless windows are 2x2), ReLU and BatchNorm together one tensor,
    cheap layers nothing; where that does not suffice the widest layers run in parts of the batch, whole blocks run
    twice, or a BatchNorm leaves its gradient in the area of its input.

    Args:
        factor: times the batch that fits where plain PyTorch's fitted; 0: 2, unless a budget is given; 1: nothing is
            computed again, whatever that saves.
        budget: bytes that training may take on the device, such as "8GiB": the plan is made for 98 % of them, since a
            step may take a little more than is foreseen. The interpreter itself is not in it, nor are the copies of
            other techniques (EMA's averages).
        lossless: only remedies that leave every bit of every gradient as it is.
        bf16: what is held from forward to backward in more than 16 bits is held in bf16, in half the bytes: lossy.
            Outputs and statistics stay as they are, gradients do not (see Maths). All of it, whatever the budget; what
            the network's own Python holds meanwhile (features for later) stays as it is, and is not foreseen.
        in_backward: update each parameter as its gradient arrives, so that no gradients lie about. Where a technique
            needs all of them (Clip, LossScale), or ranks share them, they are kept as ever.
        show: print the plan.

    Saves: memory: what backward keeps, to half or less, and the gradients.
    Costs: the time of what is computed again, or rounded and loaded, which the plan tells.
    Maths: the same gradients; bit for bit if lossless, else sums in another order. With bf16 they are off by (norm of
        the difference over the norm, all weights together, on small random networks): less than 1e-2 where values are
        kept; less than 0.1 where layers run again, for a ReLU made of rounded values may take another side near 0;
        in parts of the batch no more. Of the one weight that is off most it is 1e-3 in the median. A BatchNorm loses
        most where the mean of what it reads is many times the spread; values below 1e-40 become 0.
    Ref: [003]; Chen et al. 2016 (arXiv 1604.06174); Jain et al. 2018 (Gist); Bulo et al. 2018 (arXiv 1712.02616).
    """

    stage: ClassVar[Stage] = Stage.MEMORY
    refuses: ClassVar[tuple[str, ...]] = ("compiles_model", "captures_graph", "replaces_batchnorm")
    saves_memory: ClassVar[bool] = True
    replaces_batchnorm: ClassVar[bool] = True

    factor: float = 0.0
    budget: str = ""
    lossless: bool = False
    bf16: bool = False
    in_backward: bool = True
    show: bool = True

    def __post_init__(self) -> None:
        if self.factor and self.budget:
            raise InputError(f'factor={self.factor:g} with budget="{self.budget}": one of them')
        if self.factor and self.factor < 1:
            raise InputError(f"factor={self.factor:g}: at least 1, times the batch of plain PyTorch")
        if self.lossless and self.bf16:
            raise InputError("lossless=True with bf16=True: one of them, since what is held in bf16 is rounded")
        if self.budget and bytes_of(self.budget) < 1:
            raise InputError(f'budget="{self.budget}": at least 1 byte; leave it out for factor = 2')

    def apply(self, job: Job) -> None:
        """Stands in for the layers it knows; the plan is made at the first training forward."""
        items = install(job)
        if not items:
            raise InputError(
                f"SavedMemory: {type(job.model).__name__} has no layer that can be planned: Conv2d, BatchNorm2d, ReLU, "
                "MaxPool2d without hooks, or blocks of them"
            )
        planner = Planner(job, self, items)
        job.undo(job.model.register_forward_pre_hook(planner.enter).remove)
        job.undo(job.model.register_forward_hook(planner.leave).remove)


def bytes_of(text: str) -> int:
    """Bytes of "8GiB". Raises InputError."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _UNITS:
        raise InputError(f'budget="{text}": bytes such as "8GiB" or "900MB"')
    try:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    except ValueError:
        raise InputError(f'budget="{text}": bytes such as "8GiB" or "900MB"') from None


class Planner(Bound):
    """Plans for the batches that come, again when what they are changes.

    Attributes:
        network: what was seen at the last look, None before it.
        chosen: the plan made of it.
    """

    def __init__(self, job: Job, settings: SavedMemory, items: list[Hook]) -> None:
        self.job, self.settings, self.items = job, settings, items
        self.in_step = StepInBackward(job, show=settings.show) if settings.in_backward else None
        self.straight: list[LinearInBackward] = []
        if self.in_step is not None and not settings.lossless:
            self.straight = dense.install(job, self.in_step)
        self.network: InspectedNetwork | None = None
        self.chosen: MemoryPlan | None = None
        self.key: Any = None
        self.busy = self.settled = False

    def enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a forward of the model."""
        if model is not self.job.model:
            return  # a deep copy
        for item in self.items:
            item.passed = 0
        if self.busy or not model.training or not torch.is_grad_enabled():
            return
        if self.in_step is not None:
            self.in_step.enter()
        for item in self.items:
            item.check_forward()
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise InputError("SavedMemory: the model takes one tensor of images, no more")
        key = self.key_of(args[0])
        same = self.key is not None and key[1:] == self.key[1:] and key[0] <= self.key[0]
        if same and not self.grown():
            return
        self.busy = True
        try:
            self.plan(args[0])
        finally:
            self.busy = False
        self.key = key

    def leave(self, model: nn.Module, args: tuple[Any, ...], out: object) -> None:
        """After a forward. Raises InputError where a segment has run and one of its layers was not called."""
        for item in self.items if model is self.job.model else ():
            if item.passed not in (0, item.length):
                raise another_way(item)
            item.passed = 0

    def key_of(self, x: Tensor) -> tuple[Any, ...]:
        """What a plan depends on, the batch first."""
        layers = [node.layer for item in self.items for node in item.graph.nodes if node.layer is not None]
        modes = tuple(layer.training for layer in layers if isinstance(layer, nn.BatchNorm2d))
        learns = tuple(p.requires_grad for p in self.job.model.parameters())
        last = x.is_contiguous(memory_format=torch.channels_last)
        images = (x.shape[1:], x.dtype, x.device, x.requires_grad, last, half_of(x))
        hooked = tuple(item.hooked for item in self.items)
        at_once = self.in_step is not None and self.in_step.active
        steps = (
            self.job.needs_all,
            self.job.accumulate,
            at_once,
            tuple(one.group is not None for one in self.straight),
        )
        return len(x), images, modes, learns, hooked, steps

    def grown(self) -> bool:
        """The first step is done, and the optimizer keeps more than was foreseen; asked once."""
        if self.settled or not self.job.steps or self.network is None:
            return False
        self.settled = True
        return state_bytes(self.job) > 1.01 * self.network.state

    def plan(self, x: Tensor) -> None:
        """Looks at the network, chooses, and puts the choices in place."""
        freed = self.in_step is not None and self.in_step.active
        how = Numerics(exact=self.settings.lossless, bf16=self.settings.bf16)
        network = look(self.job, self.items, x, how=how, freed=freed, straight=self.straight)
        if self.settings.budget:
            plan = network.choose(bytes_of(self.settings.budget), sure=SURE)
        else:
            plan = network.choose_for(self.settings.factor or 2.0)
        network.put(plan)
        network.check(x)
        self.network, self.chosen = network, plan
        if self.settings.show and self.job.comm.rank == 0:
            print(f"kasoku: {network.table(plan)}", flush=True)


def larger(job: Job, x: Tensor, factor: float = 2.0) -> str:
    """What a larger batch would cost: "batch 2x fits: +3 % time", in the memory that plain PyTorch takes for x.

    Args:
        job: untouched but for the forwards it looks at, which stand until it is closed: of a copy of the model.
        x: images of the batch as it is.
        factor: times that batch.

    Empty where nothing of the network can be planned.
    """
    items = install(job)
    if not items:
        return ""
    last = x.is_contiguous(memory_format=torch.channels_last)
    many = x.new_zeros((round(len(x) * factor), *x.shape[1:]))
    many = many.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    network = look(job, items, many, how=Numerics(), freed=not job.needs_all and job.comm.size == 1)
    try:
        plan = network.choose(network.plain_bytes(len(x)))
    except InputError:
        return f"batch {factor:g}x does not fit"
    return f"batch {factor:g}x fits: +{100 * network.longer(plan):.0f} % time"
