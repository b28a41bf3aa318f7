"""The heavy form of the ledger: a few steps of a job looked at from close by, block by block, operator by operator.

Note: each look has steps of its own, since looking costs: the ledger's are free of all else; then blocks are timed,
memory is read at each block, one step is counted (FLOPs, bytes, what backward keeps), and some are traced.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kasoku.core import Batch, InputError, Job
from kasoku.core.blocks import blocks
from kasoku.core.hardware import cores, resident_bytes
from kasoku.core.hooks import ignores_values

WARM = 3  # steps that compile, choose kernels and take memory
_ITERATION = "kasoku iteration"
_OPERATORS = 20
_TRACED = 5  # steps at most in the trace: it grows by megabytes a step
_TRIES = 5  # of what the device can do; the best counts

Note = Callable[[str, str], None]  # (block, "forward" | "ended" | "backward")


@dataclass(frozen=True)
class BlockTime:
    """What one block takes in a step.

    Args:
        name: dotted, as in the model.
        forward_s: seconds, the median over steps.
        backward_s: the same of its backward; 0 where its output is no tensor with a gradient.
        parameter_bytes: of its parameters.
        saved_bytes: what its forward keeps for backward, without parameters and what a block before it keeps already.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Operator:
    """An operator or a kernel over all traced steps: seconds of its own, on the host and on the device."""

    name: str
    calls: int
    host_s: float
    device_s: float


@dataclass(frozen=True)
class Iteration:
    """One step, and for how long of it the device did nothing; on a CPU its threads on average. Ref: [002] Fig. 12."""

    step_s: float
    idle_s: float


