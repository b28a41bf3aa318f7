"""SavedMemory on networks that nobody chose."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from contracts import one_thread as one_thread
from kasoku.device import ChannelsLast
from kasoku.memory import SavedMemory
from kasoku.models.resnet import BasicBlock
from memory.nets import assert_equal, assert_near, images, one_step
from memory.test_saved import smallest_budget

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


FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FEW
@given(networks(), st.booleans(), st.integers(1, 5))
def test_lossless_gradients_of_any_network_are_those_of_plain_pytorch_bit_for_bit(model, last, batch):
    x, y = images(batch, 16)
    layout = [ChannelsLast()] if last else []
    saved = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)
    assert_equal(one_step(model, x, y, *layout), one_step(model, x, y, *layout, saved))


@FEW
@given(networks(), st.integers(5, 9))
def test_gradients_of_any_network_under_the_smallest_budget_are_near_those_of_plain_pytorch(model, batch):
    x, y = images(batch, 16)
    model, x = model.double(), x.double()
    saved = SavedMemory(budget=smallest_budget(model, x, y), in_backward=False, show=False)
    assert_near(one_step(model, x, y), one_step(model, x, y, saved), 1e-9)
