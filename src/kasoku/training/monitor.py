"""What happens between the steps of a training: losses are read, accuracy is measured, checkpoints are written."""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job
from kasoku.core.files import save_weights
from kasoku.core.hardware import cores
from kasoku.data import Loader
from kasoku.distributed.consensus import iterate_on_all_ranks, run_on_all_ranks
from kasoku.distributed.counting_comm import Activity, activity_of
from kasoku.distributed.environment import place
from kasoku.distributed.startup import itemised
from kasoku.report import Bar, Ledger, Log, NoLog, StepBottleneck, StepFacts, facts_of
from kasoku.report.predictions import PredictionLog
from kasoku.training.checkpoint import Checkpoint
from kasoku.training.control import Rounds
from kasoku.training.evaluation import Scores, evaluate
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import DivergedError, Progress, Result, Training


class Watch:
    """Keeps an eye on one `fit`; a context manager.

    Note: when losses are read. Reading one makes the host wait for the device. On a CPU that costs nothing, so each
    step is checked; on others they are collected and read twice a second, and always before anything is written.

    Note: many ranks. Rank 0 has the run folder, the log and the bar; the others have None in the folder's place and
    watch in silence. All do what communicates after the same steps: losses are read in `Rounds`, which also say that a
    rank caught a signal and that it is time to save; scores are sums over all ranks; a write that fails, fails on all.
    """

    def __init__(
        self, training: Training, run: RunFolder | None, *, started: float, resume: bool = False, quiet: bool = False
    ) -> None:
        self.training, self.run, self.job, self.recipe = training, run, training.job, training.recipe
        self.progress = _resume(training, run) if resume else Progress()
        self.log = self._log(self.job.steps if resume else None)
        self.bar = Bar(training.total_steps, self.recipe.epochs, quiet=quiet or run is None)
        self._mlperf_start()
        self._now, self._started = self.job.clock.now, started
        self._rounds, self._timely = Rounds(self.job.comm), False
        self.stopped: str | None = None  # the signal that ended it, once all ranks know
        self._loss, self._read = math.nan, -math.inf
        self.activity: Activity = activity_of(self.job.comm)
        self.activity.hang_timeout_s = self.recipe.device.hang_timeout_s
        self._place = _place(self.job)
        self._losses: list[Tensor] = []
        self._sum, self._parts, self._images = torch.zeros(()), 0, 0  # of the step under way: losses, parts, images
        self._evaluated, self._first_step = -1, True
        self._judged: PredictionLog | None = None  # by the last evaluation
        judged = self.job.progress if self.progress.judged is None else self.progress.judged
        self._seen = self.progress.judged = judged  # an evaluation that failed is made up for
        self._good = f"step {self.job.steps}" if resume and self.job.steps else "none yet"
        self._reached = self.recipe.evaluate.stop and self.progress.reached_s is not None
        shares, beside = training.start.shares(started)
        earlier = self.progress.spent_s
        self.ledger = Ledger(self.job.trace, started=started, setup=shares, beside=beside, earlier=earlier)
        self._loop = self._saved = self._now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.close()
        self.log.close()

    @property
    def over(self) -> bool:
        """True when the last step or the target is reached."""
        return self._reached or self.job.steps >= self.training.total_steps

    @property
    def taken(self) -> int:
        """Images so far, those of a step that was begun too."""
        return self.progress.images + self._images

    @property
    def between_steps(self) -> bool:
        """True while no part of a step has been taken that is not in the weights yet."""
        return self._parts == 0

    def whole(self, loss: Tensor, images: int) -> bool:
        """Takes a micro-batch's loss; True when it completes a step."""
        self.job.trace.phase("other")
        self._parts += 1
        self._sum = loss.detach() if self._parts == 1 else self._sum + loss.detach()
        plain = self.job.plain_loader
        even = not getattr(plain, "shares", ())
        self._images += images * self.job.comm.size if even else plain.batch // self.job.accumulate
        if self._parts < self.job.accumulate:
            return False
        self._losses.append(self._sum / self._parts)
        self.progress.images += self._images
        self._parts = self._images = 0
        return True

    def after_step(self, caught: Sequence[str] = ()) -> bool:
        """Does what is due after an update; True when the training is over or stopped by a signal.

        `caught`: the signals this rank caught so far.
        """
        job, evaluation, save = self.job, self.recipe.evaluate, self.recipe.save
        now = self._now()
        self.activity.step()
        self._place = _place(job)
        if self._first_step:
            self._first_step = False
            self._tell_start(now)
        told = self._rounds.step(signal.Signals[caught[0]] if caught else 0, self._wants_to_save(now))
        alone = job.comm.size == 1 and (self._losses[-1].device.type == "cpu" or now - self._read > 0.5)
        if alone or self.over or (told and job.comm.size > 1):
            self._read_losses()
        crossed = self._crossed(evaluation.every)
        if self.over or (crossed and job.progress >= evaluation.start):
            self._evaluate()
        self.progress.judged = job.progress if crossed else self.progress.judged
        by_steps = save.every_steps and job.steps % save.every_steps == 0
        if told:
            again = self._timely and job.comm.size > 1  # said before the save it asked for in the round before
            self._timely = bool(told[1]) and not again
            self.stopped = signal.Signals(int(told[0])).name if told[0] else None
        if by_steps or (told and self._timely):
            self.save()
        return self.over or self.stopped is not None

    def save(self) -> None:
        """Writes a checkpoint. Raises DivergedError instead where the weights are not finite."""
        self._read_losses()
        with self._doing("save"):
            self.job.drain()
            weights = [p.detach().float().sum() for p in self.job.model.parameters() if p.is_floating_point()]
            if not torch.stack(weights).isfinite().all():
                raise DivergedError(self._diagnosis("the weights are not finite", self.job.steps))
            state = self._state()
            self._write(lambda run: run.save(self.job.steps, self.job.model, state, keep=self.recipe.save.keep))
            self._good = f"step {self.job.steps}"
        self._saved = self._now()

    def finish(self) -> Result:
        """Writes the last checkpoint, the weights as judged and result.json."""
        self._rounds.close()
        stopped = None if self.over else self.stopped
        if stopped is None and self._evaluated != self.job.steps:
            self._evaluate()
        self.save()
        self._tell_skipped()
        if self._judged:
            with self._doing("evaluate"):
                classes = self._judged.gather(self.training.dataset, self.job.comm)
            self._write(lambda run: run.write("classes.json", json.dumps(classes) + "\n"))
        with self._doing("save"):
            facts = self._facts()
        ledger, timeline = self.ledger.document(self.job.comm, facts)
        result = Result(
            top1=self.progress.scores.get("top1"),
            top5=self.progress.scores.get("top5"),
            loss=self.progress.scores.get("loss"),
            best_top1=self.progress.best,
            target=self.recipe.evaluate.target,
            time_to_target_s=self.progress.reached_s,
            seconds_by={row: round(s, 3) for row, s in ledger["rows"].items()},
            images_per_s=round(self._images_per_s(), 1),
            epochs=round(self.job.progress, 4),
            stopped=stopped,
        )
        whole = {**asdict(result), "seconds": round(result.seconds, 3), "steps": self.job.steps}
        documents: dict[str, object] = {"result.json": whole, "ledger.json": ledger, "timeline.json": timeline}
        documents |= {name: build() for name, build in self.job.documents.items()}

        def write(run: RunFolder) -> None:
            for name, document in documents.items():
                run.write(name, json.dumps(document, indent=1) + "\n")

        self._write(write)
        for cause in ledger["verdict"][:1]:
            self.bar.say(str(StepBottleneck(**cause)))
        self.log.mlperf("run_stop", event="INTERVAL_END", status="aborted" if stopped else "success")
        return result

    def _tell_skipped(self) -> None:
        """Names the images that could not be decoded on any rank."""
        loaders = {"training": self.job.plain_loader, "test": self.training.test}
        found = {part: one.skipped for part, one in loaders.items() if getattr(one, "skipped", None)}
        if not found:
            return
        for others in self.job.comm.gather_objects({part: skipped.reasons for part, skipped in found.items()}):
            for part, reasons in others.items():
                found[part].reasons.update(reasons)
        for part, skipped in found.items():
            if skipped.reasons:
                self.bar.say(f"skipped {len(skipped.reasons)} of the {part} images: {skipped.summary()}")

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights; of the loader: where it was after the last whole step."""
        job, comm = self.job.state_dict(), self.job.comm
        job["loader"] |= self._place
        if getattr(self.job.plain_loader, "skipped", None):
            skipped = comm.gather_objects(job["loader"].get("skipped", {}))
            job["loader"]["skipped"] = {index: why for theirs in skipped for index, why in theirs.items()}
        return {"job": job, "progress": {**asdict(self.progress), "spent_s": self.ledger.rows()}}

    def _log(self, resume_step: int | None) -> Log:
        run = self.run
        return run_on_all_ranks(self.job.comm, lambda: Log(run.path, resume_step=resume_step) if run else NoLog())

    def _write(self, f: Callable[[RunFolder], object]) -> None:
        """Has rank 0 write; all ranks go on when it is done, or fail with it."""
        with self.job.trace.span("save"):
            run_on_all_ranks(self.job.comm, lambda: f(self.run) if self.run else None)

    def _wants_to_save(self, now: float) -> bool:
        """Whether by rank 0's clock it is time."""
        every_s = self.recipe.save.every_s
        return bool(every_s and self.run and now - self._saved > every_s)

    def _tell_start(self, now: float) -> None:
        """Says how long it took to the end of the first step, and what took it."""
        start = self.training.start
        if any(task.name == "first step" for task in start.tasks):
            return  # fitted before
        start.note("run folder", start.spans[-1].stop, self._loop)
        start.note("first step", self._loop, now)
        self.bar.say(itemised(start.spans, self._started))
        tasks = {s.name: [round(s.start - self._started, 4), round(s.stop - self._started, 4)] for s in start.spans}
        self.log.mlperf("start", round(now - self._started, 4), tasks=tasks, after=start.after)

    def _mlperf_start(self) -> None:
        """The lines an MLPerf log begins with."""
        self.log.mlperf("global_batch_size", self.recipe.batch)
        self.log.mlperf("seed", self.recipe.seed)
        self.log.mlperf("train_samples", len(self.training.dataset.train))
        self.log.mlperf("eval_samples", len(self.training.dataset.test))
        self.log.mlperf("run_start", event="INTERVAL_START")

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Times what is no step, and says so to who watches for ranks that hang."""
        with self.job.trace.span(what), self.activity.busy(what):
            yield

    def _crossed(self, every: float) -> bool:
        """Whether the last update crossed a multiple of `every` epochs."""
        before, self._seen = self._seen, self.job.progress
        return int(self._seen / every + 1e-9) > int(before / every + 1e-9)

    def _facts(self) -> StepFacts:
        """What the verdict must know beside the rows."""
        images = self.recipe.batch // (self.recipe.parts(self.job.comm.size) * self.job.comm.size)
        sharing = place().sharing if self.job.comm.size > 1 else 1
        threads, starved = self.training.chosen.threads, self.ledger.starved()
        return facts_of(self.job, images, threads=threads, cores=cores(), processes=sharing, starved=starved)

    def _seconds(self) -> float:
        """Since the process started, earlier parts of a resumed training included."""
        return round(sum(self.ledger.rows().values()), 3)

    def _note(self, values: dict[str, float]) -> None:
        self.log.metrics(self.job.steps, self.job.progress, {**values, "seconds": self._seconds()})

    def _images_per_s(self) -> float:
        return self.progress.images / max(1e-9, self.ledger.training_s())

    def _read_losses(self) -> None:
        if not self._losses:
            return
        losses = torch.stack(self._losses).float()
        self._losses.clear()
        with self.job.trace.span("wait", "losses") if self.job.comm.size > 1 else nullcontext():
            self.job.comm.all_reduce(losses, op="mean").wait()
            values = losses.tolist()
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise DivergedError(self._diagnosis(f"the loss is {value}", self.job.steps - len(values) + 1 + i))
        self._loss, now = values[-1], self._now()
        if now - self._read > 0.2 or self.over:
            self._read = now
            rate = self._images_per_s()
            lr = float(max(group["lr"] for group in self.job.optimizer.param_groups))
            line = {"loss": self._loss, "lr": lr, "images_per_s": round(rate, 1)}
            self._note(line)
            self.bar.step(self.job.steps, self.job.progress, loss=self._loss, images_per_s=rate)

    def _evaluate(self) -> None:
        job, progress = self.job, self.progress
        self._read_losses()
        rate = self._images_per_s()
        self.log.mlperf("eval_start", event="INTERVAL_START", epoch_num=round(job.progress, 4))
        with self._doing("evaluate"), job.evaluation() as model:
            self._judged = PredictionLog(self.training.test)
            scores = self._scores(model, self._judged.add)
            if scores.top1 > progress.best or not progress.scores:
                self._write(lambda run: save_weights(model, run.path / "best.safetensors"))
            target = self.recipe.evaluate.target
            reached = bool(target) and scores.top1 >= target
            self._reached = self._reached or (reached and self.recipe.evaluate.stop)
            if self.over:  # as judged: averaged, with the statistics measured for it
                self._write(lambda run: save_weights(model, run.path / "model.safetensors"))
        self._evaluated = job.steps
        progress.best = max(progress.best, scores.top1)
        progress.scores = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss}
        self._note({f"test_{k}": v for k, v in progress.scores.items()})
        if self.recipe.evaluate.stale:
            self._compare_stale(scores.top1)
        self.log.mlperf("eval_accuracy", scores.top1, epoch_num=round(job.progress, 4))
        self.log.mlperf("eval_stop", event="INTERVAL_END", epoch_num=round(job.progress, 4))
        self.bar.accuracy(job.progress, scores.top1, loss=self._loss, images_per_s=rate)
        if reached and progress.reached_s is None:
            progress.reached_s = self._seconds()

    def _scores(self, model: nn.Module, also: Callable[[Tensor, Tensor], object] | None = None) -> Scores:
        test = iterate_on_all_ranks(self.job.comm, self.training.test)
        return evaluate(model, test, self.recipe.evaluate.views, self.job.comm, also=also)

    def _compare_stale(self, top1: float) -> None:
        with self._doing("evaluate"), self.job.evaluation(without="Recalibrate") as model:
            stale = self._scores(model).top1
        self._note({"test_stale_top1": stale})
        self.bar.say(f"accuracy lost to stale averages: {100 * (top1 - stale):.2f} points ({stale:.2%} with them)")

    def _diagnosis(self, what: str, step: int) -> str:
        rates = ", ".join(f"{group['lr']:.3g}" for group in self.job.optimizer.param_groups)
        cause = f"likely the rate is too high (now {rates}): lower it or lengthen the warm-up"
        if self.training.chosen.precision == "fp16":
            cause += "; or fp16 overflowed: try precision = fp32"
        elif step <= 2:
            cause += "; this early also the loss function or the initial weights may be wrong"
        return f"{what} at step {step}; last good checkpoint: {self._good}; {cause}"


def _place(job: Job) -> dict[str, int]:
    loader = job.plain_loader
    return {"epoch": loader.epoch, "position": loader.position} if isinstance(loader, Loader) else {}


def _resume(training: Training, run: RunFolder | None) -> Progress:
    """Takes back the newest good checkpoint: rank 0 chooses it, every rank reads it."""
    comm = training.job.comm

    def say(line: str) -> None:
        if comm.rank == 0:
            print(f"kasoku: {line}", file=sys.stderr)

    checkpoint = comm.broadcast_object(run_on_all_ranks(comm, lambda: run.newest(warn=say) if run else None))
    if checkpoint is None:
        say("no good checkpoint there: starting from the beginning")
        return Progress()
    progress = run_on_all_ranks(comm, lambda: _taken(checkpoint, training))
    say(f"going on from step {training.job.steps} of {training.total_steps}")
    return progress


def _taken(checkpoint: Checkpoint, training: Training) -> Progress:
    state = checkpoint.load(training.job.model)
    training.job.load_state_dict(state["job"])
    try:
        return Progress(**state["progress"])
    except TypeError as error:
        raise InputError(f"{checkpoint.folder}: of another version of kasoku ({error}): use that one") from error
