"""Times the phases of a rank's training loop and the spans of its trace, step by step.

Note: one state at a time. A rank is always in exactly one state: the phase of its loop, or the innermost span of its
trace that has a row. Only changes of state are recorded, so no second is counted twice and the rows add up to the whole
time. All time within an evaluation or a checkpoint belongs to that row.

Note: two clocks. On a CPU the host's clock is read. A GPU works later than the host launches, so at each change an
event is recorded on the device and read some steps later, when it has passed.
"""

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kasoku.core import Batch, Clock, Job, Span, Stage, Technique

STEP = ("input", "copy", "transforms", "forward", "backward", "exposed", "update", "other")  # the rows of a step
APART = ("evaluate", "save")  # rows beside the steps
_ROW = {**{row: row for row in STEP}, "wait": "exposed"}  # the row of a phase or of a kind of span
_WARM = ("forward", "backward", "update")  # rows in which the first step compiles, chooses kernels, allocates memory
_MEDIAN_STEPS = 1000
_WARM_UP_STEPS = 32  # that the first step is compared with: computed for every line of metrics
_TIMELINE_STEPS = 3


@dataclass(frozen=True)
class Timed(Technique, stage=Stage.COMM):  # applied last: the hooks of other techniques at the step lie within it
    """Times the parts of each step: input, copy, forward, backward, exposed communication, update.

    Forward is the model's forward in training. Backward lasts from its end to `optimizer.step()`, and includes the
    loss. The time from the end of a step to the request for the next batch is "other". See `Ledger`.

    Saves: the search for where the time goes.
    Costs: about ten readings of the clock a step; on CUDA as many events, without waiting for them.
    """

    def apply(self, job: Job) -> None:
        """Follows the job's trace and reports the phases of the loop to it."""
        first = next(job.model.parameters(), None)
        steps = Steps(job.clock, first.device if first is not None else torch.device("cpu"))
        job.patch(job.trace, "follower", steps)
        model, phase = job.model, job.trace.phase

        def enter(module: nn.Module, row: str) -> None:
            if module is model and module.training and torch.is_grad_enabled():  # a deep copy has these hooks too
                phase(row)

        def end_step() -> None:
            steps.end()
            phase("other")

        def timed_input(batches: Iterable[Batch]) -> Iterator[Batch]:
            phase("input")
            for batch in batches:
                phase("other")
                yield batch
                phase("input")
            phase("other")

        job.on_close(model.register_forward_pre_hook(lambda m, _: enter(m, "forward"), prepend=True).remove)
        job.on_close(model.register_forward_hook(lambda m, *_: enter(m, "backward")).remove)
        job.before_step(lambda: phase("update"))
        job.after_step(end_step)
        job.around_loader(timed_input)


class _Mark(NamedTuple):
    """A change of state: from `moment` on (seconds, or an event on the device) time belongs to this row."""

    row: str
    moment: Any
    name: str = ""
    bytes: int = 0


class Steps:
    """The timed steps of one rank. Follows a trace: the trace calls it at each change of state.

    Attributes:
        loop_s: seconds of whole steps by row; on a GPU by the device's clock.
        count: the number of finished steps.
        rows: seconds by row of each of the latest steps, without the first one since `begin`.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self._row = "other"
        self._free: list[Any] = []  # events to reuse
        self._stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._device_s = 0.0  # the device's time at the end of the last step read
        self.begin()

    def begin(self) -> None:
        """Starts to count steps anew."""
        self.count, self._since = 0, self.clock.now()
        self._host_s: defaultdict[str, float] = defaultdict(float)
        self.loop_s: defaultdict[str, float] = defaultdict(float)
        self._first: dict[str, float] = {}
        self.rows: deque[dict[str, float]] = deque(maxlen=_MEDIAN_STEPS)
        self._latest: deque[tuple[list[_Mark], list[float]]] = deque(maxlen=_TIMELINE_STEPS)
        self._marks = [_Mark(self._row, self._moment())]
        self._pending: deque[list[_Mark]] = deque()

    def __call__(self, doing: Sequence[str], name: str, bytes: int) -> None:
        """Records a change of state: `doing` has the loop's phase and the open spans, the innermost last."""
        inner_first = doing[::-1]
        apart = (kind for kind in inner_first if kind in APART)
        row = next(itertools.chain(apart, (_ROW[kind] for kind in inner_first if kind in _ROW)), "other")
        if row == self._row and (row in APART or not (name or self._marks[-1].name)):
            return
        self._switch(row)
        self._marks.append(_Mark(row, self._moment(), name, bytes))

    def end(self) -> None:
        self._switch(self._row)
        last = _Mark(self._row, self._moment())
        self._pending.append([*self._marks, last])
        self._marks = [last]
        self.count += 1
        while self._pending and (self._stream is None or self._pending[0][-1].moment.query()):
            self._fold(self._pending.popleft())

    def host_s(self) -> dict[str, float]:
        """Seconds by row on the host's clock; their sum is the time since `begin`."""
        self._switch(self._row)
        return dict(self._host_s)

    def settle(self) -> None:
        """Reads the remaining events; waits for the GPU."""
        if self._pending and self._stream is not None:
            self._pending[-1][-1].moment.synchronize()
        while self._pending:
            self._fold(self._pending.popleft())

    def step_s(self) -> dict[str, float]:
        """The median step by row, without the first step unless it is the only one; zeros before any."""
        rows = [*self.rows] or ([self._first] if self._first else [])
        return {row: statistics.median(s[row] for s in rows) if rows else 0.0 for row in STEP}

    def spans(self) -> list[Span]:
        """The parts of the last few steps without an evaluation or a checkpoint; their kinds are rows."""
        return [
            Span(mark.row, mark.name or mark.row, start, stop, bytes=mark.bytes)
            for marks, moments in self._latest
            for mark, (start, stop) in zip(marks, itertools.pairwise(moments), strict=True)
            if mark.row in STEP and stop > start
        ]

    def warm_s(self) -> dict[str, float]:
        """How much longer the first step took than the median of the next, by row: compiling, kernels, memory."""
        if not self._first or len(self.rows) < 2:
            return {}
        later = [*itertools.islice(self.rows, _WARM_UP_STEPS)]
        return {row: max(0.0, self._first[row] - statistics.median(step[row] for step in later)) for row in _WARM}

    def _switch(self, row: str) -> None:
        now = self.clock.now()
        self._host_s[self._row] += now - self._since
        self._row, self._since = row, now

    def _moment(self) -> Any:
        """The current moment: an event on a GPU, else seconds."""
        if self._stream is None:
            return self._since
        event: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _fold(self, marks: list[_Mark]) -> None:
        moments = [mark.moment for mark in marks]
        if self._stream is not None:
            self._free += moments[:-1]  # the last one begins the next step
            moments = [self._device_s + moments[0].elapsed_time(moment) / 1000 for moment in moments]
            self._device_s = moments[-1]
        row_s = dict.fromkeys(STEP, 0.0)
        for mark, (start, stop) in zip(marks[:-1], itertools.pairwise(moments), strict=True):
            if mark.row in row_s:
                row_s[mark.row] += stop - start
        for row, seconds in row_s.items():
            self.loop_s[row] += seconds
        if self._first:
            self.rows.append(row_s)
        else:
            self._first = row_s
        if not {*APART} & {mark.row for mark in marks[:-1]}:
            self._latest.append((marks[:-1], moments))
