"""Profiles a few steps of a job: time and memory of each block, operators, FLOPs and bytes, idle time.

Note: separate steps. Each measurement disturbs its step, so each has steps of its own: one for FLOPs, bytes
and saved activations, undisturbed steps for the ledger, steps for block times, and traced ones.
"""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kasoku.core import InputError, Job
from kasoku.core.blocks import blocks, ignores_values
from kasoku.core.clock import Stopwatch
from kasoku.core.hardware import cores
from kasoku.data.loading.loader import endless
from kasoku.device.cpu_kernels import torch_kernels
from kasoku.report.bottleneck import fastest_s

BlockEvent = Callable[[str, str], None]  # (block, "forward" | "ended" | "backward")
_WARM, _WARM_ON_RANKS = 3, 16  # steps that compile, choose kernels and allocate memory; in which Overlap finds its plan
_ITERATION = "kasoku iteration"
_MAX_OPERATORS = 20
_MAX_TRACED = 5  # steps in the trace, which grows by megabytes a step
_GAP = 1 / 500  # of a step: shorter gaps between kernels are not shown
# parts of a step, by the event at its end
_PARTS = {"input over": "input", "backward over": "forward and backward", "updated": "update"}


@dataclass(frozen=True)
class Iteration:
    """One step, and how long the device was idle in it; on a CPU, its threads on average. Ref: [002] Fig. 12.

    `used`: [what, start, stop, share of the device used], in seconds from its begin: on CUDA the stretches in which
    kernels ran, on a CPU the parts of the step.
    """

    step_s: float
    idle_s: float
    used: list[tuple[str, float, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class StepProfile:
    """A profile, as profile.json has it."""

    # name, median forward_s and backward_s (0 if its output is not a tensor with a gradient), parameter_bytes, and
    # saved_bytes: what its forward saves for backward and no earlier block has saved
    blocks: list[dict[str, Any]]
    operators: list[dict[str, Any]]  # and kernels, over all traced steps: name, calls, own seconds host_s and device_s
    iterations: list[Iteration]
    bounds: dict[str, float]  # of `Profiler.bounds`


class Profiler:
    """Runs steps of a job, with all techniques applied, and measures them; the model is trained by these steps.

    `dtype`: the type in which its matrix products compute.
    """

    def __init__(self, job: Job, dtype: torch.dtype = torch.float32) -> None:
        first = next(job.model.parameters(), None)
        if first is None:
            raise InputError(f"profile: {type(job.model).__name__} has no parameters: a network that trains is wanted")
        self.job, self.dtype, self.device = job, dtype, first.device
        self.cuda, self.watch = first.device.type == "cuda", Stopwatch(job.clock, first.device)
        self.blocks = blocks(job.model) or [("model", job.model)]
        self.batches = endless(job.loader)

    def warm_up(self) -> None:
        """Runs steps before any is timed, counts the FLOPs and bytes of one, and measures the speed of the device."""
        self.plain(_WARM if self.job.comm.size == 1 else _WARM_ON_RANKS)
        self.saved, self.flops, self.moved = self._counted()
        self.flops_per_s, self.bytes_per_s = device_speed(self.device, self.dtype)

    def plain(self, steps: int) -> list[Iteration]:
        """Runs undisturbed steps; on a CPU, measures the idle time of each and of its parts."""
        iterations, threads = [], min(torch.get_num_threads(), cores())
        for _ in range(steps):
            events = self._events(lambda: (time.perf_counter(), time.process_time()), inside=False)
            used = []
            began_s, busy_s = events[0][2]
            for (_, _, (start, before_s)), (_, what, (stop, after_s)) in itertools.pairwise(events):
                share = min(1.0, (after_s - before_s) / max(1e-9, stop - start) / threads)
                used.append((_PARTS[what], round(start - began_s, 7), round(stop - began_s, 7), round(share, 3)))
            iterations.append(Iteration(stop - began_s, max(0.0, stop - began_s - (after_s - busy_s) / threads), used))
        return iterations

    def bounds(self, plain: list[Iteration]) -> dict[str, float]:
        """A lower bound on the time of a step, and how near the median of these comes to it. Measures nothing.

        least_s: the longer of the times of its FLOPs and of its bytes (each operator reads its inputs and writes its
        outputs once). Bytes that would take longer than the step did came from caches, and do not count.
        """
        step_s = statistics.median(iteration.step_s for iteration in plain)
        moving_s = self.moved / self.bytes_per_s
        least_s = max(self.flops / self.flops_per_s, moving_s if moving_s <= step_s else 0.0)
        return {
            "flops": float(self.flops),
            "bytes": float(self.moved),
            "flops_per_s": round(self.flops_per_s),
            "bytes_per_s": round(self.bytes_per_s),
            "least_s": round(least_s, 7),
            "step_s": round(step_s, 7),
            "reached": round(least_s / max(step_s, 1e-9), 4),
        }

    def look(self, steps: int, plain: list[Iteration], *, trace: Path | None = None) -> StepProfile:
        """Profiles `steps` steps of each kind beside the `plain` ones; `trace`: the file for a Chrome trace of some."""
        times_s = self._block_times(steps)
        operators, iterations = self._traced(min(steps, _MAX_TRACED), trace)
        blocks = [
            {
                "name": name,
                "forward_s": times_s[name, "forward"],
                "backward_s": times_s[name, "backward"],
                "parameter_bytes": sum(p.nbytes for p in block.parameters()),
                "saved_bytes": self.saved[name],
            }
            for name, block in self.blocks
        ]
        return StepProfile(blocks, operators, iterations if self.cuda else plain, self.bounds(plain))

    def step(self, event: BlockEvent = lambda name, what: None, *, inside: bool = False) -> None:
        """One update. Returns when the device is done.

        Calls event("", what) after each input and backward and after the update; `inside`: also as `block_hooks`.
        """
        job = self.job
        with ExitStack() as hooks:
            for handle in block_hooks(self.blocks, event) if inside else ():
                hooks.enter_context(handle)
            done = 0
            while done < job.accumulate:
                x_NCHW, y_N = next(self.batches)  # with it the number of parts may grow
                done += 1
                event("", "input over")
                loss = job.loss(job.model(x_NCHW), y_N)
                job.backward(loss)
                event("", "backward over")
            job.optimizer.step()
            job.optimizer.zero_grad()
            self.watch.synchronize()
            event("", "updated")

    def _events(self, read: Callable[[], Any], *, inside: bool = True) -> list[tuple[str, str, Any]]:
        """Runs one step; returns (block, what, read()) of its begin and of each of its events."""
        events = [("", "begin", read())]
        self.step(lambda name, what: events.append((name, what, read())), inside=inside)
        return events

    def _block_times(self, steps: int) -> dict[tuple[str, str], float]:
        """Median seconds by block and way; a backward lasts until the next block's begins."""
        times_s = {(name, way): [0.0] * steps for name, _ in self.blocks for way in ("forward", "backward")}
        for i in range(steps):
            events, entered = self._events(self.watch.moment), dict[str, Any]()
            for (name, what, begin), (_, _, following) in itertools.pairwise(events):
                if what == "forward":
                    entered[name] = begin
                elif what == "ended":
                    times_s[name, "forward"][i] += self.watch.seconds(entered[name], begin)
                elif what == "backward":
                    times_s[name, what][i] += self.watch.seconds(begin, following)
        return {key: statistics.median(seconds) for key, seconds in times_s.items()}

    def _counted(self) -> tuple[Counter[str], int, int]:
        """Bytes that each block saves for backward, FLOPs, and bytes read and written, of one uncompiled step."""
        saved: Counter[str] = Counter()
        seen = {p.untyped_storage().data_ptr() for p in self.job.model.parameters()}
        current, counting = "", True

        def event(name: str, what: str) -> None:
            nonlocal current, counting
            current = name if what == "forward" else ""
            counting = counting and what != "backward over"  # later micro-batches save the same again

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if counting and storage.data_ptr() not in seen:  # a storage counts once, for the block that saves it first
                seen.add(storage.data_ptr())
                saved[current] += storage.nbytes()
            return x.detach()  # x may be an output, which would then hold its own graph

        compiled = any(technique.compiles_model for technique in self.job.applied)
        moved, counter = _MovedBytes(), FlopCounterMode(display=False)
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
            torch_kernels(),
            counter,
            moved,
        ):
            self.step(event, inside=True)
        return saved, int(counter.get_total_flops()), moved.bytes

    def _traced(self, steps: int, file: Path | None) -> tuple[list[dict[str, Any]], list[Iteration]]:
        """Operators and, on a GPU, the idle time of each step, from torch's profiler."""
        with torch.profiler.profile(profile_memory=True) as record:
            for _ in range(steps):
                with torch.profiler.record_function(_ITERATION):
                    self.step()
        if file is not None:
            record.export_chrome_trace(str(file))
        averages: Any = record.key_averages()
        rows = ((row.key, row.count, row.self_cpu_time_total, row.self_device_time_total) for row in averages)
        operators = [
            {"name": name, "calls": calls, "host_s": host_us / 1e6, "device_s": device_us / 1e6}
            for name, calls, host_us, device_us in rows
            if name not in (_ITERATION, "[memory]")
        ]
        operators.sort(key=lambda operator: -operator["device_s" if self.cuda else "host_s"])
        events: Any = record.events() if self.cuda else ()
        host = torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
        kernels = [e.time_range for e in events if e.device_type != host and not e.is_user_annotation]
        busy = [(kernel.start, kernel.end) for kernel in kernels]
        traced = [e.time_range for e in events if e.device_type == host and e.name == _ITERATION]
        return operators[:_MAX_OPERATORS], [_iteration(busy, step.start, step.end) for step in traced]


def block_hooks(named_blocks: Iterable[tuple[str, nn.Module]], event: BlockEvent) -> list[Any]:
    """Calls event(block, what) when a block's forward begins and ends, and when its backward begins.

    A backward begins when the gradient of the block's output arrives. Blocks whose output is not a single tensor with a
    gradient have no backward event. Returns the handles of the hooks, except those on outputs.
    """

    def hook(name: str, block: nn.Module) -> tuple[Any, Any]:
        def after(module: nn.Module, _: object, output: object) -> None:
            event(name, "ended")
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: event(name, "backward"))  # type: ignore[no-untyped-call]

        pre = ignores_values(lambda module, _: event(name, "forward"))
        return block.register_forward_pre_hook(pre), block.register_forward_hook(ignores_values(after))

    return [handle for name, block in named_blocks for handle in hook(name, block)]


