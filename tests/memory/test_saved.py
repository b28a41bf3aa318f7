"""SavedMemory: the same gradients from less memory, and a plan that can be relied on."""

import pytest
import torch
from torch import nn

from helpers.grids import covering
from helpers.nets import assert_equal, assert_near, images, one_step, plain_chain, smallest_budget
from kasoku import models
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory
from kasoku.models.resnet import BasicBlock, Bottleneck, ResNet
from kasoku.models.vgg import VGG


def unusual(change) -> nn.Sequential:
    """The plain chain, changed."""
    model = plain_chain()
    change(model)
    return model


def freeze(model):
    for p in model[:3].parameters():
        p.requires_grad_(False)
    model[6].bias.requires_grad_(False)


def mean_statistics(model):
    model[6].momentum = None


def drop(model):
    model.insert(9, nn.Dropout(0.5))
    model.insert(4, nn.Dropout2d(0.2))


def share(model):
    model.insert(4, nn.ReLU())
    model.insert(4, nn.Conv2d(8, 8, 3, padding=1))
    model[4].weight = model[2].weight


def in_place(model):
    model[1], model[3], model[7] = nn.SiLU(inplace=True), nn.Hardswish(inplace=True), nn.ELU(inplace=True)


def large_windows(model):
    model[4] = nn.MaxPool2d(17, 2, 8)


NETWORKS = {
    "chain": (plain_chain, 16),
    "vgg": (lambda: VGG(11, 4, 3, head="cifar"), 32),
    "vgg with norms": (lambda: VGG(11, 4, 3, head="cifar", batch_norm=True), 32),
    "basic blocks": (lambda: ResNet(BasicBlock, (2, 1, 1, 1), 4, 3, "cifar"), 16),
    "bottlenecks": (lambda: ResNet(Bottleneck, (2, 1, 1, 1), 4, 3, "imagenet"), 48),
    "gelu": (lambda: models.cifarnet(4), 32),
    "odd sizes": (plain_chain, 19),
    "frozen": (lambda: unusual(freeze), 16),
    "mean statistics": (lambda: unusual(mean_statistics), 16),
    "dropout": (lambda: unusual(drop), 16),
    "shared weights": (lambda: unusual(share), 16),
    "activations in place": (lambda: unusual(in_place), 16),
    "windows of 289 places": (lambda: unusual(large_windows), 16),
    "maps of one pixel": (lambda: ResNet(BasicBlock, (2, 1, 1, 1), 4, 3, "cifar"), 8),
}


@pytest.mark.parametrize(("name", "layout"), covering([*NETWORKS], ["nchw", "nhwc"], together=1))
def test_lossless_gradients_are_those_of_plain_pytorch_bit_for_bit(name, layout):
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    x, y = images(4, side)
    beside = [ChannelsLast()] if layout == "nhwc" else []
    plain = one_step(model, x, y, *beside)
    least = smallest_budget(model, x, y, *beside, lossless=True)
    for much in ({"factor": 1}, {"budget": least}):
        technique = SavedMemory(**much, lossless=True, in_backward=False, show=False)
        assert_equal(plain, one_step(model, x, y, *beside, technique))


@pytest.mark.parametrize("name", ["chain", "bottlenecks", "gelu"])
def test_lossless_under_autocast_and_the_smallest_budget(name):
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    x, y = images(4, side)
    beside = [ChannelsLast(), Autocast("bf16")]
    least = smallest_budget(model, x, y, *beside, lossless=True)
    technique = SavedMemory(budget=least, lossless=True, in_backward=False, show=False)
    assert_equal(one_step(model, x, y, *beside), one_step(model, x, y, *beside, technique))


SLOW = {"vgg", "vgg with norms", "gelu", "maps of one pixel"}  # their kinds of layers are in the other networks, too
EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in NETWORKS]


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_gradients_under_the_smallest_budget_are_near(name):
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    x, y = images(5, side)
    plain = one_step(model, x.double(), y)
    least = smallest_budget(model, x.double(), y)
    assert_near(plain, one_step(model, x.double(), y, SavedMemory(budget=least, in_backward=False, show=False)), 1e-9)
