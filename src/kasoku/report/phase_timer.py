"""What a rank does when: the phases of its loop and the spans of its trace, step by step.

Note: one state at a time. A rank always does exactly one thing: the phase its loop is in, or the innermost span of its
trace that has a row. Only changes are noted, so rows add up by themselves and no second counts twice. Evaluation and
checkpoints keep what happens within them.

Note: two clocks. On a CPU the host's clock tells. On a GPU the host only starts work, so an event is recorded on the
device at each change and read some steps later, when it has passed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from kasoku.core import Clock, Job, Stage, Technique
from kasoku.core.job import Batch
from kasoku.report.block_timer import follow_blocks

STEP = ("input", "copy", "forward", "backward", "exposed", "update", "other")  # the rows of a step
APART = ("evaluate", "save", "other members")  # the last one: of an ensemble whose members train in turns
_ROW = {**{row: row for row in STEP}, "wait": "exposed"}  # of a phase, or of a span of that kind
_COMPUTED = ("forward", "backward")  # where blocks are told apart
_WARM = ("forward", "backward", "update")  # where the first step compiles, chooses kernels, takes memory
_KEPT = 1000  # steps that medians are of
_EARLY = 32  # of them, for what the first step took beyond: asked for with every line of metrics
_SHOWN = 3  # steps in the timeline
_BLOCKS = 4  # one step of so many is looked at block by block, on several ranks


@dataclass(frozen=True)
class Timed(Technique):
    """Notes what each step spends its time with: input, copying, forward, backward, waiting for other ranks, update.

    Forward is the model's, in training; backward is what follows until `optimizer.step()`, the loss too. What is done
    between the end of a step and the request for the next batch is "other". `Ledger(job.trace)` gives the rows.

    Saves: the search for where the time goes.
    Costs: about ten readings of the clock a step; on CUDA as many events, which nobody waits for. On several ranks
        three more for each block, in one step of four: for what a late rank is slow at.
    """

    stage: ClassVar[Stage] = Stage.COMM  # and given last, so that what others do at the step lies within it

    def apply(self, job: Job) -> None:
        """Follows the job's trace, and tells it the phases of the loop."""
        first = next(job.model.parameters(), None)
        steps = Steps(job.clock, first.device if first is not None else torch.device("cpu"))
        job.patch(job.trace, "follower", steps)
        model, phase = job.model, job.trace.phase

        def passing(module: nn.Module, to: str) -> None:
            if module is model and module.training and torch.is_grad_enabled():  # a deep copy has these hooks too
                phase(to)

        def ended() -> None:
            steps.end()
            phase("other")

        def asked(batches: Iterable[Batch]) -> Iterator[Batch]:
            phase("input")
            for batch in batches:
                phase("other")
                yield batch
                phase("input")
            phase("other")

        job.undo(model.register_forward_pre_hook(lambda m, _: passing(m, "forward"), prepend=True).remove)
        job.undo(model.register_forward_hook(lambda m, *_: passing(m, "backward")).remove)
        if job.comm.size > 1:
            follow_blocks(job, steps.enter, lambda: steps.count % _BLOCKS == _BLOCKS - 1)
        job.before_step(lambda: phase("update"))
        job.after_step(ended)
        job.around_loader(asked)


class _Mark(NamedTuple):
    """From `moment` on (seconds, or an event on the device) it was this row's."""

    row: str
    moment: Any
    name: str = ""
    bytes: int = 0
    block: str = ""


class Stretch(NamedTuple):
    """A part of a step, for the timeline; seconds."""

    row: str
    name: str
    start: float
    stop: float
    bytes: int


