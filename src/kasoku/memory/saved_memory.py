"""The technique: it inspects the network once, plans under a memory budget, and puts the plan in place."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.core.backward_updates import BackwardUpdates
from kasoku.memory.inspection import BoundToModel, RunningForward, autocast_type, install, reads_values
from kasoku.memory.large_linear import install_linears
from kasoku.memory.network import InspectedNetwork, optimizer_bytes
from kasoku.memory.ops import Numerics
from kasoku.memory.solver import MemoryPlan

BUDGET_SHARE = 0.98  # that is planned for: the smallest ratio of predicted to measured bytes was 0.983
_REFUSED = {"captures_graph": "a graph keeps the memory of its whole step; leave Graphs out where memory is short"}
_UNITS = {None: 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class SavedMemory(Technique, stage=Stage.MEMORY, refuses=_REFUSED, saves_memory=True):
    """Keeps less between forward and backward, so that a larger batch fits in the same memory.

    In the first training forward it records the network on two images of the batch, adds up the bytes that backward
    needs, and chooses for each run of layers which values are kept and which are recomputed: the least time under the
    budget. Max-pools keep 2 bits for each output (8 unless windows are 2x2), ReLU and BatchNorm together one tensor,
    cheap layers nothing; if that is not enough, the widest layers run in parts of the batch, whole blocks run twice, or
    a BatchNorm writes its gradient over its input.

    Args:
        factor: plan for a batch this many times as large as plain PyTorch's in the same memory, at least 1; 1
            recomputes nothing. 0 stands for the budget if there is one, else for 2.
        budget: bytes that training may take on the device, such as "8GiB". The plan is for 98 % of them, since a step
            may take a little more than predicted. Not included: the interpreter, and other techniques' copies (EMA's
            averages).
        lossless: only remedies that change no bit of any gradient.
        in_backward: update each parameter as its gradient arrives, or its mean over ranks (Overlap), and free it. All
            are kept if a technique needs them at once (Clip, LossScale), or AllReduce averages them; a line says so.
        show: print the plan.

    Saves: memory: the values kept for backward, to half or less, and the gradients.
    Costs: the time of recomputation, which the plan predicts. On several ranks no bucket waits for the next forward,
        and a large Linear's mean gradient is equal on all ranks on equal hardware only.
    Maths: the same gradients; bit for bit if lossless, else sums in another order.
    Ref: [003]; Chen et al. 2016 (arXiv 1604.06174); Jain et al. 2018 (Gist); Bulo et al. 2018 (arXiv 1712.02616); Xie
        et al. 2015 (arXiv 1511.05617).
    """

    factor: float = 0.0
    budget: str = ""
    lossless: bool = False
    in_backward: bool = True
    show: bool = True

    def __post_init__(self) -> None:
        if self.factor and self.budget:
            raise InputError(f'factor={self.factor:g} with budget="{self.budget}": one of them')
        if self.factor and self.factor < 1:
            raise InputError(f"factor={self.factor:g}: at least 1, times the batch of plain PyTorch")
        if self.budget and bytes_of(self.budget) < 1:
            raise InputError(f'budget="{self.budget}": at least 1 byte; leave it out for factor = 2')

    def apply(self, job: Job) -> None:
        """Replaces the forward of all layers that can be planned; the first training forward makes the plan."""
        running = install(job)
        if not running.names:
            wanted = "Conv2d, and BatchNorm2d, ReLU or MaxPool2d"
            raise InputError(f"SavedMemory: {type(job.model).__name__} has no layer that can be planned: {wanted}")
        planner = Planner(job, self, running)
        job.on_close(job.model.register_forward_pre_hook(planner.before_forward).remove)
        job.on_close(job.model.register_forward_hook(planner.after_forward).remove)


def bytes_of(text: str) -> float:
    """Bytes of "8GiB". Raises InputError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]I?B)?\s*", text.upper())
    if not match:
        raise InputError(f'budget="{text}": bytes such as "8GiB" or "900MB"')
    return float(match[1]) * _UNITS[match[2]]


class Planner(BoundToModel):
    """Makes a plan for each new kind of batch."""

    def __init__(self, job: Job, settings: SavedMemory, running: RunningForward) -> None:
        self.job, self.settings, self.running = job, settings, running
        self.updates = BackwardUpdates(job, "SavedMemory", enabled=settings.in_backward, show=settings.show)
        job.patch(job, "in_backward", self.updates)
        self.linears = install_linears(job, self.updates) if settings.in_backward and not settings.lossless else []
        self.network: InspectedNetwork | None = None  # the last inspection
        self.plan: MemoryPlan | None = None  # from that inspection
        self._key: Any = None

    def before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if model is not self.job.model or not model.training or not torch.is_grad_enabled():
            return  # a deep copy, or an evaluation
        self.updates.before_forward()
        self.running.x, self.running.within = None, []
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise InputError("SavedMemory: the model takes one tensor of images, no more")
        batch, key = len(args[0]), self._key_of(args[0])
        if self._key is not None and key == self._key[1] and batch <= self._key[0]:
            return
        with torch.compiler.set_stance("force_eager"):  # a block that is met in an inspection would never be compiled
            self._make_plan(args[0])
        self._key = batch, key

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], out: object) -> None:
        """Raises InputError if the output of a layer within a segment is still held by other code."""
        if model is self.job.model and any(within() is not None for within in self.running.within):
            raise self.running.read_elsewhere()

    def _key_of(self, x: Tensor) -> tuple[Any, ...]:
        """The inputs of a plan besides the size of the batch, for which a larger batch's plan will do."""
        modes = tuple(layer.training for layer in self.running.names if isinstance(layer, nn.BatchNorm2d))
        learns = tuple(p.requires_grad for p in self.job.model.parameters())
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        images = (x.shape[1:], x.dtype, x.device, x.requires_grad, channels_last, autocast_type(x))
        hooked = tuple(map(reads_values, self.job.model.modules()))
        linears = tuple(linear.usable for linear in self.linears)
        steps = (self.job.needs_whole_gradients, self.job.accumulate, self.updates.active(), linears)
        return images, modes, learns, hooked, steps, optimizer_bytes(self.job)

    def _make_plan(self, x: Tensor) -> None:
        how, freed = Numerics(exact=self.settings.lossless), self.updates.active()
        network = InspectedNetwork(self.job, self.running, x, how=how, gradients_freed=freed, linears=self.linears)
        most, factor = self.settings.budget, self.settings.factor or 2.0
        plan = network.choose(bytes_of(most), share=BUDGET_SHARE) if most else network.choose_for(factor)
        network.put(plan)
        self.network, self.plan = network, plan
        if self.settings.show and self.job.comm.rank == 0:
            print(f"kasoku: {network.table(plan)}", flush=True)
