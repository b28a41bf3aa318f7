"""The ledger: every second from the start of the process to the end of the training belongs to one row.

Note: one state at a time. A rank is always in exactly one state: the phase of its loop, or the innermost span of its
trace that has a row. Only changes of state are recorded, so no second is counted twice and the rows add up to the whole
time. All time within an evaluation or a checkpoint belongs to that row.

Note: two clocks. On a CPU the host's clock is read. A GPU works later than the host launches, so at each change an
event is recorded on the device and read some steps later, when it has passed. The host's time in the loop is divided
among the rows as the device's time was.
"""

import itertools
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kasoku.core import Batch, Clock, Comm, Job, Span, Stage, Technique, Trace
from kasoku.report.bottleneck import StepBottleneck, StepFacts, find_bottlenecks

Document = Mapping[str, Any]
STEP = ("input", "copy", "transforms", "forward", "backward", "exposed", "update", "other")  # the rows of a step
APART = ("evaluate", "save")  # rows beside the steps
_ROW = {**{row: row for row in STEP}, "wait": "exposed"}  # the row of a phase or of a kind of span
_WARM = ("forward", "backward", "update")  # rows in which the first step compiles, chooses kernels, allocates memory
_MEDIAN_STEPS = 1000
_WARM_UP_STEPS = 32  # that the first step is compared with: computed for every line of metrics
_TIMELINE_STEPS, _TIMELINE_RANKS = 3, 16
_STREAM = {"input": "input", "copy": "input", "transfer": "link"}  # transfers run beside the rank's own work
_VERDICT_S = 10.0  # between two live verdicts
_COMPARED_STEPS = 200  # whose waits are compared between ranks


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
        steps = Steps(job.clock, next((p.device for p in job.model.parameters()), torch.device("cpu")))
        job.patch(job.trace, "follower", steps)
        model, phase = job.model, job.trace.phase

        def enter(module: nn.Module, row: str) -> None:
            if module is model and module.training and torch.is_grad_enabled():  # a deep copy has these hooks too
                phase(row)

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
        job.after_step(steps.end)
        job.after_step(lambda: phase("other"))
        job.around_loader(timed_input)


class _Mark(NamedTuple):
    """A change of state: from `moment` on (seconds, or an event on the device) time belongs to this row."""

    row: str
    moment: Any
    name: str = ""
    bytes: int = 0


class Steps:
    """The timed steps of one rank. Follows a trace: the trace calls it at each change of state."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self._row = "other"
        self._free: list[Any] = []  # events to reuse
        self._stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._device_s = 0.0  # the device's time at the end of the last step read
        self.begin()

    def begin(self) -> None:
        """Starts to count steps anew."""
        self.count, self._since = 0, self.clock.now()  # count: of finished steps
        self._host_s: defaultdict[str, float] = defaultdict(float)
        self.loop_s: defaultdict[str, float] = defaultdict(float)  # of whole steps by row; by a GPU's own clock
        self._first: dict[str, float] = {}
        self.rows: deque[dict[str, float]] = deque(maxlen=_MEDIAN_STEPS)  # seconds of each later step
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


class Ledger:
    """The rows of one rank's training. Create it where the loop begins, with `Timed` applied.

    `started`: when the process started, on the trace's clock. `setup`: seconds of each task before the loop; the rest
    until now is the row "run folder"; None: all of that time is "other". `beside`: of start-up tasks that overlapped
    others, which no row counts; `document` adds those of the trace. `earlier`: the rows before it was resumed.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        started: float,
        setup: Mapping[str, float] | None = None,
        beside: Mapping[str, float] | None = None,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        self.trace, self.clock, self.started = trace, trace.clock, started
        self.steps = trace.follower if isinstance(trace.follower, Steps) else Steps(trace.clock, torch.device("cpu"))
        self.steps.begin()
        self.setup, self.beside, self.earlier = dict(setup or {}), dict(beside or {}), dict(earlier or {})
        if setup is not None:
            self.setup["run folder"] = self.clock.now() - started - sum(self.setup.values())
        self._delayed_s, self._began = _delay_s(), self.clock.now()

    def rows(self) -> dict[str, float]:
        """Seconds by row since the process started, earlier parts of a resumed training included."""
        rows = {**self.setup, **self._loop()}
        rows["other"] = self.clock.now() - self.started - sum(s for row, s in rows.items() if row != "other")
        first = [row for row in (self.earlier | rows) if row not in (*STEP, *APART, "compile")]
        names = [*first, "compile", *STEP[:-1], *APART, "other"]
        return {row: rows.get(row, 0.0) + self.earlier.get(row, 0.0) for row in names}

    def training_s(self) -> float:
        """Seconds of all steps, earlier parts included."""
        rows = self.rows()
        return sum(rows[row] for row in ("compile", *STEP))

    def mean_s(self) -> dict[str, float]:
        """The mean whole step by row, without "compile"; a median would hide an input that stalls. Empty before any."""
        steps, warm_s = self.steps, self.steps.warm_s()
        loop_s = {row: max(0.0, steps.loop_s[row] - warm_s.get(row, 0.0)) for row in STEP}
        return {row: s / steps.count for row, s in loop_s.items() if steps.count}

    def starved(self) -> float:
        """The share of the time since the loop began in which this thread was ready but had no core; 0: unknown."""
        return max(0.0, _delay_s() - self._delayed_s) / max(1e-9, self.clock.now() - self._began)

    def document(self, comm: Comm, facts: StepFacts) -> tuple[Document, Document]:
        """The contents of ledger.json and timeline.json, of all ranks. Collective: all ranks call it.

        `rows`: rank 0's, earlier parts of a resumed training included; `ranks`: the rows of each rank in this part.
        """
        return documents_of(comm.gather_objects(self.of_rank()), facts)

    def of_rank(self) -> dict[str, Any]:
        """This rank's part of the documents, for JSON; waits for a GPU."""
        self.steps.settle()
        waits = [step["exposed"] for step in self.steps.rows][-_COMPARED_STEPS:]
        rows = self.rows()
        this_part = {row: s - self.earlier.get(row, 0.0) for row, s in rows.items()}  # earlier parts are rank 0's
        own: dict[str, Any] = {"rows": _rounded(this_part), "step_s": self.steps.step_s(), "mean_s": self.mean_s()}
        own |= {"waits": waits, "whole": _rounded(rows), "beside": _rounded(self.beside | self.trace.beside)}
        return own | {"spans": self._spans() if self.trace.rank < _TIMELINE_RANKS else []}

    def _loop(self) -> dict[str, float]:
        """Seconds of this part since the loop began: compile, the rows of a step, evaluation, checkpoints."""
        steps, spent_s = self.steps, self.steps.host_s()
        loop = {row: spent_s.get(row, 0.0) for row in STEP}
        if steps.device.type == "cuda":  # divided as the device's time was
            device_s, host_s = sum(steps.loop_s.values()), sum(loop.values())
            loop = {row: host_s * steps.loop_s[row] / device_s if device_s else 0.0 for row in loop}
            loop["other"] += 0.0 if device_s else host_s
        warm = {row: min(s, loop[row]) for row, s in steps.warm_s().items()}
        less = {row: s - warm.get(row, 0.0) for row, s in loop.items()}
        return {"compile": sum(warm.values()), **less, **{row: spent_s.get(row, 0.0) for row in APART}}

    def _spans(self) -> list[dict[str, Any]]:
        """The last steps, in seconds from the first of them, since the clocks of ranks may differ."""
        latest = self.steps.spans()
        begin = min((part.start for part in latest), default=0.0)
        end = max((part.stop for part in latest), default=0.0)
        latest += [s for s in self.trace.spans if s.kind == "transfer" and s.stop > begin and s.start < end]
        spans = []
        for span in latest:
            start, stop = (round(min(max(begin, at), end) - begin, 7) for at in (span.start, span.stop))
            within = replace(span, start=start, stop=stop, rank=self.trace.rank)
            spans.append({**asdict(within), "stream": _STREAM.get(span.kind, "compute")})
        return spans