class Steps:
    """What one rank does when: follows a trace.

    Attributes:
        loop_s: seconds of whole steps by row; on a GPU the device's.
        count: steps that have ended.
        first: seconds by row of the first step since `begin`.
        rows: the same of the latest steps after it.
        latest: the parts of the last few steps in which nothing else was done.
        block: of the model, that is under way where that is followed.
        blocks: seconds of forward and backward by block, without what was waited for within them; of each of the latest
            steps that were followed.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self.loop_s: defaultdict[str, float] = defaultdict(float)
        self.rows: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self.latest: deque[list[Stretch]] = deque(maxlen=_SHOWN)
        self.blocks: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self.block = ""
        self._row, self._since = "other", clock.now()
        self._pending: deque[list[_Mark]] = deque()
        self._free: list[Any] = []  # events to be used again
        self._stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._passed_s = 0.0  # on the device, in the steps so far
        self.begin()

    def begin(self) -> None:
        """Steps are counted from here on."""
        self._to(self._row)
        self._pending.clear()
        self._marks = [_Mark(self._row, self._moment())]
        self.rows.clear()
        self.latest.clear()
        self.blocks.clear()
        self.loop_s.clear()
        self.first: dict[str, float] = {}
        self.count = 0

    def __call__(self, doing: Sequence[str], name: str, bytes: int) -> None:
        """Takes a change of what is done."""
        row = _row_of(doing)
        if row == self._row and (row in APART or not (name or self._marks[-1].name)):
            return
        self._note(row, name, bytes)

    def enter(self, block: str) -> None:
        """What is done from here on belongs to a block of the model, or to none ("")."""
        self.block = block
        self._note(self._row)

    def end(self) -> None:
        """A step has ended."""
        self.block = ""
        self._to(self._row)
        last = _Mark(self._row, self._moment())
        self._pending.append([*self._marks, last])
        self._marks = [last]
        self.count += 1
        while self._pending and (self._stream is None or self._pending[0][-1].moment.query()):
            self._fold(self._pending.popleft())

    @property
    def on_gpu(self) -> bool:
        """Whether `loop_s` is of the device, not of the host."""
        return self._stream is not None

    def host_s(self) -> dict[str, float]:
        """Seconds of the host by row; they add up to the time since this was made."""
        self._to(self._row)
        return dict(self._total_s)

    def settle(self) -> None:
        """Reads what is left, for which it waits on a GPU."""
        if self._pending and self._stream is not None:
            self._pending[-1][-1].moment.synchronize()
        while self._pending:
            self._fold(self._pending.popleft())

    def step_s(self) -> dict[str, float]:
        """The median step by row, the first one left out where there are others; zeros before any."""
        rows = [*self.rows] or ([self.first] if self.first else [])
        return {row: statistics.median(one[row] for one in rows) if rows else 0.0 for row in STEP}

    def block_s(self) -> dict[str, float]:
        """The median of each block, over the steps that were followed; empty where none was."""
        names = self.blocks[-1] if self.blocks else {}
        return {name: statistics.median(one.get(name, 0.0) for one in self.blocks) for name in names}

    def warm_s(self) -> dict[str, float]:
        """What the first step took beyond the next ones' median, by row: compiling, choosing kernels, memory."""
        if not self.first or len(self.rows) < 2:
            return {}
        early = [*itertools.islice(self.rows, _EARLY)]
        return {row: max(0.0, self.first[row] - statistics.median(one[row] for one in early)) for row in _WARM}

    def _note(self, row: str, name: str = "", bytes: int = 0) -> None:
        self._to(row)
        block = self.block if row in _COMPUTED else ""
        self._marks.append(_Mark(row, self._moment(), name, bytes, block))

    def _to(self, row: str) -> None:
        now = self.clock.now()
        self._total_s[self._row] += now - self._since
        self._row, self._since = row, now

    def _moment(self) -> Any:
        """Now, on the device where it has a stream."""
        if self._stream is None:
            return self._since
        make: Any = torch.cuda.Event
        event = self._free.pop() if self._free else make(enable_timing=True)
        event.record(self._stream)
        return event

    def _fold(self, marks: list[_Mark]) -> None:
        """Adds a whole step up."""
        moments = self._seconds(marks)
        row_s = dict.fromkeys(STEP, 0.0)
        parts = [
            Stretch(mark.row, mark.name or mark.block or mark.row, start, stop, mark.bytes)
            for mark, (start, stop) in zip(marks[:-1], itertools.pairwise(moments), strict=True)
        ]
        for part in parts:
            if part.row in row_s:
                row_s[part.row] += part.stop - part.start
        for row, seconds in row_s.items():
            self.loop_s[row] += seconds
        self._note_blocks(marks, parts)
        if self.first:
            self.rows.append(row_s)
        else:
            self.first = row_s
        if not {"evaluate", "save"} & {part.row for part in parts}:
            self.latest.append([part for part in parts if part.row in row_s])

    def _note_blocks(self, marks: Sequence[_Mark], parts: Sequence[Stretch]) -> None:
        block_s: defaultdict[str, float] = defaultdict(float)
        for mark, part in zip(marks[:-1], parts, strict=True):
            if mark.block:
                block_s[mark.block] += part.stop - part.start
        if block_s:
            self.blocks.append(block_s)

    def _seconds(self, marks: list[_Mark]) -> list[float]:
        if self._stream is None:
            return [mark.moment for mark in marks]
        begin = marks[0].moment
        moments = [self._passed_s + begin.elapsed_time(mark.moment) / 1000 for mark in marks]
        self._passed_s = moments[-1]
        self._free += [mark.moment for mark in marks[:-1]]  # the last one begins the next step
        return moments


def _row_of(doing: Sequence[str]) -> str:
    found = ""
    for kind in reversed(doing):
        if kind in APART:
            return kind
        found = found or _ROW.get(kind, "")
    return found or "other"