def device_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOPs per second in a short matrix product of this type, and bytes per second, read and written, in a copy."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 1024
    a, b = (torch.randn(n, n, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i in range(2))
    source = torch.zeros(2**28 if on_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops_per_s = 2 * n**3 / fastest_s(lambda: a @ b, device)
        bytes_per_s = 2 * source.nbytes / fastest_s(lambda: target.copy_(source), device)
    return flops_per_s, bytes_per_s


class _MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operators read and write; views and allocations count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False) and "empty" not in str(func):
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        return out


def _iteration(kernels: list[tuple[float, float]], start: float, stop: float) -> Iteration:
    """A step from start to stop (in microseconds) with the stretches that at least one kernel covers."""
    covered, until, used = 0.0, start, list[tuple[str, float, float, float]]()
    for begin, end in sorted(kernels):
        begin, end = max(begin, until), min(end, stop)
        if end <= begin:
            continue
        covered, until = covered + end - begin, end
        first, last = (begin - start) / 1e6, (end - start) / 1e6
        if used and first - used[-1][2] < _GAP * (stop - start) / 1e6:
            first = used.pop()[1]
        used.append(("kernels", round(first, 7), round(last, 7), 1.0))
    return Iteration((stop - start) / 1e6, (stop - start - covered) / 1e6, used)
