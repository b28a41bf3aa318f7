"""The ledger: every second from the start of the process to the end of the training belongs to one row.

Note: on a GPU. The host's time in the loop is divided among the rows as the device's time was (see phase_timer).
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kasoku.core import Comm, Trace
from kasoku.report.bottleneck import StepFacts, find_bottlenecks
from kasoku.report.phase_timer import APART, STEP, Steps

Document = Mapping[str, Any]
_STREAM = {"input": "input", "copy": "input", "transfer": "link"}  # transfers run beside the rank's own work
_TIMELINE_RANKS = 16
_COMPARED_STEPS = 200  # whose waits are compared between ranks


class Ledger:
    """The rows of one rank's training. Create it where the loop begins, with `Timed` applied.

    `started`: when the process started, on the trace's clock. `setup`: seconds of each task before the loop; the rest
    until now is the row "run folder"; None: all of that time is "other". `beside`: of start-up tasks that overlapped
    others, which no row counts; `document` adds those of the trace. `earlier`: the rows of the earlier parts of a
    resumed training.
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
        own |= {"waits": waits, "whole": _rounded(rows)}
        own["beside"] = _rounded(self.beside | self.trace.beside)
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


def documents_of(ranks: Sequence[Document], facts: StepFacts) -> tuple[Document, Document]:
    """The contents of ledger.json and timeline.json, of what `Ledger.of_rank` gave on each rank, in rank order."""
    rows = ranks[0]["whole"]
    # of each of the last steps the least wait of any rank, which is the transfer itself
    together = [*zip(*(reversed(rank["waits"]) for rank in ranks), strict=False)]
    transfer_s = statistics.fmean(map(min, together)) if together else None
    last = Counter(step.index(min(step)) for step in together)  # the rank that the others waited for
    last_in = [last[rank] / len(together) for rank in range(len(ranks))] if together else []
    means = [rank["mean_s"] for rank in ranks]
    causes = find_bottlenecks(means, facts, transfer_s=transfer_s, last_in=last_in)
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
