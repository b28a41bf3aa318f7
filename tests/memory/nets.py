"""Networks for the tests of memory, and how two of them are compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kasoku.core import Job, Technique
from kasoku.optim import sgd


def plain_chain(*, classes: int = 4) -> nn.Sequential:
    """A user's own plain convolutional network, in one Sequential."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes)),
    )


def images(batch: int = 6, side: int = 16, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, side, side, generator=generator)
    return x, torch.randint(4, (batch,), generator=generator)


@dataclass
class Step:
    """What one step of training gave."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    job: Job


def one_step(model: nn.Module, x: Tensor, y: Tensor, *techniques: Technique) -> Step:
    """Forward and backward of a copy of the model."""
    twin = copy.deepcopy(model)
    job = Job(twin, lambda m: sgd(m, 0.1)).apply(*techniques)
    torch.manual_seed(7)  # for dropout
    loss = job.loss(job.model(x), y)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients, dict(twin.named_buffers()), job)


def assert_equal(a: Step, b: Step) -> None:
    """Bit for bit."""
    assert torch.equal(a.loss, b.loss)
    assert a.gradients.keys() == b.gradients.keys()
    for name, g in a.gradients.items():
        assert torch.equal(g, b.gradients[name]), f"{name}: {(g - b.gradients[name]).abs().max()}"
    for name, x in a.buffers.items():
        assert torch.equal(x, b.buffers[name]), name


def assert_near(a: Step, b: Step, tolerance: float = 1e-5) -> None:
    """Each gradient within `tolerance` of its largest element; the buffers bit for bit.

    Where that is less than a thousandth of the largest of all (a bias before BatchNorm has no gradient), of that.
    """
    least = 1e-3 * max(float(g.abs().max()) for g in a.gradients.values())
    torch.testing.assert_close(a.loss, b.loss, rtol=tolerance, atol=tolerance)
    assert a.gradients.keys() == b.gradients.keys()
    for name, g in a.gradients.items():
        off = (g - b.gradients[name]).abs().max() / max(float(g.abs().max()), least)
        assert off < tolerance, f"{name}: {off}"
    for name, x in a.buffers.items():
        assert torch.equal(x, b.buffers[name]), name
