"""A network as the planner sees it: chains of units, and the bytes beside them."""

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
from kasoku.memory.inspection import Call, CallLog, Hook, chains, place_of, undisturbed, units, watch
from kasoku.memory.linear_in_backward import LinearInBackward
from kasoku.memory.memory_model import ImageLayout, MemoryNeed, work_of
from kasoku.memory.ops import Numerics
from kasoku.memory.segment import Segment
from kasoku.memory.solver import ChainSetting, MemoryPlan, OutsideBytes, SegmentChoice, best, choices, lowest

_LOOK = 2  # images


@dataclass(frozen=True)
class ChainUnit:
    """Items that are not cut, what plain PyTorch keeps of them, multiply-adds and precision.

    Attributes:
        plain: bytes kept for the batch.
        copies: bytes of copies of weights, whatever the batch.
        need: of the unit alone, with all that its backward reads kept as it is.
    """

    items: tuple[Hook, ...]
    plain: int
    copies: int
    work: float
    how: Numerics
    need: MemoryNeed

    @property
    def name(self) -> str:
        """Of its first and last item."""
        first, last = self.items[0].name, self.items[-1].name
        return first if first == last else f"{first} to {last}"


class InspectedNetwork:
    """What was seen, for one batch.

    Attributes:
        units: of all chains, in order.
        ways: the choices for stretches of them.
        starts: what enters each unit.
        around: the bytes beside them, with our gradients; `plain_around`: with those of plain PyTorch.
        outputs: tensors that the network gave.
        state: bytes that the optimizer keeps, or will.
        how: what holds for all units; precision is each unit's own.
    """

    def __init__(
        self, job: Job, items: Sequence[Hook], log: CallLog, images: Tensor, *, batch: int, how: Numerics
    ) -> None:
        self.job, self.items, self.how, self.batch = job, items, how, batch
        self.units: list[ChainUnit] = []
        self.ways: list[SegmentChoice] = []
        self.starts: list[ValueShape] = []
        self.outputs: list[Tensor] = []
        self.state = state_bytes(job)
        self.around = self.plain_around = OutsideBytes(0, 0, 0, 0, False, 0)
        found = [(chain, call) for chain, call in chains(log) if call.x.ndim == 4 and len(call.x) == len(images)]
        planned = {item for chain, _ in found for item in chain}
        for chain, call in found:
            given = place_of(call.x) == place_of(images)
            elsewhere = (given or log.is_held(call.x, planned), log.is_held(log.out_of(chain[-1]), planned))
            self._add(chain, call, log, given=given, elsewhere=elsewhere)

    def _add(self, chain: list[Hook], call: Call, log: CallLog, *, given: bool, elsewhere: tuple[bool, bool]) -> None:
        start, how = call.x, replace(self.how, half=call.half)
        scale = self.batch / len(start)
        shape = ValueShape((self.batch, *start.shape[1:]), start.dtype)
        last = any(_is_last(node.layer.weight) for i in chain for node in i.graph.nodes if node.op == "conv")
        layout = ImageLayout(last or _is_last(start), start.device.type)
        setting = ChainSetting(shape, start.requires_grad, how, layout, elsewhere)
        parts = units(chain)
        graphs = [_joined(part) for part in parts]
        offset = len(self.units)
        for way in choices(graphs, setting):
            takes = way.need.beside(given and way.first == 0, way.last == len(graphs) - 1)
            self.ways.append(replace(way, first=way.first + offset, last=way.last + offset, need=takes))
        for i, part in enumerate(parts):
            self.starts.append(shape)
            own = replace(
                setting, images=shape, image_gradient=setting.image_gradient or i > 0, how=replace(how, bf16=False)
            )
            full = next(choices([graphs[i]], own))
            shapes = full.program.graph.shapes(shape, how.half)
            work = sum(work_of(full.program, shapes, at) for at in range(len(full.program.graph.nodes)))
            plain = round(sum(log.inside.get(item, 0) for item in part) * scale)
            copies = sum(log.copies.get(item, 0) for item in part)
            needs = full.need.beside(given and i == 0, i == len(parts) - 1)
            self.units.append(ChainUnit(tuple(part), plain, copies, work, how, needs))
            shape = shapes[-1]

    def plain_bytes(self, batch: float) -> float:
        """The peak of plain PyTorch for another batch, in its backward."""
        around, scale = self.plain_around, batch / self.batch
        kept = around.head_kept * scale
        most = around.fixed + kept + around.copies + around.head_backward
        most += sum(unit.plain * scale + unit.copies for unit in self.units)
        behind = sum(unit.need.gradients for unit in self.units)
        for unit in self.units:
            kept += unit.plain * scale + unit.copies
            need = unit.need
            behind -= need.gradients if around.gradients_stay else behind
            held = need.kept + need.input + (0 if need.out_is_in else need.output)
            moves = (need.backward - held - need.gradients) * scale + need.gradients
            most = max(most, around.fixed + around.gradients + kept + moves + behind)
        return most

    def within(self, budget: float) -> MemoryPlan | None:
        """The plan of the least work within a budget, where there is one."""
        return best(len(self.units), self.ways, self.around, budget)

    def choose(self, budget: float, *, sure: float = 1.0) -> MemoryPlan:
        """The plan of the least work for a part of a budget. Raises InputError that names the smallest one possible."""
        plan = self.within(budget * sure)
        if plan is None:
            raise InputError(
                f"SavedMemory: {_mib(budget)} for a batch of {self.batch}: at least "
                f"{_mib(self.least / sure, up=True)} are needed: raise the budget, or lower the batch"
            )
        return plan

    def choose_for(self, factor: float) -> MemoryPlan:
        """The plan of the least work in what plain PyTorch takes for 1/factor of the batch; 1: in whatever it takes."""
        plan = self.within(self.plain_bytes(self.batch / factor) if factor > 1 else math.inf)
        if plan is None:
            low, high = 1.0, factor
            while high - low > 0.005:
                middle = (low + high) / 2
                low, high = (middle, high) if self.plain_bytes(self.batch / middle) >= self.least else (low, middle)
            most = math.floor(100 * low) / 100
            raise InputError(
                f"SavedMemory: factor={factor:g} for a batch of {self.batch}: at least {_mib(self.least, up=True)} are "
                f"needed, more than plain PyTorch takes for 1/{factor:g} of it: give factor={most:g}"
            )
        return plan

    @cached_property
    def least(self) -> int:
        """Bytes of the lowest peak there is."""
        return lowest(len(self.units), self.ways, self.around).peak

    def put(self, plan: MemoryPlan) -> None:
        """Puts a plan in place."""
        for item in self.items:
            item.plain()
        for choice in plan.choices:
            inside = [item for unit in self.units[choice.first : choice.last + 1] for item in unit.items]
            name = f"{inside[0].name} to {inside[-1].name}"
            inside[0].segment = Segment(
                choice.program, self.units[choice.first].how, choice.chunk, name, inside[0].module
            )
            inside[0].length = len(inside)
            for place, item in enumerate(inside[1:], 1):
                item.before, item.place = inside[0], place

    def check(self, x: Tensor) -> None:
        """Runs the network as planned, with NaN within segments, and compares. Raises InputError if outputs differ."""
        refused = InputError(
            f"SavedMemory: the forward of {type(self.job.model).__name__} reads what lies between two of its "
            "layers: put these layers into a block of their own"
        )
        for item in self.items:
            item.forced = True
        try:
            with undisturbed(self.job.model, x):
                outputs = _tensors(self.job.model.forward(x[:_LOOK].detach().requires_grad_(x.requires_grad)))
            nan = [item for item in self.items if item.passed and item.length > 1]
            left = any(item.made is not None and item.made() is not None for item in nan)  # somebody holds it
        except (RuntimeError, ValueError) as e:  # it has the shape of the segment's output
            raise refused from e
        finally:
            for item in self.items:
                item.forced, item.passed, item.whole = False, 0, None
        tolerance = 2e-2 if any(unit.how.half is not None for unit in self.units) else 1e-3
        near = len(outputs) == len(self.outputs) and all(
            torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
            for a, b in zip(outputs, self.outputs, strict=True)
        )
        if left or not near:
            raise refused

    def longer(self, plan: MemoryPlan) -> float:
        """The part of a step's time that a plan adds, as foreseen."""
        work = plan.work + sum(choice.need.rounding for choice in plan.choices)
        return work / (3 * sum(unit.work for unit in self.units) or 1)

    def table(self, plan: MemoryPlan) -> str:
        """What is kept, by segment, before and after; the peak and the time foreseen."""
        rows = [("layers", "plain", "kept", "remedy")]
        for choice in plan.choices:
            inside = self.units[choice.first : choice.last + 1]
            first, last = inside[0].items[0].name, inside[-1].items[-1].name
            kept = choice.need.kept + choice.need.input
            rows.append((f"{first} to {last}", _mib(sum(u.plain for u in inside)), _mib(kept), choice.remedy))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([a.ljust(widths[0]), b.rjust(widths[1]), c.rjust(widths[2]), d]) for a, b, c, d in rows]
        plain = sum(unit.plain for unit in self.units)
        kept = plan.kept - self.around.head_kept
        lossy = " in bf16 (lossy)" if self.how.bf16 else ""
        head = (
            f"SavedMemory, a batch of {self.batch}: layers keep {_mib(kept)}{lossy} instead of {_mib(plain)}; "
            f"peak foreseen {_mib(plan.peak)} instead of {_mib(self.plain_bytes(self.batch))}; "
            f"time +{100 * self.longer(plan):.1f} %"
        )
        return "\n".join([head, *lines])


