"""The losses, the images per second, the ledger, the logs and the progress bar of a training."""

import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kasoku.config.recipe import flat_settings
from kasoku.config.toml import table
from kasoku.core.files import json_text, write_text
from kasoku.core.hardware import Utilization, cores
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.environment import place
from kasoku.distributed.startup import startup_line
from kasoku.report import Bar, Ledger, LiveVerdict, Log, StepBottleneck, StepFacts, facts_of
from kasoku.report.html import read_run
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import Result, RunState

_READ_S, _SHOWN_S = 0.5, 0.2
_LEAST_END_S = 15.0  # for trackers, at the end of a short training


class Metrics:
    """The metrics of one training.

    Note: when losses are read. Reading one makes the host wait for the device. On a CPU that costs nothing, so each
    step is checked; on other devices they are collected and read twice a second, and always before anything is written.

    Note: many ranks. Rank 0 has the log and the bar; the utilization and the memory are of its device.
    """

    def __init__(self, state: RunState, *, started: float, resumed: bool, quiet: bool) -> None:
        self.state, self.job, self.started = state, state.job, started
        training, run, resume_step = state.training, state.run, state.job.steps if resumed else None
        comm = self.job.comm
        self.log = run_on_all_ranks(comm, lambda: Log(run.path if run else None, resume_step=resume_step))
        self.bar = Bar(training.total_steps, state.recipe.epochs, quiet=quiet or run is None, clock=comm.clock)
        self.log.mlperf("global_batch_size", state.recipe.batch)
        self.log.mlperf("seed", state.recipe.seed)
        self.log.mlperf("train_samples", len(training.dataset.train))
        self.log.mlperf("eval_samples", len(training.dataset.test))
        self.log.mlperf("run_start", event="INTERVAL_START")
        self.loss, self._shown_s = math.nan, -math.inf  # the last one that was read, and when one was last shown
        self._losses: list[Tensor] = []
        self._sum, self._parts, self.images_begun = torch.zeros(()), 0, 0  # of the step under way
        self.own_sum, self.own_count = 0.0, 0  # this rank's losses since the last sync point
        shared_by = place().ranks_on_its_cores if comm.size > 1 else 1
        self._usage = Utilization(training.device_setup.device, cores() / shared_by)
        setup, beside = training.start.shares(started)
        earlier = state.progress.spent_s
        self.ledger = Ledger(self.job.trace, started=started, setup=setup, beside=beside, earlier=earlier)
        self._began_s, self.live = self.job.clock.now(), LiveVerdict(self.ledger)
        self.outcome = "failed"  # until `finish`
        for tracker in self.job.trackers:
            tracker.active &= run is not None
            tracker.open(run.path if run else Path(), flat_settings(table(state.recipe)))

    def close(self) -> None:
        self.bar.close()
        self.log.close()
        for tracker in self.job.trackers:
            tracker.close(max(_LEAST_END_S, 0.01 * self.seconds()), self._write_page, self.outcome)

    def _write_page(self) -> None:
        """Writes report.html. Raises InputError if plotly or jinja2 is not installed."""
        from kasoku.report.html.page import page  # takes 0.4 s

        if run := self.state.run:
            write_text(run.path / "report.html", page([read_run(run.path, run.path.name)]), errors="replace")

    # ---- losses

    def add_micro_batch(self, loss: Tensor, images: int) -> bool:
        """Adds the loss of a micro-batch; returns whether that completes a step."""
        self.job.trace.phase("other")
        self._parts += 1
        self._sum = loss.detach() if self._parts == 1 else self._sum + loss.detach()
        self.images_begun += images
        if self._parts < self.job.accumulate:
            return False
        self._losses.append(self._sum / self._parts)
        self.state.progress.images += self.images_begun
        self._parts = self.images_begun = 0
        return True

    def end_step(self) -> None:
        """After `optimizer.step()`: the failure detector hears of it. The first one ends the start-up."""
        self.state.activity.step()
        start = self.state.training.start
        if "first step" in start.after:  # of this training, or of an earlier one of its job
            return
        start.note("run folder", start.spans[-1].stop, self._began_s)
        start.note("first step", self._began_s, self.job.clock.now())
        self.bar.say(startup_line(start.spans, self.started))
        tasks = {s.name: [round(s.start - self.started, 4), round(s.stop - self.started, 4)] for s in start.spans}
        self.log.mlperf("start", round(start.spans[-1].stop - self.started, 4), tasks=tasks, after=start.after)

    @property
    def is_read_due(self) -> bool:
        """Whether this rank should read its losses now."""
        waited_s = self.job.clock.now() - self._shown_s
        return bool(self._losses) and (self._losses[-1].device.type == "cpu" or waited_s > _READ_S)

    @property
    def diverged(self) -> bool:
        """Whether the last loss that was read is not finite."""
        return self._shown_s > 0 and not math.isfinite(self.loss)

    def read(self) -> None:
        """Reads the losses, averaged over the ranks. Collective. Raises DivergedError."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).float()
        self._losses.clear()
        with self.job.trace.span("wait", "losses") if self.job.comm.size > 1 else nullcontext():
            self.job.comm.all_reduce(losses, op="mean").wait()
            values = losses.tolist()
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise self.state.diverged(f"the loss is {value}", self.job.steps - len(values) + 1 + i)
        self.loss = values[-1]
        if self._show():
            lr = float(max(group["lr"] for group in self.job.optimizer.param_groups))
            rate = round(self.images_per_s(), 1)
            self.note({"loss": self.loss, "lr": lr, "images_per_s": rate, **self._usage.metrics(), **self._verdict()})

    def _verdict(self) -> dict[str, float]:
        """What holds up this rank's latest steps, if it was judged now; shown when it changes."""
        verdict, changed = self.live.judge(self._facts)
        if verdict and changed:
            self.bar.say(f"held up now: {verdict.cause}, {verdict.share:.0%} of a step of rank {self.job.comm.rank}")
        return {f"held_up/{verdict.cause.replace(' ', '-')}": verdict.share} if verdict else {}

    def _facts(self) -> StepFacts:
        images, threads = self.state.recipe.images_at_once(self.job.comm.size), self.state.training.device_setup.threads
        return facts_of(self.job, images, threads=threads, starved=self.ledger.starved())

    def read_own(self) -> None:
        """Reads this rank's losses alone, for the bar; all ranks take their mean at the next sync point."""
        if self._losses:
            losses = torch.stack(self._losses).float()
            self._losses.clear()
            self.own_sum += float(losses.sum())
            self.own_count += len(losses)
            self.loss = float(losses.mean())
            self._show()

    def read_mean(self, total: float, count: int) -> None:
        """Takes the mean of all ranks' losses since the last sync point, and writes it. Collective."""
        self.own_sum, self.own_count = 0.0, 0
        if count:
            self._losses, self._shown_s = [torch.tensor(total / count)], -math.inf
        self.read()

    def _show(self) -> bool:
        """Shows the loss, but not more often than the eye can follow; returns whether it did."""
        now_s = self.job.clock.now()
        if now_s - self._shown_s <= _SHOWN_S and not self.state.over:
            return False
        self._shown_s = now_s
        self.bar.step(self.job.steps, self.job.progress, loss=self.loss, images_per_s=self.images_per_s())
        return True

    # ---- time

    def images_per_s(self) -> float:
        """Images trained on per second of training."""
        return self.state.progress.images / max(1e-9, self.ledger.training_s())

    def seconds(self) -> float:
        """Seconds since the process started, with the earlier parts of a resumed training."""
        return round(sum(self.ledger.rows().values()), 3)

    def note(self, values: dict[str, float]) -> None:
        """Writes values of this step to the log."""
        values = {**values, "seconds": self.seconds()}
        self.log.metrics(self.job.steps, self.job.progress, values)
        for tracker in self.job.trackers:
            tracker.metrics(self.job.steps, {"epoch": self.job.progress, **values})

    def say_skipped_images(self) -> None:
        """Shows a line for each split with images that could not be decoded on some rank. Collective."""
        for split, loader in (("training", self.job.plain_loader), ("test", self.state.training.test)):
            if skipped := loader.skipped:
                for reasons in self.job.comm.gather_objects(skipped.reasons):
                    skipped.reasons.update(reasons)
                if skipped.reasons:
                    self.bar.say(f"skipped {len(skipped.reasons)} of the {split} images: {skipped.summary()}")

    def finish(self, stopped: str | None) -> Result:
        """Writes result.json, ledger.json, timeline.json and the techniques' documents. Collective."""
        job, progress, recipe = self.job, self.state.progress, self.state.recipe
        with self.state.busy("save"):
            facts = self._facts()
        ledger, timeline = self.ledger.document(job.comm, facts)
        result = Result(
            **{name: progress.scores.get(name) for name in ("top1", "top5", "loss")},
            best_top1=progress.best,
            target=recipe.evaluate.target,
            time_to_target_s=progress.reached_s,
            seconds_by={row: round(s, 3) for row, s in ledger["rows"].items()},
            images_per_s=round(self.images_per_s(), 1),
            epochs=round(job.progress, 4),
            stopped=stopped,
        )
        whole = {**asdict(result), "seconds": round(result.seconds, 3), "steps": job.steps}
        documents: dict[str, object] = {"result.json": whole, "ledger.json": ledger, "timeline.json": timeline}
        documents |= {name: build() for name, build in job.documents.items()}

        def write(run: RunFolder) -> None:
            for name, document in documents.items():
                run.write(name, json_text(document))

        self.state.write(write)
        for tracker in self.job.trackers:
            tracker.metrics(job.steps, {f"ledger/{row}": s for row, s in ledger["rows"].items()})
        for bottleneck in ledger["verdict"][:1]:
            self.bar.say(str(StepBottleneck(**bottleneck)))
        self.outcome = "stopped" if stopped else "finished"
        self.log.mlperf("run_stop", event="INTERVAL_END", status="aborted" if stopped else "success")
        return result