@dataclass(frozen=True)
class StepProfile:
    """All of it. `memory`: (seconds from the start of a step, where, bytes in use); `bounds`: see `measure_bounds`."""

    blocks: list[BlockTime]
    operators: list[Operator]
    iterations: list[Iteration]
    memory: list[tuple[float, str, int]]
    bounds: dict[str, float]

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Profiler:
    """Takes steps of a job and looks at them; the model trains meanwhile.

    Args:
        job: with all its techniques applied.
        dtype: what its matrix products compute in.
    """

    def __init__(self, job: Job, dtype: torch.dtype = torch.float32) -> None:
        first = next(job.model.parameters(), None)
        if first is None:
            raise InputError(f"profile: {type(job.model).__name__} has no parameters: a network that trains is wanted")
        self.job, self.dtype, self.device = job, dtype, first.device
        self.cuda = first.device.type == "cuda"
        self.found = blocks(job.model) or [("model", job.model)]
        self.batches = _forever(job)

    def warm(self) -> None:
        """The steps that are not like the others."""
        for _ in range(WARM):
            self.step()

    def plain(self, steps: int) -> list[Iteration]:
        """So many steps without a look at them; on a CPU, how long it idled in each."""
        found = []
        threads = min(torch.get_num_threads(), cores())
        for _ in range(steps):
            begin_s, busy_s = time.perf_counter(), time.process_time()
            self.step()
            took_s = time.perf_counter() - begin_s
            found.append(Iteration(took_s, max(0.0, took_s - (time.process_time() - busy_s) / threads)))
        return found

    def look(self, steps: int, plain: list[Iteration], *, trace: Path | None = None) -> StepProfile:
        """Looks closely at so many steps of each kind; the Chrome trace of some goes to the file `trace`.

        `plain`: what `plain` gave.
        """
        timed = self._block_times(steps)
        memory = self._memory()
        saved, flops, moved = self._counted()
        operators, iterations = self._traced(min(steps, _TRACED), trace)
        sizes = {name: sum(p.nbytes for p in block.parameters()) for name, block in self.found}
        found = [BlockTime(name, *timed[name], sizes[name], saved.get(name, 0)) for name, _ in self.found]
        step_s = statistics.median(one.step_s for one in plain)
        bounds = measure_bounds(flops, moved, step_s, self.device, dtype=self.dtype)
        return StepProfile(found, operators, iterations if self.cuda else plain, memory, bounds)

    def step(self, after: Callable[[], None] = lambda: None) -> None:
        """One update; `after` is called after each backward. Returns when the device is done."""
        job = self.job
        for _ in range(job.accumulate):
            x_NCHW, y_N = next(self.batches)
            loss = job.loss(job.model(x_NCHW), y_N)
            job.backward(loss)
            after()
        job.optimizer.step()
        job.optimizer.zero_grad()
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _block_times(self, steps: int) -> dict[str, tuple[float, float]]:
        """Medians of forward and backward of each block; a backward lasts until the next block's begins."""
        every: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in self.found}
        for noted in (self._noted() for _ in range(steps)):
            forward_s, backward_s = (dict.fromkeys(every, 0.0) for _ in range(2))
            entered: dict[str, Any] = {}
            for (name, what, moment), (_, _, following) in itertools.pairwise([*noted, noted[-1]]):
                if what == "forward":
                    entered[name] = moment
                elif what == "ended":
                    forward_s[name] += self._between(entered[name], moment)
                elif what == "backward":
                    backward_s[name] += self._between(moment, following)
            for name, seen in every.items():
                seen.append((forward_s[name], backward_s[name]))
        return {
            name: (statistics.median(f for f, _ in seen), statistics.median(b for _, b in seen))
            for name, seen in every.items()
        }

    def _noted(self) -> list[tuple[str, str, Any]]:
        """The moments of one step: (block, what, when)."""
        noted: list[tuple[str, str, Any]] = []
        with _followed(self.found, lambda name, what: noted.append((name, what, self._moment()))):
            self.step(lambda: noted.append(("", "over", self._moment())))
        return noted

    def _memory(self) -> list[tuple[float, str, int]]:
        """Bytes in use at each block of one step: on a GPU those allocated, else the process's resident ones."""
        seen: list[tuple[float, str, int]] = []
        begin_s = time.perf_counter()

        def read(name: str, what: str) -> None:
            in_use = torch.cuda.memory_allocated(self.device) if self.cuda else resident_bytes()
            seen.append((round(time.perf_counter() - begin_s, 6), f"{name} {what}".strip(), in_use))

        read("", "begin")
        with _followed(self.found, read):
            self.step(lambda: read("", "backward over"))
        read("", "updated")
        return seen

    def _counted(self) -> tuple[dict[str, int], int, int]:
        """Of one step, not compiled: what each block keeps, FLOPs, and bytes read and written."""
        from torch.utils.flop_counter import FlopCounterMode

        keeping = _Keeping(self.job.model)
        moved = _Moved()
        with ExitStack() as stack:
            if any(technique.compiles_model for technique in self.job.applied):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_followed(self.found, keeping.note))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keeping.pack, lambda packed: packed))
            counter: Any = FlopCounterMode(display=False)
            stack.enter_context(counter)
            stack.enter_context(moved)
            self.step(keeping.stop)
        return keeping.bytes, int(counter.get_total_flops()), moved.bytes

    def _traced(self, steps: int, file: Path | None) -> tuple[list[Operator], list[Iteration]]:
        """Operators and, on a GPU, how long it idled in each step, by torch's own profiler."""
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if self.cuda else [])]
        with torch.profiler.profile(activities=activities) as seen:
            for _ in range(steps):
                with torch.profiler.record_function(_ITERATION):
                    self.step()
        if file is not None:
            seen.export_chrome_trace(str(file))
        rows: Any = seen.key_averages()
        operators = [
            Operator(row.key, row.count, row.self_cpu_time_total / 1e6, row.self_device_time_total / 1e6)
            for row in rows
            if row.key != _ITERATION
        ]
        operators.sort(key=lambda operator: -(operator.device_s if self.cuda else operator.host_s))
        return operators[:_OPERATORS], _gaps(seen.events()) if self.cuda else []

    def _moment(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) / 1000 if self.cuda else stop - start)


