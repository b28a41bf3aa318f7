"""Images mixed in pairs, and the loss with them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from kasoku.core import Batch, InputError, Job, Range, Stage, Technique
from kasoku.core.job_state import first_part


@dataclass(frozen=True)
class Mix(Technique, stage=Stage.DATA, changes_pixels=True, mixes_images=True):
    """Mixes each training image with another one of its batch, by Mixup or by CutMix, and the loss with it.

    Each batch that a device takes at once gets a random share. If both alphas are above 0, it also draws Mixup or
    CutMix, with equal chance. The loop gets the images' own labels. Pass them to `job.loss` unchanged: it returns
    share * loss(outputs, labels) + (1 - share) * loss(outputs, the partners' labels). Other labels, as in evaluation,
    have the plain loss. List Mix after LowResolution, so that no edge of a box is blurred.

    Args:
        mixup: alpha of Mixup, which lays two images over each other, 0 or more; 0: off.
        cutmix: alpha of CutMix, which puts a box of one image into the other, 0 or more; 0: off.

    Saves: epochs to an accuracy that the network without it only reaches with more images.
    Costs: two passes over the batch and a second loss; accuracy where epochs are few; the loss no longer shows the fit.
    Maths: share ~ Beta(alpha, alpha); image i's partner is image i - shift of the batch, the same shift for all. Mixup:
        x = share x_i + (1 - share) x_j. CutMix: a box of sqrt(1 - share) of each side, centred anywhere, is x_j's; the
        loss takes the share that is left, since some of the box may lie outside. All draws are a function of (the
        loader's seed, updates made, virtual rank), so k accumulated batches are mixed as k ranks would.
    Ref: Mixup: Zhang et al. 2017 (arXiv 1710.09412); CutMix: Yun et al. 2019 (arXiv 1905.04899).
    """

    mixup: Annotated[float, Range("the alpha of a Beta distribution", at_least=0, below=math.inf)] = 0.2
    cutmix: Annotated[float, Range("the alpha of a Beta distribution", at_least=0, below=math.inf)] = 1.0

    def draw(self, random: np.random.Generator, images: int, size: tuple[int, int]) -> "Pairing":
        """How a batch of at least two images of `size` (height, width) is mixed."""
        shift = int(random.integers(1, images))
        cut = not self.mixup or (self.cutmix > 0 and random.random() < 0.5)
        alpha = self.cutmix if cut else self.mixup
        share = float(random.beta(alpha, alpha))
        if not cut:
            return Pairing(share, shift)
        sides = []
        for extent in size:
            long = round(extent * math.sqrt(1 - share))
            first = int(random.random() * extent) - long // 2
            sides.append((max(0, first), min(extent, first + long)))
        (top, bottom), (left, right) = sides
        area = (bottom - top) * (right - left)
        return Pairing(1 - area / (size[0] * size[1]), shift, (top, bottom, left, right))

    def apply(self, job: Job) -> None:
        """Mixes between the loader and the loop, and puts itself around the loss.

        Note: partners hang on the very labels that were handed out, a tensor object of their own. So it does not matter
        when the loss is computed, for how many batches are in hand, or which other losses come between.
        """
        if not (self.mixup or self.cutmix):
            return
        plain_loss, step, micro, seen = job.loss, -1, 0, 0  # seen: the last step with mixed labels in the loss

        def mixed(batches: Iterable[Batch]) -> Iterator[Batch]:
            nonlocal step, micro, seen
            seen = job.steps
            for x_NCHW, y_N in batches:
                if job.steps - seen > 1:
                    raise InputError("Mix: images were mixed and the loss was not: train on job.loss(outputs, labels)")
                # The loop asks for a batch when it is done with the one before, so job.steps is the step it is for.
                step, micro = job.steps, micro + 1 if job.steps == step else 0
                labels_N = y_N.detach()  # the same memory, an object of our own
                labels_N.mixed_with = (1.0, y_N)  # type: ignore[attr-defined]
                if len(y_N) > 1:
                    if self.cutmix and x_NCHW.ndim != 4:
                        got = f"a batch here has {x_NCHW.ndim} dimensions"
                        raise InputError(f"cutmix={self.cutmix}: for images (N, C, H, W), {got}: set it to 0")
                    size = (x_NCHW.shape[2], x_NCHW.shape[3]) if x_NCHW.ndim == 4 else (1, 1)
                    keys = [(getattr(job.plain_loader, "seed", None) or 0) % 2**64, step, first_part(job) + micro]
                    pairing = self.draw(np.random.Generator(np.random.PCG64(keys)), len(y_N), size)
                    x_NCHW = pairing.mixed(x_NCHW)
                    labels_N.mixed_with = (pairing.share, pairing.partners(y_N))  # type: ignore[attr-defined]
                yield x_NCHW, labels_N

        def loss(outputs: Any, labels_N: Tensor) -> Tensor:
            nonlocal seen
            mixed_with = getattr(labels_N, "mixed_with", None)
            seen = seen if mixed_with is None else job.steps
            if mixed_with is None and getattr(outputs, "requires_grad", False):
                got = "job.loss was given labels that job.loader did not hand out, so their partners are not known"
                advice = "train on the labels of job.loader as they come, on the device, whole and not copied"
                raise InputError(f"Mix: {got}: {advice}")
            own = plain_loss(outputs, labels_N)
            share, partners_N = mixed_with or (1.0, labels_N)
            return own if share == 1 else share * own + (1 - share) * plain_loss(outputs, partners_N)

        job.around_loader(mixed)
        job.patch(job, "loss", loss)


@dataclass(frozen=True)
class Pairing:
    """Image i of a batch keeps `share` of itself; the rest is of image i - shift."""

    share: float  # from 0 to 1
    shift: int  # at least 1 and less than the batch
    box: tuple[int, int, int, int] | None = None  # the partner's pixels: top, bottom, left, right; None: all are mixed

    def mixed(self, x_NCHW: Tensor) -> Tensor:
        """The images mixed, as new memory; never waits for the device."""
        if self.box is None:
            return self.partners(x_NCHW).lerp_(x_NCHW, self.share)
        top, bottom, left, right = self.box
        out_NCHW = x_NCHW.clone()
        out_NCHW[:, :, top:bottom, left:right] = self.partners(x_NCHW[:, :, top:bottom, left:right])
        return out_NCHW

    def partners(self, x_N: Tensor) -> Tensor:
        """What belongs to the partner of each image. Not torch.roll, which leaves channels_last order on a GPU."""
        return torch.cat([x_N[-self.shift :], x_N[: -self.shift]])
