"""A network as the solver sees it: chains of units, and the bytes outside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kasoku.core import InputError, Job
from kasoku.core.backward_updates import LIMIT
from kasoku.core.job_state import GradientExchange
from kasoku.memory.graph import LayerGraph
from kasoku.memory.inspection import Call, RunningForward, chains_of, memory_of, record_forward
from kasoku.memory.large_linear import LinearInBackward
from kasoku.memory.memory_model import ChainSetting, work_of
from kasoku.memory.ops import Numerics
from kasoku.memory.segment import Segment
from kasoku.memory.solver import MemoryPlan, OutsideBytes, SegmentChoice, plan_within, segment_choices

_INSPECTED_IMAGES = 2


class ChainUnit(NamedTuple):
    """Layers that the solver does not separate."""

    calls: list[Call]
    plain: int  # bytes that plain PyTorch keeps of them for the batch
    copies: int  # bytes of the copies of their weights (autocast's), which do not grow with the batch
    work: float  # multiply-adds of their forward
    how: Numerics
    gradients: int  # bytes of the gradients of their weights
    moves: int  # peak of their backward, if nothing is recomputed, beside what they keep and these gradients


class InspectedNetwork:
    """The record of a forward of a job's network on the first images of a batch, scaled to the batch.

    `how`: whether recomputation is exact; precision is read from the forward. `gradients_freed`: whether gradients are
    freed as they arrive. `linears`: layers whose weights may have no gradient of their own. Raises InputError if no
    convolution can be planned, or the network returns no tensor.
    """

    def __init__(
        self,
        job: Job,
        running: RunningForward,
        x: Tensor,
        *,
        how: Numerics,
        gradients_freed: bool,
        linears: Sequence[LinearInBackward] = (),
    ) -> None:
        self.running, self.batch = running, len(x)
        for linear in linears:
            linear.calls = 0
        images = x[:_INSPECTED_IMAGES].detach().requires_grad_(x.requires_grad)
        log = record_forward(running, images)
        self.units, self.choices = list[ChainUnit](), list[SegmentChoice]()
        try:
            self._divide(log.calls, images, how)
        finally:
            log.clear()
        if not self.units:
            raise InputError(f"SavedMemory: no convolution of {type(job.model).__name__} can be planned: leave it out")
        planned = {call for unit in self.units for call in unit.calls}
        others = [log.others, *(call for call in log.calls if call not in planned)]
        kept, copies = sum(call.kept for call in others), sum(call.copies for call in others)
        kept = round(kept * len(x) / len(images))
        learning = [p for p in job.model.parameters() if p.requires_grad]
        fixed = sum(t.nbytes for t in (x, *job.model.parameters(), *job.model.buffers())) + optimizer_bytes(job)
        inner = {p for call in planned for p in call.node.params}
        updating = [linear for linear in linears if linear.calls == 2 and linear.usable]
        sizes = ((linear.layer.weight, linear.bytes_in_flight(linear.rows * len(x))) for linear in updating)
        factors = {p: n for p, n in sizes if n or job.comm.size == 1}
        in_buckets = job.comm.size > 1 and any(technique.overlaps_backward for technique in job.applied)
        outside = []
        for freed, without_gradient in ((gradients_freed, inner | factors.keys()), (False, inner)):
            gradients = [p.nbytes for p in learning if p not in without_gradient]
            copied = (job.accumulate > 1) + (in_buckets and not freed)  # all gradients, all the time
            own = fixed + copied * sum(p.nbytes for p in learning)
            sent = _bytes_in_flight(job, learning, factors) if freed else 0
            if copied or freed:
                outside.append(OutsideBytes(own, kept, sent, False, copies + max(gradients, default=0) + sent))
            else:
                outside.append(OutsideBytes(own, kept, sum(gradients), True, copies + sum(gradients)))
        self.outside, self.plain_outside = outside  # the latter: if gradients stay until the step

    def _divide(self, calls: Sequence[Call], images: Tensor, how: Numerics) -> None:
        """Divides a recorded forward into units; adds the programs to choose from for each run of up to four."""
        for chain in chains_of(calls):
            first = chain[0][0]
            x = first.inputs[0]
            if x.ndim != 4 or len(x) != len(images):
                continue
            tensors = [x, *(call.node.layer.weight for unit in chain for call in unit if call.op == "conv")]
            nhwc = any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in tensors)
            batch = torch.empty((self.batch, *x.shape[1:]), dtype=x.dtype, device="meta")
            precision, reads_batch = replace(how, half=first.half), memory_of(x) == memory_of(images)
            setting = ChainSetting(batch, x.requires_grad, precision, nhwc, x.device.type, reads_batch)
            graphs = [LayerGraph(()).then([call.node for call in unit]) for unit in chain]
            self.choices += segment_choices(graphs, setting, len(self.units))
            own = setting
            for unit, graph in zip(chain, graphs, strict=True):
                full = next(segment_choices([graph], own))
                shapes = full.program.graph.shapes(own.images, own.how.half)
                work = work_of(full.program.graph, shapes, range(len(graph.nodes)))
                plain = round(sum(call.kept for call in unit) * (self.batch / len(images)))
                copies = sum(call.copies for call in unit)
                moves = full.need.backward - full.need.kept - full.need.gradients
                self.units.append(ChainUnit(unit, plain, copies, work, setting.how, full.need.gradients, moves))
                own = replace(own, images=shapes[-1], image_gradient=True, reads_batch=False)

    def plain_bytes(self, batch: float) -> float:
        """The peak of plain PyTorch for another batch, in its backward."""
        outside, scale = self.plain_outside, batch / self.batch
        kept = outside.head_kept * scale
        peak = outside.fixed + kept + outside.head_backward
        peak += sum(unit.plain * scale + unit.copies for unit in self.units)
        gradients = sum(unit.gradients for unit in self.units)
        for unit in self.units:
            kept += unit.plain * scale + unit.copies
            gradients -= unit.gradients if outside.gradients_stay else gradients
            moves = unit.moves * scale + unit.gradients
            peak = max(peak, outside.fixed + outside.gradients + kept + moves + gradients)
        return peak

    def within(self, budget: float) -> MemoryPlan | None:
        """The plan of the least work within a budget; None if there is none."""
        return plan_within(self.choices, self.outside, budget)

    def choose(self, budget: float, *, share: float = 1.0) -> MemoryPlan:
        """The plan of the least work within a share of a budget. Raises InputError that names the least budget."""
        plan = self.within(budget * share)
        if plan is None:
            got, least = f"{_mib(budget)} for a batch of {self.batch}", _mib(self.least / share, up=True)
            raise InputError(f"SavedMemory: {got}: at least {least} are needed: raise the budget, or lower the batch")
        return plan

    def choose_for(self, factor: float) -> MemoryPlan:
        """The plan of the least work in the memory of plain PyTorch for 1/factor of the batch; 1: in any memory."""
        plan = self.within(self.plain_bytes(self.batch / factor) if factor > 1 else math.inf)
        if plan is None:
            smaller = (n / 100 for n in range(math.floor(100 * factor), 100, -1))
            most = next((f for f in smaller if self.plain_bytes(self.batch / f) >= self.least), 1)
            got = f"factor={factor:g} for a batch of {self.batch}: at least {_mib(self.least, up=True)} are needed"
            limit = f"more than plain PyTorch takes for 1/{factor:g} of it"
            raise InputError(f"SavedMemory: {got}, {limit}: set factor={most:g}")
        return plan

    @cached_property
    def least(self) -> float:
        """Bytes of the lowest peak, to 64 KiB."""
        low, least = 0.0, math.inf
        while least - low > 2**16:
            middle = (low + least) / 2
            if (plan := self.within(middle)) is None:
                low = middle
            else:
                least = plan.peak
        return least

    def put(self, plan: MemoryPlan) -> None:
        self.running.segments.clear()
        for choice in plan.choices:
            calls, how, name = self._calls_of(choice), self.units[choice.first].how, self._name_of(choice)
            segment = Segment(choice.program, how, choice.chunk, name, calls[0].layer)
            self.running.segments[segment.caller] = segment, calls

    def _calls_of(self, choice: SegmentChoice) -> list[Call]:
        return [call for unit in self.units[choice.first : choice.last + 1] for call in unit.calls]

    def _name_of(self, choice: SegmentChoice) -> str:
        layers = [self.running.names[call.layer] for call in self._calls_of(choice) if call.layer]
        return f"{layers[0]} to {layers[-1]}"

    def longer(self, plan: MemoryPlan) -> float:
        """The predicted time that a plan adds, as a fraction of a step."""
        return plan.work / (3 * sum(unit.work for unit in self.units) or 1)

    def table(self, plan: MemoryPlan) -> str:
        """The kept bytes of each segment before and after, the predicted peak and the predicted time."""
        rows = [("layers", "plain", "kept", "remedy")]
        for choice in plan.choices:
            plain = sum(unit.plain for unit in self.units[choice.first : choice.last + 1])
            rows.append((self._name_of(choice), _mib(plain), _mib(choice.need.kept), choice.remedy))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([a.ljust(widths[0]), b.rjust(widths[1]), c.rjust(widths[2]), d]) for a, b, c, d in rows]
        plain, kept = sum(unit.plain for unit in self.units), plan.kept - self.outside.head_kept
        head = f"SavedMemory, a batch of {self.batch}: layers keep {_mib(kept)} instead of {_mib(plain)}; "
        head += f"predicted peak {_mib(plan.peak)} instead of {_mib(self.plain_bytes(self.batch))}; "
        head += f"time +{100 * self.longer(plan):.1f} %"
        return "\n".join([head, *lines])


def _bytes_in_flight(job: Job, params: Sequence[Tensor], factors: Mapping[Tensor, int]) -> int:
    """Bytes of the gradients, or of their factors, that are averaged in backward at once, at most."""
    exchange: GradientExchange | None = job.in_backward.exchange if job.in_backward is not None else None
    if exchange is None:
        return 0
    buckets = [exchange.bucket_bytes(p) for p in params if p not in factors]
    total = sum(p.nbytes for p in params if p not in factors) + sum(factors.values())
    return min(total, max(LIMIT, *buckets, *factors.values()))


def optimizer_bytes(job: Job) -> int:
    """Bytes that the optimizer keeps for its parameters, now or after its first step, besides counts of steps."""
    total, states = 0, job.optimizer.state
    for group in job.optimizer.param_groups:
        two = any(k in group for k in ("betas", "etas", "rho"))  # Adam and its kin, Rprop, Adadelta
        one = any(k in group for k in ("alpha", "lr_decay"))  # RMSprop and ASGD, Adagrad
        tensors = 2 * two + one + sum(bool(group.get(k)) for k in ("amsgrad", "centered", "momentum"))
        for p in group["params"]:
            state = [t.nbytes for t in states.get(p, {}).values() if isinstance(t, Tensor) and t.ndim]
            total += sum(state) if state else tensors * p.nbytes
    return total


def _mib(n: float, *, up: bool = False) -> str:
    digits = 1 if n >= 2**27 else 3
    unit = 2**20 / 10**digits
    return f"{(math.ceil(n / unit) if up else n / unit) / 10**digits:,.{digits}f} MiB"
