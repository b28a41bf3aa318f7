"""Training on real images ends at the same accuracy with SavedMemory as without."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from kasoku.core import Job, Technique
from kasoku.memory import SavedMemory
from kasoku.models.resnet import BasicBlock
from kasoku.optim import sgd

pytestmark = pytest.mark.data

TRAIN, TEST, BATCH, EPOCHS, RATE = 3, 3, 64, 4, 0.04  # thousands of images, images, passes, falling to 0


@functools.cache
def cifar(folder: Path, part: str, thousands: int) -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10, each of 10 classes as often; about zero, with a spread about 1."""
    if not (folder / f"{part}_00.webp").is_file():
        pytest.skip(f"{folder} holds no mosaics of CIFAR-10")
    found, labels = [], []
    for number in range(thousands):
        mosaic = np.asarray(Image.open(folder / f"{part}_{number:02}.webp").convert("RGB"))
        found.append(mosaic.reshape(20, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(1000, 3, 32, 32))
        labels.append(np.fromfile(folder / f"{part}_{number:02}.labels", np.uint8))
    x_N3HW = torch.from_numpy(np.concatenate(found)).float().sub_(120).div_(64)
    return x_N3HW, torch.from_numpy(np.concatenate(labels)).long()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(BasicBlock(32, 32, 1, None), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
    )


def trained(folder: Path, *techniques: Technique) -> tuple[Tensor, float]:
    """The loss of every step, and the part of the test images told after the last."""
    x_N3HW, y_N = cifar(folder, "train", TRAIN)
    job = Job(small(), lambda m: sgd(m, RATE)).apply(*techniques)
    generator = torch.Generator().manual_seed(0)
    losses: list[Tensor] = []
    for _ in range(EPOCHS):
        for part in torch.randperm(len(y_N), generator=generator).split(BATCH):
            job.optimizer.param_groups[0]["lr"] = RATE * (1 - len(losses) * BATCH / (EPOCHS * len(y_N)))
            loss = job.loss(job.model(x_N3HW[part]), y_N[part])
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            losses.append(loss.detach())
    job.drain()
    x_N3HW, y_N = cifar(folder, "test", TEST)
    with job.evaluation() as judge, torch.no_grad():
        right = judge(x_N3HW).argmax(1).eq(y_N).float().mean()
    job.close()
    return torch.stack(losses), float(right)


@functools.cache
def plain(folder: Path) -> tuple[Tensor, float]:
    """Plain PyTorch, once."""
    return trained(folder)


def test_cifar_is_learned_to_the_same_accuracy(real_data):
    losses, right = plain(real_data / "cifar10")
    ours, found = trained(real_data / "cifar10", SavedMemory(factor=1.7, show=False))
    torch.testing.assert_close(ours[:20], losses[:20], rtol=1e-4, atol=0)
    assert min(right, found) > 0.42  # by chance 0.1
    assert abs(right - found) <= 0.02
