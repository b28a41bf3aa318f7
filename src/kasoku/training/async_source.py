"""A training whose ranks each step at their own pace, and what they do together where they meet.

Note: shares of the data. Ranks take the next share of the epoch's batches as they come to it, so a fast one takes more
of them, and each image is trained on once an epoch, as ever. They meet at the end of an epoch, for an evaluation, where
one asks for it (a signal, a checkpoint that is due, a loss that is not finite), and where steps of all together begin
or end; always after whole batches. There a step is counted for each batch, and the weights are equal on all ranks.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Batch, InputError
from kasoku.distributed.async_sgd.asynchronous import Exchange
from kasoku.distributed.consensus import raise_if, run_on_all_ranks
from kasoku.training.batches import Gate, batches, own_batches
from kasoku.training.monitor import Watch
from kasoku.training.run_folder import RunFolder
from kasoku.training.run_state import Result, Training

_SAVE, _SIGNAL, _FAILED = 1, 10, 1000  # wishes to meet: to save, a signal (and its number), something that ends it all
_READ_S, _SHOWN_S = 0.5, 0.2
_PATIENCE = 10  # so many times as long as a rank may be without a step, the others wait for it where they meet


class Meetings(Watch):
    """Watches over ranks that meet only now and then; else as Watch."""

    def __init__(self, training: Training, run: RunFolder | None, **settings: Any) -> None:
        super().__init__(training, run, **settings)
        self._exchange: Exchange = self.job.kept("asynchronous")
        self._own: list[Tensor] = []  # losses since they were read last
        self._failure: InputError | None = None
        self._wish, self._together, self._steps = 0, False, self.job.steps
        self._sum_own, self._count_own = 0.0, 0  # of the losses since the last meeting

    def batches(self, caught: Sequence[str]) -> Iterator[Batch]:
        """This rank's batches up to the next meeting.

        Args:
            caught: the signals this rank caught so far.
        """
        job, loader, size = self.job, self.job.plain_loader, self.job.comm.size
        epoch, first, end = loader.epoch, loader.position, self._end()
        self._wish, self._together = 0, self._exchange.together.due
        if self._together != self._exchange.together.active:  # on all ranks, those too that get no share
            self._exchange.change()
        gate = Gate(job.comm)
        try:
            if self._together:
                for batch in islice(batches(job, self.activity, gate), end - first):
                    yield batch
                    if self._agreed(caught):
                        return
            else:
                self._exchange.deal(first * size, end * size)
                with loader.deal_from(lambda: self._exchange.share_of_data(self._wished(caught))) as deal:
                    for batch in own_batches(job.loader, self.activity):
                        phase = deal.last // size / len(loader)  # the same for all shares of a batch
                        job.set_progress(epoch + phase)
                        yield batch
        except InputError as error:
            self._failure, self._wish = error, _FAILED
            if not self._together:
                self._exchange.share_of_data(_FAILED)
        finally:
            gate.close()

    def took(self, loss: Tensor) -> None:
        """After a step of this rank."""
        self.job.trace.phase("other")
        self.activity.step()
        self._own.append(loss.detach())
        now = self._now()
        if self._first_step:
            self._first_step = False
            self._tell_start(now)
        if loss.device.type == "cpu" or now - self._read > _READ_S:
            self._read_own(now)

    def meet(self) -> None:
        """What ranks do together after a round of batches."""
        job, loader, save = self.job, self.job.plain_loader, self.recipe.save
        self._rounds.close()
        slow_s = _PATIENCE * self.activity.limit_s
        with job.trace.span("wait", "the other ranks"), self.activity.busy("the other ranks", slow_s):
            job.drain()
        self._read_own(self._now())
        told = job.comm.gather_objects((self._wish, self._sum_own, self._count_own))
        self._sum_own, self._count_own = 0.0, 0
        wish, before = max(wish for wish, *_ in told), self._steps
        if not self._together:
            reached = job.comm.broadcast_object(self._exchange.reached) // job.comm.size
            loader.seek(loader.epoch + reached // len(loader), reached % len(loader))
        self._place = {"epoch": loader.epoch, "position": loader.position}
        job.steps = self._steps = loader.epoch * len(loader) + loader.position
        job.set_progress(job.steps / len(loader))
        self.progress.images += (job.steps - before) * self.recipe.batch
        run_on_all_ranks(job.comm, partial(raise_if, self._failure))
        taken = sum(count for *_, count in told)
        if taken:
            self._losses = [torch.tensor(sum(losses for _, losses, _ in told) / taken)]
            self._read = -math.inf  # the mean is written, whenever this rank showed its own
        self._read_losses()
        crossed = self._crossed(self.recipe.evaluate.every)
        if self.over or (crossed and job.progress >= self.recipe.evaluate.start):
            self._evaluate()
        self.progress.judged = job.progress if crossed else self.progress.judged
        self.stopped = signal.Signals(wish - _SIGNAL).name if _SIGNAL < wish < _FAILED else None
        by_steps = save.every_steps and job.steps // save.every_steps > before // save.every_steps
        if wish == _SAVE or by_steps:
            self.save()

    def finish(self) -> Result:
        """As ever, and writes how stale updates were."""
        stale = self._exchange.staleness
        updates = sum(stale.values())
        mean = sum(steps * n for steps, n in stale.items()) / max(1, updates)
        found = {"mean": round(mean, 3), "updates": {str(steps): n for steps, n in sorted(stale.items())}}
        self._write(lambda run: run.write("staleness.json", json.dumps(found) + "\n"))
        self.bar.say(f"staleness of updates: {mean:.1f} others' in the mean, at most {max(stale, default=0)}")
        return super().finish()

    def _end(self) -> int:
        """The batch of this epoch before which ranks meet."""
        job, loader, together = self.job, self.job.plain_loader, self._exchange.together
        whole: int = len(loader)
        every = self.recipe.evaluate.every
        at = loader.epoch + loader.position / whole
        evaluation = (math.floor(at / every + 1e-9) + 1) * every
        change = min((epoch for epoch in together.bounds if epoch > at + 1e-9), default=math.inf)
        left: int = self.training.total_steps - job.steps
        soon = min(evaluation, change, loader.epoch + 1.0) - loader.epoch
        position: int = loader.position
        every_steps = self.recipe.save.every_steps
        save = every_steps - job.steps % every_steps if every_steps else left
        end: int = min(whole, position + min(left, save), math.ceil(soon * whole - 1e-6))
        return max(position + 1, end)

    def _wished(self, caught: Sequence[str]) -> int:
        """Why this rank wants all to meet; 0: it does not."""
        diverged = _FAILED if not math.isfinite(self._loss) and self._read > 0 else 0
        stop = _SIGNAL + signal.Signals[caught[0]] if caught else 0
        self._wish = max(self._wish, diverged, stop, _SAVE if self._wants_to_save(self._now()) else 0)
        return self._wish

    def _agreed(self, caught: Sequence[str]) -> bool:
        """Whether all ranks, which step together, know of a wish to meet."""
        told = self._rounds.step(self._wished(caught))
        self._wish = int(told[0]) if told else self._wish
        return bool(told and told[0])

    def _read_own(self, now: float) -> None:
        """Reads this rank's losses; rank 0 shows its own."""
        if not self._own:
            return
        losses = torch.stack(self._own).float()
        self._sum_own, self._count_own = self._sum_own + float(losses.sum()), self._count_own + len(losses)
        self._loss = float(losses.mean())
        self._own.clear()
        if now - self._read > _SHOWN_S:
            self._read = now
            self.bar.step(self.job.steps, self.job.progress, loss=self._loss, images_per_s=self._images_per_s())


def steps(watch: Meetings, caught: list[str]) -> Iterator[None]:
    """The loop: as the trainer's, and a meeting after each round of batches."""
    job = watch.job
    while not watch.over and not watch.stopped:
        for x_NCHW, y_N in watch.batches(caught):
            loss = job.loss(job.model(x_NCHW), y_N)
            job.backward(loss)
            job.optimizer.step()
            job.optimizer.zero_grad()
            watch.took(loss)
            yield
        watch.meet()