def measure_bounds(
    flops: int, moved: int, step_s: float, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """What a step asks for, what this device did in a short matrix product and a short copy, and how near it comes.

    Gives flops and bytes of a step (each operator reads its inputs and writes its outputs once, as without caches),
    flops_per_s and bytes_per_s of the device, least_s (the larger of both times; where moving them would take longer
    than the step did, caches served most, and only computing counts) and reached (least_s over step_s).
    """
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 1024
    a, b = (torch.randn(n, n, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i in range(2))
    source = torch.zeros(2**28 if on_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops_per_s = 2 * n**3 / _best_s(lambda: a @ b, device)
        bytes_per_s = 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)
    moving_s = moved / bytes_per_s
    least_s = max(flops / flops_per_s, moving_s if moving_s <= step_s else 0.0)
    return {
        "flops": float(flops),
        "bytes": float(moved),
        "flops_per_s": round(flops_per_s),
        "bytes_per_s": round(bytes_per_s),
        "least_s": round(least_s, 7),
        "step_s": round(step_s, 7),
        "reached": round(least_s / max(step_s, 1e-9), 4),
    }


def _best_s(f: Callable[[], object], device: torch.device) -> float:
    took_s = []
    for _ in range(1 + _TRIES):
        begin_s = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s.append(time.perf_counter() - begin_s)
    return min(took_s[1:])


@contextmanager
def _followed(found: list[tuple[str, nn.Module]], note: Note) -> Iterator[None]:
    """Tells of each block when its forward begins and has ended, and when its backward begins."""
    with ExitStack() as stack:
        for name, block in found:
            for handle in _hooks(name, block, note):
                stack.callback(handle.remove)
        yield


def _hooks(name: str, block: nn.Module, note: Note) -> list[Any]:
    @ignores_values
    def ended(module: nn.Module, given: Any, out: Any) -> None:
        note(name, "ended")
        if isinstance(out, Tensor) and out.requires_grad:
            begins: Any = out.register_hook
            begins(lambda _: note(name, "backward"))

    return [
        block.register_forward_pre_hook(ignores_values(lambda *_: note(name, "forward"))),
        block.register_forward_hook(ended),
    ]


class _Keeping:
    """Adds up what forward keeps for backward, each memory once, to the block that is under way; until `stop`."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._now, self._over = "", False

    def stop(self) -> None:
        """A backward is over: the parts of a step that follow keep the same again, some of it in the same memory."""
        self._over = True

    def note(self, name: str, what: str) -> None:
        """Takes which block is under way."""
        self._now = name if what == "forward" else ""

    def pack(self, x: Tensor) -> Tensor:
        """Counts what is kept, and keeps it."""
        storage = x.untyped_storage()
        if not self._over and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes[self._now] = self.bytes.get(self._now, 0) + storage.nbytes()
        return x.detach()  # x may be an output, which would then hold its own graph


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts all but views and memory that is only taken."""
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False) and "empty" not in str(func):
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        return out


def _gaps(events: Any) -> list[Iteration]:
    """How long no kernel ran in each iteration: from microseconds of the profiler's events."""
    autograd: Any = torch.autograd
    host = autograd.DeviceType.CPU
    kernels = [e for e in events if e.device_type != host and not e.is_user_annotation]
    spans = [(e.time_range.start, e.time_range.end) for e in kernels]
    whole = [e.time_range for e in events if e.device_type == host and e.name == _ITERATION]
    return [
        Iteration((one.end - one.start) / 1e6, (one.end - one.start - _covered(spans, one.start, one.end)) / 1e6)
        for one in whole
    ]


def _covered(spans: list[tuple[float, float]], start: float, stop: float) -> float:
    """How much of a stretch is covered by at least one of the spans."""
    covered, until = 0.0, start
    for begin, end in sorted(spans):
        covered += max(0.0, min(end, stop) - max(begin, until))
        until = max(until, min(end, stop))
    return covered


def _forever(job: Job) -> Iterator[Batch]:
    """Epoch after epoch. Raises InputError for a loader without a batch."""
    while True:
        empty = True
        for batch in job.loader:
            empty = False
            yield batch
        if empty:
            raise InputError("profile: the loader gives no batch: more images or a smaller batch are wanted")
