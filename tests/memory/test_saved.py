"""SavedMemory: the same gradients from less memory, and a plan that can be relied on."""

import pytest
import torch

from contracts import one_thread as one_thread
from kasoku import models
from kasoku.core import InputError
from kasoku.device import ChannelsLast
from kasoku.memory import SavedMemory
from kasoku.models.resnet import BasicBlock, Bottleneck, ResNet
from kasoku.models.vgg import VGG
from memory.nets import assert_equal, assert_near, images, one_step, plain_chain

NETWORKS = {
    "chain": (plain_chain, 16),
    "vgg": (lambda: VGG(11, 4, 3, head="cifar"), 32),
    "vgg with norms": (lambda: VGG(11, 4, 3, head="cifar", batch_norm=True), 32),
    "basic blocks": (lambda: ResNet(BasicBlock, (2, 1, 1, 1), 4, 3, "cifar", False), 16),
    "bottlenecks": (lambda: ResNet(Bottleneck, (2, 1, 1, 1), 4, 3, "imagenet", False), 48),
    "gelu": (lambda: models.cifarnet(4), 32),
    "odd sizes": (plain_chain, 19),
    "maps of one pixel": (lambda: ResNet(BasicBlock, (2, 1, 1, 1), 4, 3, "cifar", False), 8),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_lossless_gradients_and_statistics_are_those_of_plain_pytorch_bit_for_bit(name, last):
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    x, y = images(4, side)
    layout = [ChannelsLast()] if last else []
    technique = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)
    assert_equal(one_step(model, x, y, *layout), one_step(model, x, y, *layout, technique))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_under_the_smallest_budget_are_near_those_of_plain_pytorch(name):
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    x, y = images(5, side)
    plain = one_step(model, x.double(), y)
    least = smallest_budget(model, x.double(), y)
    assert_near(plain, one_step(model, x.double(), y, SavedMemory(budget=least, in_backward=False, show=False)), 1e-9)


def smallest_budget(model, x, y) -> str:
    """What the error names, plus the rounding of its text."""
    with pytest.raises(InputError, match=r"at least [0-9.,]+ MiB are needed") as raised:
        one_step(model, x, y, SavedMemory(budget="1KiB", in_backward=False, show=False))
    mib = float(str(raised.value).partition("at least ")[2].split()[0].replace(",", ""))
    return f"{mib + 0.1:.1f}MiB"