def look(
    job: Job, items: Sequence[Hook], x: Tensor, *, how: Numerics, freed: bool, straight: Sequence[LinearInBackward] = ()
) -> InspectedNetwork:
    """Looks at the job's network on the first images of a batch.

    Args:
        job: whose model it is.
        items: what stands in for its layers.
        x: the batch.
        how: whether bits must stay, or may be held in bf16; precision is seen.
        freed: gradients are let go as they arrive.
        straight: layers whose weights may have no gradient of their own.

    Raises:
        InputError: where no two layers follow one another, or the network gives no tensor.
    """
    for item in items:
        item.plain()
    for one in straight:
        one.calls, one.inspected = 0, False
    images = x[:_LOOK].detach().requires_grad_(x.requires_grad)
    log, outputs = watch(job.model, items, images)
    try:
        network = InspectedNetwork(job, items, log, images, batch=len(x), how=how)
    finally:
        log.clear()
    network.outputs = _tensors(outputs)
    if not network.units:
        raise InputError(f"SavedMemory: no convolution of {type(job.model).__name__} can be planned: leave it out")
    if not network.outputs:
        raise InputError(
            f"SavedMemory: {type(job.model).__name__} gives {type(outputs).__name__}, in which no tensor is seen: "
            "let it give tensors, or a tuple, list or dict of them"
        )
    for one in straight:
        one.inspected = True
    network.around = _around(
        network, log, x, freed=freed, straight=[one.layer.weight for one in straight if one.active]
    )
    network.plain_around = _around(network, log, x, freed=False)
    return network


