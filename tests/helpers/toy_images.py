"""The toy problem of the contracts with its images in a loader of kasoku.data, whose batches can have any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contracts import Batches, Net, rule
from kasoku.core import Comm, Job, Technique
from kasoku.data import Dataset, Loader, Memory, loader


def toy_loader(batch: int = 16, *, comm: Comm | None = None, parts: int = 1) -> Loader:
    """The 64 images of the toy problem."""
    x_NCHW, labels_N = (torch.cat(part) for part in zip(*Batches().batches, strict=True))
    pixels_NHWC = (64 * x_NCHW + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    images = Memory(pixels_NHWC, labels_N)
    dataset = Dataset("toy", ("a", "b", "c", "d"), images, images, 3, (8, 8), (0.5,) * 3, (0.25,) * 3)
    return loader(dataset, "train", batch, comm=comm, parts=parts)


def image_job(*techniques: Technique, model: Any = None, comm: Comm | None = None, **more: Any) -> Job:
    """A job on these images with these techniques."""
    batches = toy_loader(comm=comm, parts=more.get("accumulate", 1))
    return Job(model or Net(), rule, loader=batches, comm=comm, **more).apply(*techniques)


def judged(job: Job) -> Tensor:
    """The outputs of the model, as it is evaluated, for the first images."""
    with job.evaluation() as model:
        logits_NK: Tensor = model(Batches().batches[0][0])
        return logits_NK
