"""Networks for the tests of memory, and how two of them are compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from kasoku.core import InputError, Job, Technique
from kasoku.memory import SavedMemory
from kasoku.memory.saved_memory import Planner
from kasoku.models.resnet import BasicBlock
from kasoku.optim import sgd


def plain_chain(*, classes: int = 4) -> nn.Sequential:
    """A user's own plain convolutional network, in one Sequential."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes)),
    )


def blocks(kind=BasicBlock) -> nn.Sequential:
    """Residual blocks whose weights take little beside their images."""
    inner = 12 // kind.expansion
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
        *(kind(12, inner, 1, None), nn.Sequential(kind(12, inner, 1, None), kind(12, inner, 1, None))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)),
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


def smallest_budget(model, x, y, *beside, in_backward=False, **settings) -> str:
    """What the error names, plus a little."""
    least = SavedMemory(budget="1KiB", in_backward=in_backward, show=False, **settings)
    with pytest.raises(InputError, match=r"at least [0-9.,]+ MiB are needed") as raised:
        one_step(model, x, y, *beside, least)
    mib = float(str(raised.value).partition("at least ")[2].split()[0].replace(",", ""))
    return f"{mib + 0.001:.3f}MiB"


def planner_of(job: Job) -> Planner:
    hooks = job.model._forward_pre_hooks.values()
    return next(h.__self__ for h in hooks if isinstance(getattr(h, "__self__", None), Planner))


def peak_of_step(job: Job, x: torch.Tensor, y: torch.Tensor) -> int:
    """The same of a job's second step."""

    def step() -> None:
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def trained(model: nn.Module, *techniques, steps=3, accumulate=1, rule=sgd) -> Job:
    """A copy of the model after a few steps."""
    job = Job(copy.deepcopy(model), lambda m: rule(m, 0.05), accumulate=accumulate).apply(*techniques)
    for i in range(steps * accumulate):
        x, y = images(seed=i)
        (job.loss(job.model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
    job.drain()
    return job


# ---- networks drawn at random

CHANNELS, SMALLEST = (4, 6, 8), 4
KINDS = (
    *("conv", "conv", "wide", "strided", "norm", "relu", "pool", "overlapping pool", "gelu", "block", "frozen"),
    *("silu", "silu in place", "elu in place", "leaky in place"),
)


def layers(kind: str, channels: int, out: int) -> tuple[list[nn.Module], int]:
    """The layers of a kind, and the channels they leave."""
    conv = nn.Conv2d(channels, out, 3, 2 if kind == "strided" else 1, 1, bias=out != 6)
    if kind in ("conv", "strided"):
        return [conv, nn.ReLU(inplace=out == 4)], out
    if kind == "wide":
        return [nn.Conv2d(channels, 4 * out, 1, bias=False), nn.BatchNorm2d(4 * out), nn.ReLU()], 4 * out
    if kind.endswith("in place"):
        kinds = {"silu": nn.SiLU(inplace=True), "elu": nn.ELU(inplace=True), "leaky": nn.LeakyReLU(0.1, inplace=True)}
        return [conv, kinds[kind.split()[0]]], out
    if kind == "frozen":
        return [conv.requires_grad_(False)], out
    if kind == "block":
        return [conv, BasicBlock(out, out, 1, None)], out
    pools = {"pool": nn.MaxPool2d(2), "overlapping pool": nn.MaxPool2d(3, 2, 1)}
    made = {"norm": nn.BatchNorm2d(channels), "relu": nn.ReLU(), "gelu": nn.GELU(), "silu": nn.SiLU(), **pools}
    return [made[kind]], channels


@st.composite
def networks(draw) -> nn.Sequential:
    torch.manual_seed(draw(st.integers(0, 99)))
    side, channels = 16, draw(st.sampled_from(CHANNELS))
    found: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=8)):
        if kind in ("strided", "pool", "overlapping pool"):
            if side <= SMALLEST:
                continue
            side //= 2
        more, channels = layers(kind, channels, draw(st.sampled_from(CHANNELS)))
        found += more
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


def drawn(examples: int) -> settings:
    """So many networks, the same in every run."""
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


FEW = drawn(25)