def _around(
    network: InspectedNetwork, log: CallLog, x: Tensor, *, freed: bool, straight: Sequence[Tensor] = ()
) -> OutsideBytes:
    job = network.job
    learning = [p for p in job.model.parameters() if p.requires_grad]
    inner = {p for unit in network.units for item in unit.items for node in item.graph.nodes for p in node.params}
    gone = set(straight)
    behind = [p.nbytes for p in learning if p not in inner and p not in gone]
    tensors: list[Tensor] = [*job.model.parameters(), *job.model.buffers()]
    fixed = sum(t.nbytes for t in tensors) + x.nbytes + network.state
    planned = {item for unit in network.units for item in unit.items}
    seen, copies = (sum(n for item, n in of.items() if item not in planned) for of in (log.inside, log.copies))
    after = round(seen * network.batch / min(_LOOK, network.batch))
    if job.accumulate > 1:
        fixed += sum(p.nbytes for p in learning)
    if job.accumulate > 1 or freed:
        return OutsideBytes(fixed, after, copies, 0, False, max(behind, default=0))
    return OutsideBytes(fixed, after, copies, sum(behind), True, sum(behind))


def state_bytes(job: Job) -> int:
    """What the optimizer's rule keeps for its parameters: as it is, or as it will be after the first step."""
    found = 0
    for group in job.optimizer.param_groups:
        copies = _copies(group)
        for p in group["params"]:
            state = [t.nbytes for t in job.optimizer.state.get(p, {}).values() if isinstance(t, Tensor)]
            found += sum(state) if state else copies * p.nbytes
    return found


def _copies(group: dict[str, Any]) -> int:
    """Tensors in the shape of a parameter that torch's rules and ours keep, by the settings that tell them apart."""
    if "betas" in group:  # Adam and its kin
        return 2 + bool(group.get("amsgrad"))
    if "etas" in group or "rho" in group:  # Rprop, Adadelta
        return 2
    average = "alpha" in group or "lr_decay" in group  # RMSprop and ASGD, Adagrad
    return average + bool(group.get("centered")) + bool(group.get("momentum"))


def _tensors(outputs: object) -> list[Tensor]:
    return [t.detach() for t in tree_leaves(outputs) if isinstance(t, Tensor)]


def _joined(items: Sequence[Hook]) -> LayerGraph:
    graph = LayerGraph(())
    for item in items:
        graph = graph.then(item.graph)
    return graph


def _is_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _mib(n: float, *, up: bool = False) -> str:
    digits = 1 if n >= 2**27 else 3
    unit = 2**20 / 10**digits
    return f"{(math.ceil(n / unit) if up else n / unit) / 10**digits:,.{digits}f} MiB"
