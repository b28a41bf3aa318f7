"""A network as the solver sees it: chains of units, and the bytes outside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.memory.graph import LayerGraph, ValueShape
from kasoku.memory.inspection import (
    Call,
    CallLog,
    LayerProxy,
    chains_of,
    memory_of,
    record_forward,
    units_of,
    without_side_effects,
)
from kasoku.memory.linear_in_backward import LinearInBackward
from kasoku.memory.memory_model import ImageLayout, MemoryNeed, work_of
from kasoku.memory.ops import Numerics
from kasoku.memory.segment import Segment
from kasoku.memory.solver import (
    ChainSetting,
    MemoryPlan,
    OutsideBytes,
    SegmentChoice,
    lowest_peak,
    plan_within,
    segment_choices,
)

_INSPECTED_IMAGES = 2


@dataclass(frozen=True)
class ChainUnit:
    """Layers that the solver does not separate.

    Attributes:
        proxies: of the layers.
        plain: bytes that plain PyTorch keeps of them for the batch.
        copies: bytes of the copies of their weights (autocast's), which do not grow with the batch.
        work: multiply-adds of their forward.
        how: precision.
        need: of the unit alone, if backward reads all values as forward computed them.
    """

    proxies: tuple[LayerProxy, ...]
    plain: int
    copies: int
    work: float
    how: Numerics
    need: MemoryNeed


class InspectedNetwork:
    """The record of one forward, scaled to a batch.

    Attributes:
        units: of all chains, in order.
        choices: for each run of up to four units, the programs to choose from.
        outside: bytes outside the units; `plain_outside`: the same if gradients stay until the step.
        outputs: of the model.
        optimizer_bytes: that the optimizer keeps, or will keep after its first step.
        how: settings of all units; precision is each unit's own.
    """

    def __init__(
        self, job: Job, proxies: Sequence[LayerProxy], log: CallLog, images: Tensor, *, batch: int, how: Numerics
    ) -> None:
        self.job, self.proxies, self.how, self.batch = job, proxies, how, batch
        self.units: list[ChainUnit] = []
        self.choices: list[SegmentChoice] = []
        self.outputs: list[Tensor] = []
        self.optimizer_bytes = optimizer_bytes(job)
        self.outside = self.plain_outside = OutsideBytes(0, 0, 0, 0, False, 0)
        chains = [(chain, call) for chain, call in chains_of(log) if call.x.ndim == 4 and len(call.x) == len(images)]
        planned = {proxy for chain, _ in chains for proxy in chain}
        for chain, call in chains:
            reads_batch = memory_of(call.x) == memory_of(images)
            input_held = reads_batch or log.is_kept_outside(call.x, planned)
            output_held = log.is_kept_outside(log.output_of(chain[-1]), planned)
            self._add(chain, call, log, reads_batch=reads_batch, held_elsewhere=(input_held, output_held))

    def _add(
        self, chain: list[LayerProxy], call: Call, log: CallLog, *, reads_batch: bool, held_elsewhere: tuple[bool, bool]
    ) -> None:
        images, how = call.x, replace(self.how, half=call.half)
        scale = self.batch / len(images)
        shape = ValueShape((self.batch, *images.shape[1:]), images.dtype)
        weights = (node.layer.weight for proxy in chain for node in proxy.graph.nodes if node.op == "conv")
        layout = ImageLayout(any(_is_channels_last(x) for x in (images, *weights)), images.device.type)
        setting = ChainSetting(shape, images.requires_grad, how, layout, held_elsewhere)
        parts = units_of(chain)
        graphs = [_joined(part) for part in parts]
        offset, last = len(self.units), len(graphs) - 1
        for choice in segment_choices(graphs, setting):
            need = choice.need.in_chain(reads_batch=reads_batch and choice.first == 0, last=choice.last == last)
            self.choices.append(replace(choice, first=choice.first + offset, last=choice.last + offset, need=need))
        for i, part in enumerate(parts):
            input_gradient = setting.image_gradient or i > 0
            own = replace(setting, images=shape, image_gradient=input_gradient, how=replace(how, bf16=False))
            full = next(segment_choices([graphs[i]], own))
            shapes = full.program.graph.shapes(shape, how.half)
            work = sum(work_of(full.program, shapes, at) for at in range(len(full.program.graph.nodes)))
            plain = round(sum(log.kept_bytes.get(proxy, 0) for proxy in part) * scale)
            copies = sum(log.copy_bytes.get(proxy, 0) for proxy in part)
            need = full.need.in_chain(reads_batch=reads_batch and i == 0, last=i == last)
            self.units.append(ChainUnit(tuple(part), plain, copies, work, how, need))
            shape = shapes[-1]

    def plain_bytes(self, batch: float) -> float:
        """The peak of plain PyTorch for another batch, in its backward."""
        outside, scale = self.plain_outside, batch / self.batch
        kept = outside.head_kept * scale
        peak = outside.fixed + kept + outside.copies + outside.head_backward
        peak += sum(unit.plain * scale + unit.copies for unit in self.units)
        gradients = sum(unit.need.gradients for unit in self.units)
        for unit in self.units:
            kept += unit.plain * scale + unit.copies
            need = unit.need
            gradients -= need.gradients if outside.gradients_stay else gradients
            held = need.kept + need.input + (0 if need.output_in_kept else need.output)
            moves = (need.backward - held - need.gradients) * scale + need.gradients
            peak = max(peak, outside.fixed + outside.gradients + kept + moves + gradients)
        return peak

    def within(self, budget: float) -> MemoryPlan | None:
        """The plan of the least work within a budget; None if there is none."""
        return plan_within(len(self.units), self.choices, self.outside, budget)

    def choose(self, budget: float, *, share: float = 1.0) -> MemoryPlan:
        """The plan of the least work within a share of a budget. Raises InputError that names the least budget."""
        plan = self.within(budget * share)
        if plan is None:
            raise InputError(
                f"SavedMemory: {_mib(budget)} for a batch of {self.batch}: at least "
                f"{_mib(self.least / share, up=True)} are needed: raise the budget, or lower the batch"
            )
        return plan

    def choose_for(self, factor: float) -> MemoryPlan:
        """The plan of the least work in the memory of plain PyTorch for 1/factor of the batch; 1: in any memory."""
        plan = self.within(self.plain_bytes(self.batch / factor) if factor > 1 else math.inf)
        if plan is None:
            low, high = 1.0, factor
            while high - low > 0.005:
                middle = (low + high) / 2
                low, high = (middle, high) if self.plain_bytes(self.batch / middle) >= self.least else (low, middle)
            most = math.floor(100 * low) / 100
            raise InputError(
                f"SavedMemory: factor={factor:g} for a batch of {self.batch}: at least {_mib(self.least, up=True)} are "
                f"needed, more than plain PyTorch takes for 1/{factor:g} of it: set factor={most:g}"
            )
        return plan

    @cached_property
    def least(self) -> int:
        """Bytes of the lowest peak."""
        return lowest_peak(len(self.units), self.choices, self.outside).peak

    def put(self, plan: MemoryPlan) -> None:
        for proxy in self.proxies:
            proxy.reset()
        for choice in plan.choices:
            leader, *following = self._layers_of(choice)
            name = f"{leader.name} to {following[-1].name if following else leader.name}"
            how = self.units[choice.first].how
            leader.segment = Segment(choice.program, how, choice.chunk, name, leader.module)
            leader.length = 1 + len(following)
            for position, proxy in enumerate(following, 1):
                proxy.leader, proxy.position = leader, position

    def _layers_of(self, choice: SegmentChoice) -> list[LayerProxy]:
        return [proxy for unit in self.units[choice.first : choice.last + 1] for proxy in unit.proxies]

    def check(self, x: Tensor) -> None:
        """Runs the planned network with NaN within segments. Raises InputError if its outputs change."""
        refused = InputError(
            f"SavedMemory: the forward of {type(self.job.model).__name__} reads a tensor between two of its "
            "layers: put these layers into a block of their own"
        )
        for proxy in self.proxies:
            proxy.checking = True
        try:
            with without_side_effects(self.job.model, x):
                images = x[:_INSPECTED_IMAGES].detach().requires_grad_(x.requires_grad)
                outputs = _tensors(self.job.model.forward(images))
            leaders = [proxy for proxy in self.proxies if proxy.calls and proxy.length > 1]
            nan_is_held = any(p.output_ref is not None and p.output_ref() is not None for p in leaders)
        except (RuntimeError, ValueError) as e:  # the NaN has the shape of the segment's output
            raise refused from e
        finally:
            for proxy in self.proxies:
                proxy.checking, proxy.calls, proxy.real_output = False, 0, None
        tolerance = 2e-2 if any(unit.how.half is not None for unit in self.units) else 1e-3
        near = len(outputs) == len(self.outputs) and all(
            torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
            for a, b in zip(outputs, self.outputs, strict=True)
        )
        if nan_is_held or not near:
            raise refused

    def longer(self, plan: MemoryPlan) -> float:
        """The predicted time that a plan adds, as a fraction of a step."""
        work = plan.work + sum(choice.need.rounding for choice in plan.choices)
        return work / (3 * sum(unit.work for unit in self.units) or 1)

    def table(self, plan: MemoryPlan) -> str:
        """The kept bytes of each segment before and after, the predicted peak and the predicted time."""
        rows = [("layers", "plain", "kept", "remedy")]
        for choice in plan.choices:
            layers = self._layers_of(choice)
            plain = sum(unit.plain for unit in self.units[choice.first : choice.last + 1])
            kept = choice.need.kept + choice.need.input
            rows.append((f"{layers[0].name} to {layers[-1].name}", _mib(plain), _mib(kept), choice.remedy))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([a.ljust(widths[0]), b.rjust(widths[1]), c.rjust(widths[2]), d]) for a, b, c, d in rows]
        plain = sum(unit.plain for unit in self.units)
        kept = plan.kept - self.outside.head_kept
        lossy = " in bf16 (lossy)" if self.how.bf16 else ""
        head = (
            f"SavedMemory, a batch of {self.batch}: layers keep {_mib(kept)}{lossy} instead of {_mib(plain)}; "
            f"predicted peak {_mib(plan.peak)} instead of {_mib(self.plain_bytes(self.batch))}; "
            f"time +{100 * self.longer(plan):.1f} %"
        )
        return "\n".join([head, *lines])


def inspect_network(
    job: Job,
    proxies: Sequence[LayerProxy],
    x: Tensor,
    *,
    how: Numerics,
    gradients_freed: bool,
    linears: Sequence[LinearInBackward] = (),
) -> InspectedNetwork:
    """Records a forward of the job's network on the first images of a batch.

    Args:
        job: with the model.
        proxies: of its layers.
        x: the batch.
        how: whether recomputation is exact, and values may be held in bf16; precision is read from the forward.
        gradients_freed: gradients are freed as they arrive.
        linears: layers whose weights may have no gradient of their own.

    Raises:
        InputError: if no convolution can be planned, or the network returns no tensor.
    """
    for proxy in proxies:
        proxy.reset()
    for linear in linears:
        linear.calls, linear.inspected = 0, False
    images = x[:_INSPECTED_IMAGES].detach().requires_grad_(x.requires_grad)
    log, outputs = record_forward(job.model, proxies, images)
    try:
        network = InspectedNetwork(job, proxies, log, images, batch=len(x), how=how)
    finally:
        log.clear()
    network.outputs = _tensors(outputs)
    if not network.units:
        raise InputError(f"SavedMemory: no convolution of {type(job.model).__name__} can be planned: leave it out")
    if not network.outputs:
        raise InputError(
            f"SavedMemory: {type(job.model).__name__} returns {type(outputs).__name__}, without a known tensor: "
            "let it return tensors, or a tuple, list or dict of them"
        )
    for linear in linears:
        linear.inspected = True
    without_gradient = {linear.layer.weight for linear in linears if linear.active}
    network.outside = _outside_bytes(network, log, x, freed=gradients_freed, without_gradient=without_gradient)
    network.plain_outside = _outside_bytes(network, log, x, freed=False, without_gradient=set())
    return network


def _outside_bytes(
    network: InspectedNetwork, log: CallLog, x: Tensor, *, freed: bool, without_gradient: set[Tensor]
) -> OutsideBytes:
    job = network.job
    learning = [p for p in job.model.parameters() if p.requires_grad]
    planned = {proxy for unit in network.units for proxy in unit.proxies}
    inner = {p for proxy in planned for node in proxy.graph.nodes for p in node.params}
    gradients = [p.nbytes for p in learning if p not in inner and p not in without_gradient]
    tensors: list[Tensor] = [*job.model.parameters(), *job.model.buffers()]
    fixed = sum(t.nbytes for t in tensors) + x.nbytes + network.optimizer_bytes
    kept, copies = (
        sum(n for proxy, n in counts.items() if proxy not in planned) for counts in (log.kept_bytes, log.copy_bytes)
    )
    kept = round(kept * network.batch / min(_INSPECTED_IMAGES, network.batch))
    if job.accumulate > 1:
        fixed += sum(p.nbytes for p in learning)
    if job.accumulate > 1 or freed:
        return OutsideBytes(fixed, kept, copies, 0, False, max(gradients, default=0))
    return OutsideBytes(fixed, kept, copies, sum(gradients), True, sum(gradients))


def optimizer_bytes(job: Job) -> int:
    """Bytes that the optimizer keeps for its parameters, now or after its first step."""
    total = 0
    for group in job.optimizer.param_groups:
        tensors = _state_tensors(group)
        for p in group["params"]:
            state = [t.nbytes for t in job.optimizer.state.get(p, {}).values() if isinstance(t, Tensor)]
            total += sum(state) if state else tensors * p.nbytes
    return total


def _state_tensors(group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that torch's optimizers and ours keep for it, known by their settings."""
    if "betas" in group:  # Adam and its kin
        return 2 + bool(group.get("amsgrad"))
    if "etas" in group or "rho" in group:  # Rprop, Adadelta
        return 2
    average = "alpha" in group or "lr_decay" in group  # RMSprop and ASGD, Adagrad
    return average + bool(group.get("centered")) + bool(group.get("momentum"))


def _tensors(outputs: object) -> list[Tensor]:
    return [t.detach() for t in tree_leaves(outputs) if isinstance(t, Tensor)]


def _joined(proxies: Sequence[LayerProxy]) -> LayerGraph:
    graph = LayerGraph(())
    for proxy in proxies:
        graph = graph.then(proxy.graph)
    return graph


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _mib(n: float, *, up: bool = False) -> str:
    digits = 1 if n >= 2**27 else 3
    unit = 2**20 / 10**digits
    return f"{(math.ceil(n / unit) if up else n / unit) / 10**digits:,.{digits}f} MiB"
