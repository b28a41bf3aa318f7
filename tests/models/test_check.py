"""Images that a network cannot take are refused in one line, and the check leaves no trace."""

import copy
import re

import pytest
import torch
from torch import nn

from kasoku import models
from kasoku.core.errors import InputError


def on_meta(name, **options):
    with torch.device("meta"):
        return getattr(models, name)(**options)


@pytest.mark.parametrize(
    ("name", "side", "least"), [("alexnet", 32, 63), ("vgg16_bn", 28, 32), ("cifar_vgg16", 28, 32), ("cifarnet", 8, 9)]
)
def test_too_small_images_are_told_the_smallest_size_that_works(name, side, least):
    model = on_meta(name)
    with pytest.raises(InputError, match=f"{name} .*3x{side}x{side}.* at least {least}x{least}") as caught:
        models.check_fits(model, (3, side, side), name)
    assert "\n" not in str(caught.value)
    models.check_fits(model, (3, least, least), name)
    with pytest.raises(InputError):
        models.check_fits(model, (3, least - 1, least), name)


def test_wrong_channels_name_the_option_to_set():
    with pytest.raises(InputError, match="takes 3 channels; those of kasoku and timm are built for 1"):
        models.check_fits(on_meta("resnet18"), (1, 28, 28), "resnet18")


def test_a_head_made_for_one_size_names_that_size():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 32 * 32, 10))
    with pytest.raises(InputError, match="it takes 32x32"):
        models.check_fits(model, (3, 28, 28), "mine")
    models.check_fits(model, (3, 32, 32), "mine")


def test_a_model_that_fits_nothing_says_why():
    with pytest.raises(InputError, match=r"nor any size from 8 to 512: .*3072"):
        models.check_fits(nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), (3, 32, 32), "mine")


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 5)

    def forward(self, x):
        return self.head(x.flatten(1) * float(x.mean() > -1))


def test_a_model_that_reads_values_computes_its_outputs_once():
    model = Reads().train()
    assert models.check_fits(model, (3, 8, 8), "reads") == 5
    assert model.training
    with pytest.raises(InputError, match=r"reads has fewer outputs than the data has classes \(6\)"):
        models.check_fits(model, (3, 8, 8), "reads", classes=6)
    assert models.check_fits(model, (3, 9, 9), "reads") == 0  # it fails for real, as the training will


def test_a_network_made_for_one_size_is_told_the_sizes_it_can_be_made_for():
    def at(side):
        if side % 16:
            raise AssertionError("patches")
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 5))

    assert models.check_fits(at(32), (3, 32, 32), "patchy", at=at) == 5
    with pytest.raises(InputError, match="patchy does not fit images of 3x40x40: it takes 16x16, 32x32, 48x48, 64x64"):
        models.check_fits(at(48), (3, 40, 40), "patchy", at=at)


def test_an_assertion_of_a_network_is_a_misfit():
    class Asserts(nn.Module):
        def forward(self, x):
            assert x.shape[-1] >= 32, "too small"
            return x.flatten(1)

    with pytest.raises(InputError, match="it needs at least 32x32"):
        models.check_fits(Asserts(), (3, 8, 8), "mine")


@pytest.mark.parametrize("training", [True, False])
def test_the_check_changes_neither_the_model_nor_the_random_state(training):
    model = models.cifarnet().train(training)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    models.check_fits(model, (3, 32, 32), "cifarnet")
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(m.training is training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_wide_image_is_checked_in_both_directions():
    with pytest.raises(InputError, match=re.escape("3x20x200")):
        models.check_fits(on_meta("vgg16"), (3, 20, 200), "vgg16")