class LiveVerdict:
    """The costliest bottleneck of one rank's latest steps, every ten seconds; not collective."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.judged_s = ledger, ledger.clock.now()
        self.loop_s, self.count = defaultdict[str, float](float), 0  # of the steps that were judged before
        self.latest = self.shown = ""  # causes

    def judge(self, facts: Callable[[], StepFacts]) -> tuple[StepBottleneck | None, bool]:
        """The verdict, None before it is due; and whether to show it: twice the same, and not the one shown last."""
        steps, now_s = self.ledger.steps, self.ledger.clock.now()
        sum_s = {row: steps.loop_s[row] - self.loop_s[row] for row in STEP}
        if now_s - self.judged_s < _VERDICT_S or steps.count == self.count or not any(sum_s.values()):
            return None, False
        mean_s = {row: s / (steps.count - self.count) for row, s in sum_s.items()}
        self.judged_s, self.loop_s, self.count = now_s, steps.loop_s.copy(), steps.count
        verdict = find_bottlenecks([mean_s], facts())[0]
        changed = verdict.cause == self.latest != self.shown
        self.latest, self.shown = verdict.cause, verdict.cause if changed else self.shown
        return verdict, changed


def documents_of(ranks: Sequence[Document], facts: StepFacts) -> tuple[Document, Document]:
    """The contents of ledger.json and timeline.json, of what `Ledger.of_rank` gave on each rank, in rank order."""
    rows = ranks[0]["whole"]
    # of each of the last steps the least wait of any rank, which is the transfer itself
    together = [*zip(*(reversed(rank["waits"]) for rank in ranks), strict=False)]
    transfer_s = statistics.fmean(map(min, together)) if together else None
    last = Counter(step.index(min(step)) for step in together)  # the rank that the others waited for
    last_in = [last[rank] / len(together) for rank in range(len(ranks))] if together else []
    causes = find_bottlenecks([rank["mean_s"] for rank in ranks], facts, transfer_s=transfer_s, last_in=last_in)
    ledger = {
        "wall_s": round(sum(rows.values()), 3),
        "rows": rows,
        "beside": ranks[0]["beside"],
        "step_s": {row: round(s, 7) for row, s in ranks[0]["step_s"].items()},
        "verdict": [asdict(cause) for cause in causes],
        "ranks": [rank["rows"] for rank in ranks],
        "last_in": [round(share, 4) for share in last_in],
        "facts": asdict(facts),
    }
    return ledger, {"spans": [span for rank in ranks for span in rank["spans"]]}


def _rounded(rows: Mapping[str, float]) -> dict[str, float]:
    return {row: round(s, 4) for row, s in rows.items()}


def _delay_s() -> float:
    """How long this thread has waited for a core; 0 unless the kernel is Linux, which counts it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
