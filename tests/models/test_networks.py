"""Every network: published sizes and names, initial values, what it takes, and that it learns."""

import inspect
import re

import pytest
import torch
from torch import nn

from kasoku import models
from kasoku.core.errors import InputError

NETWORKS = [name for name in models.__all__ if "num_classes" in inspect.signature(getattr(models, name)).parameters]
# Published by torchvision with its weights.
PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
# Names and shapes that torchvision's files hold.
KEYS = {
    "alexnet": {
        "features.0.weight": (64, 3, 11, 11),
        "features.3.weight": (192, 64, 5, 5),
        "features.10.bias": (256,),
        "classifier.1.weight": (4096, 9216),
        "classifier.4.weight": (4096, 4096),
        "classifier.6.weight": (1000, 4096),
    },
    "vgg16": {
        "features.0.weight": (64, 3, 3, 3),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.3.weight": (4096, 4096),
        "classifier.6.weight": (1000, 4096),
    },
    "vgg16_bn": {"features.1.running_mean": (64,), "features.40.weight": (512, 512, 3, 3), "features.41.bias": (512,)},
    "resnet18": {
        "layer1.1.conv2.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.1.bn2.running_var": (512,),
        "fc.weight": (1000, 512),
    },
    "resnet34": {"layer3.5.conv1.weight": (256, 256, 3, 3)},
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "bn1.num_batches_tracked": (),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.weight": (256,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.bias": (1000,),
    },
    "resnet101": {"layer3.22.bn3.weight": (1024,)},
    "resnet152": {"layer2.7.conv2.weight": (128, 128, 3, 3), "layer3.35.conv1.weight": (256, 1024, 1, 1)},
}


def on_meta(name, **options):
    with torch.device("meta"):
        return getattr(models, name)(**options)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_twin_has_the_published_number_of_parameters(name):
    assert count(on_meta(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", KEYS)
def test_twin_has_torchvisions_names_and_shapes(name):
    shapes = {key: tuple(tensor.shape) for key, tensor in on_meta(name).state_dict().items()}
    assert shapes | KEYS[name] == shapes


def test_resnet50_has_161_tensors_and_keeps_their_order():
    names = [name for name, _ in on_meta("resnet50").named_parameters()]
    assert len(names) == 161
    parts = ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample.0", "downsample.1"]
    assert list(dict.fromkeys(n.rpartition(".")[0] for n in names[3:15])) == [f"layer1.0.{part}" for part in parts]
    assert names[-2:] == ["fc.weight", "fc.bias"]


def test_resnet50_strides_in_the_3x3_convolution():
    block = on_meta("resnet50").layer2[0]
    assert (block.conv1.stride, block.conv2.stride, block.downsample[0].stride) == ((1, 1), (2, 2), (2, 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_first_line_of_the_docstring_states_parameters_and_size(name):
    line = inspect.getdoc(getattr(models, name)).splitlines()[0]
    stated = float(re.search(r"([\d.]+) M parameters, made for (\d+)x\2", line)[1])
    assert stated == pytest.approx(count(on_meta(name)) / 1e6, abs=0.05)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_takes_its_size_any_channels_and_any_classes(name):
    side = int(re.search(r"made for (\d+)x", getattr(models, name).__doc__)[1])
    model = on_meta(name, num_classes=7, in_channels=1)
    assert model(torch.empty(2, 1, side, side, device="meta")).shape == (2, 7)


def test_cnn11_has_11_convolutions_and_at_least_5_million_parameters():
    model = on_meta("cnn11")
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 11
    assert count(model) >= 5_000_000


def test_cifar_stem_keeps_the_size_and_the_keys_of_the_stages():
    small, large = on_meta("cifar_resnet18", num_classes=1000), on_meta("resnet18")
    assert small.maxpool(small.conv1(torch.empty(1, 3, 32, 32, device="meta"))).shape[-2:] == (32, 32)
    assert list(small.state_dict()) == list(large.state_dict())


@pytest.mark.parametrize("name", ["cifar_vgg16_bn", "cifar_resnet50", "resnet50"])
def test_half_the_widths_make_a_quarter_of_the_weights(name):
    widths = (32, 64, 128, 256, 256) if "vgg" in name else (32, 64, 128, 256)
    model, full = on_meta(name, num_classes=10, widths=widths), on_meta(name, num_classes=10)
    assert count(model) / count(full) == pytest.approx(0.25, rel=0.02)
    assert [*model.state_dict()] == [*full.state_dict()]
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(("depth", "plain", "normed"), [(11, 132_863_336, 132_868_840), (19, 143_667_240, 143_678_248)])
def test_other_depths_of_vgg_are_torchvisions(depth, plain, normed):
    with torch.device("meta"):
        networks = [models.vgg.VGG(depth, 1000, 3, batch_norm=norm) for norm in (False, True)]
    assert [count(network) for network in networks] == [plain, normed]


def test_initial_values_are_torchvisions():
    torch.manual_seed(0)
    model = models.resnet18()
    weight = model.layer4[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)  # kaiming, fan_out
    assert model.layer1[0].bn2.weight.eq(1).all()
    vgg = models.cifar_vgg16(num_classes=100)
    assert vgg.features[28].weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert vgg.features[28].bias.eq(0).all()
    assert vgg.classifier[0].weight.std().item() == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("name", ["resnet18", "cifar_vgg16_bn", "alexnet", "cnn4", "cnn11", "cifarnet"])
def test_a_gradient_step_lowers_the_loss(name):
    torch.manual_seed(0)
    side = 63 if name == "alexnet" else 32
    options = {"dropout": 0.0} if name == "alexnet" else {}
    model = getattr(models, name)(num_classes=4, **options)
    x, y = torch.randn(8, 3, side, side), torch.arange(8) % 4
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    slope = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.01 * p.grad / slope.sqrt()
    assert nn.functional.cross_entropy(model(x), y) < loss


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet18", {"num_classes": 0}, "num_classes=0"),
        ("vgg16", {"in_channels": -1}, "in_channels=-1"),
        ("resnet18", {"stem": "small"}, 'stem="small": "imagenet" or "cifar"'),
        ("cnn11", {"stem": "x"}, 'stem="x"'),
        ("cnn11", {"widths": (64, 128)}, "widths=(64, 128): channels of 5 stages"),
        ("cifar_vgg16_bn", {"widths": (64, 0, 1, 1, 1)}, "widths=(64, 0, 1, 1, 1): channels of 5 stages"),
        ("resnet50", {"widths": (64,)}, "widths=(64,): channels of 4 stages"),
        ("cifarnet", {"widths": ()}, "widths"),
    ],
)
def test_wrong_options_are_one_clear_line(name, options, said):
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        on_meta(name, **options)
    assert "\n" not in str(caught.value)
