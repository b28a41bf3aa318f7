"""Training images that the network knows already, left out of an epoch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from kasoku.core import Batch, InputError, Job, Range, Stage, Technique
from kasoku.core.schedule import epoch_of
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.loader import Loader
from kasoku.data.loading.shuffle import draws

_STREAM = 32  # of the draws that choose among the easy images


@dataclass(frozen=True)
class SkipEasy(
    Technique,
    stage=Stage.DATA,
    in_sandbox=False,
    exchanges_losses=True,
    refuses={
        "is_asynchronous": "all ranks need the losses of all images after each step; leave one of them out",
        "mixes_images": "the loss of mixed images says nothing about a single one; leave one of them out",
    },
):
    """Leaves a share of the training images out of some epochs: a random choice of those with the smallest losses.

    The loss of an image is the cross-entropy, without smoothing, of the last time it was trained on, with the weights
    of that time; no other forward is computed. An epoch with fewer images has fewer updates and still counts as one, so
    schedules and `epochs` stay as they are. The last epochs take all images again: without them accuracy is lost.
    `SkipEasy(0.4)` leaves four of ten images out, from the third epoch until four fifths of the training.

    Args:
        share: of the images that an epoch leaves out, above 0 and below 1.
        start: the time up to which epochs take all images, above 0; smaller than 1: a share of the training, else an
            epoch. The first epoch always does.
        until: the time from which epochs take all images again, above 0, told in the same way.
        easy: images are chosen among so many times `share` of all, those with the smallest losses; at least 1. With 1
            the easiest images are left out, without chance.
        epochs: the length of the training, 0 or more; 0: the recipe's.

    Saves: the steps of the images left out.
    Costs: some accuracy, more with a larger share or an early start. A second cross-entropy of each batch, 4 bytes an
        image, and on several ranks a small collective a step.
    Ref: Jiang et al. 2019 (arXiv 1910.00762); Qin et al. 2023 (InfoBatch, arXiv 2303.04947), here without its weights.
    """

    share: Annotated[float, Range("a share of the images", above=0, below=1)]
    start: Annotated[float, Range("an epoch, or a share of the training", above=0, below=math.inf)] = 2.0
    until: Annotated[float, Range("an epoch, or a share of the training", above=0, below=math.inf)] = 0.8
    easy: Annotated[float, Range("times the share", at_least=1, below=math.inf)] = 1.5
    epochs: Annotated[float, Range(at_least=0, below=math.inf)] = 0.0

    def over(self, epochs: float) -> Technique:
        return replace(self, epochs=self.epochs or epochs)

    def image_share(self, epoch: int) -> float:
        start, until = (epoch_of(t, self.epochs, type(self).__name__) for t in (self.start, self.until))
        return 1 - self.share if max(1, start - 1e-9) <= epoch < until - 1e-9 else 1.0

    def apply(self, job: Job) -> None:
        """Chooses the images of an epoch as it begins, and notes their losses in `job.loss`. Steps are collective."""
        losses, plain_loss = _Losses(self, job, own_loader(job, self)), job.loss

        def chosen(batches: Iterable[Batch]) -> Iterator[Batch]:
            losses.choose()
            for x_NCHW, y_N in batches:
                labels_N = y_N.detach()  # an object of our own, which has the numbers of its images
                labels_N.rows_N = losses.loader.index_N  # type: ignore[attr-defined]
                yield x_NCHW, labels_N

        def loss(outputs: Any, labels_N: Tensor) -> Tensor:
            value = plain_loss(outputs, labels_N)
            if value.requires_grad and hasattr(labels_N, "rows_N") and not job.rehearses:
                losses.note(outputs.detach().float(), labels_N)
            return value

        job.around_loader(chosen)
        job.patch(job, "loss", loss)
        job.after_step(losses.exchange)
        job.keep("skip_easy", losses)


class _Losses:
    """The last loss of each image, equal on all ranks after each step; infinite before there is one."""

    def __init__(self, technique: SkipEasy, job: Job, loader: Loader) -> None:
        self.technique, self.job, self.loader = technique, job, loader
        self.loss_N = torch.full((loader.images,), math.inf, device=loader.device)
        self.noted: list[Tensor] = []  # of this step: numbers of images, and the bits of their losses
        if not loader.pipeline.train:
            raise InputError("SkipEasy: a loader in order, or of test images: give a shuffled one of training images")
        job.configure_loader(left_out=None)  # as it is again after `close()`

    def choose(self) -> None:
        """Chooses the images of the epoch that begins; those of one that goes on stay."""
        loader, job, technique, progress = self.loader, self.job, self.technique, self.job.progress
        if loader.position:
            return
        left_out_N = None
        if count := loader.images - round(loader.images * technique.image_share(loader.epoch)):
            easy_N = self.loss_N.argsort(stable=True)[: round(count * technique.easy)]
            chance_N = draws(loader.seed, loader.epoch, easy_N, _STREAM)
            left_out_N = torch.zeros(loader.images, dtype=torch.bool)
            left_out_N[easy_N[chance_N.argsort(stable=True)[:count]].cpu()] = True
        loader.configure(left_out=left_out_N)
        job.set_progress(progress)

    def note(self, logits_NK: Tensor, labels_N: Any) -> None:
        loss_N = functional.cross_entropy(logits_NK, labels_N, reduction="none")
        self.noted.append(torch.stack([labels_N.rows_N, loss_N.view(torch.int32).long()]))

    def exchange(self) -> None:
        """All ranks learn the losses of a step. Collective."""
        if not self.noted:
            got = "a step without a loss of images of job.loader"
            advice = "train on job.loss(outputs, labels), with the labels as they come, on the device"
            raise InputError(f"SkipEasy: {got}: {advice}")
        own_2N, comm = torch.cat(self.noted, 1), self.job.comm
        if self.loader.shares:  # ranks have unequally many: the last one again, up to the batch
            own_2N = torch.cat([own_2N, own_2N[:, -1:].expand(2, self.loader.batch - own_2N.shape[1])], 1)
        all_R2N = own_2N.new_empty(comm.size, *own_2N.shape)
        with self.job.trace.span("wait", "losses"):
            comm.all_gather(all_R2N, own_2N).wait()
        rows_N, bits_N = all_R2N.transpose(0, 1).flatten(1)
        self.loss_N.index_copy_(0, rows_N, bits_N.int().view(torch.float32))
        self.noted.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"loss_N": self.loss_N, "left_out": self.loader.pipeline.left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (saved := len(state["loss_N"])) != len(self.loss_N):
            got = f"a checkpoint of a training on {saved} images, here are {len(self.loss_N)}"
            raise InputError(f"SkipEasy: {got}: resume with the data it was saved with")
        self.loss_N.copy_(state["loss_N"])
        self.loader.configure(left_out=state["left_out"])
