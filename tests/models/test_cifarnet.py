"""cifarnet: its first layer whitens, its convolutions start as identities, its scales do not learn."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kasoku import models
from kasoku.cli import main
from kasoku.core.errors import InputError


def correlated_images(channels=3, count=200, side=16):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, channels, side + 4, side + 4, generator=generator)
    mix = torch.randn(channels, channels, generator=generator)
    smooth = nn.functional.avg_pool2d(noise, 5, stride=1) * 5 + 0.5 * noise[..., 2:-2, 2:-2]
    return torch.einsum("nchw,dc->ndhw", smooth, mix) + 1.0


def whitened_covariance(model, images):
    out = model.whitening(images).detach().transpose(0, 1).flatten(1)
    return torch.cov(out[: len(out) // 2]), out


@pytest.mark.parametrize("channels", [1, 3])
def test_first_layer_whitens_correlated_images(channels):
    model, images = models.cifarnet(in_channels=channels), correlated_images(channels)
    model.prepare(images, eps=0.0)
    covariance, out = whitened_covariance(model, images)
    assert torch.allclose(covariance, torch.eye(4 * channels), atol=0.01)
    assert torch.allclose(out[: 4 * channels], -out[4 * channels :], atol=1e-5)


@pytest.mark.data
def test_first_layer_whitens_real_images():
    folder = Path(os.environ.get("KASOKU_DATA", "")) / "cifar10"
    if not os.environ.get("KASOKU_DATA") or not folder.is_dir():
        pytest.skip("KASOKU_DATA names no folder with cifar10")
    mosaic = np.asarray(Image.open(folder / "train_00.webp").convert("RGB"))
    rows = mosaic.shape[0] // 32
    tiles = mosaic.reshape(rows, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)[:300]
    images = torch.from_numpy(tiles.copy()).float()
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    model = models.cifarnet()
    model.prepare(images)
    covariance, _ = whitened_covariance(model, images)
    variance = covariance.diagonal()
    assert (covariance - variance.diag()).abs().max() < 0.01
    assert variance[:6].sub(1).abs().max() < 0.05  # eps damps the directions of least variance
    assert variance.max() < 1.01


def test_preparation_is_reproducible_and_free_of_the_random_state():
    images = correlated_images()
    state = torch.get_rng_state()
    one, two = models.cifarnet(), models.cifarnet()
    torch.set_rng_state(state)
    one.prepare(images)
    assert torch.equal(torch.get_rng_state(), state)
    two.prepare(images)
    assert torch.equal(one.whitening.weight, two.whitening.weight)


def test_signs_hold_for_symmetric_patches():
    images = torch.randn(300, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    images = images + images.flip(3) + images.flip(2) + images.flip(2, 3)  # eigenvectors with elements of equal size
    one, two = models.cifarnet(in_channels=1), models.cifarnet(in_channels=1)
    one.prepare(images)
    two.prepare(images.flip(0) * (1 + 1e-6))
    assert torch.allclose(one.whitening.weight, two.whitening.weight, atol=1e-3)


def test_constant_images_give_finite_filters():
    model = models.cifarnet()
    model.prepare(torch.ones(10, 3, 8, 8))
    assert model.whitening.weight.isfinite().all()


@pytest.mark.parametrize(
    "images", [torch.rand(4, 1, 8, 8), torch.rand(0, 3, 8, 8), torch.rand(4, 3, 1, 8), torch.ones(4, 3, 8, 8).byte()]
)
def test_images_that_cannot_be_whitened_are_refused(images):
    with pytest.raises(InputError, match="whitening takes"):
        models.cifarnet().prepare(images)


def test_convolutions_start_as_identities():
    conv = models.cifarnet().group1.conv1
    x = torch.randn(2, 24, 8, 8)
    assert torch.allclose(conv(x)[:, :24], x, atol=1e-6)


def test_only_biases_convolutions_and_head_learn():
    model = models.cifarnet()
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    norms = {f"group{g}.norm{n}.weight" for g in (1, 2, 3) for n in (1, 2)}
    assert fixed == norms | {"whitening.weight"}
    assert all(m.weight.eq(1).all() for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_settings_reach_the_network():
    model = models.cifarnet(100, widths=(8, 16, 24), norm_momentum=0.2)
    assert model.head.weight.shape == (100, 24)
    assert model.group2.norm1.momentum == 0.2
    x = torch.randn(2, 3, 32, 32)
    full = model.eval()(x)
    model.head_scale = 1.0
    assert torch.allclose(model(x), 24 * full)


def test_grey_28_by_28_fits():
    assert models.cifarnet(in_channels=1)(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_a_channel_that_is_constant_in_a_batch_does_not_blow_up(tmp_path):
    """Of 16 plain digits at one pixel each; with an epsilon of 1e-12 the loss was NaN at step 2."""
    settings = [
        "techniques=[{use='kasoku.distributed.AllReduce', exact=true}]",
        "norm_batch=16",
        "epochs=0.2",
        "evaluate.target=0",
    ]
    options = [word for setting in (*settings, "device.precision=fp32") for word in ("--set", setting)]
    assert main(["train", "digits_cnn_98", *options, "--quiet", "--out", str(tmp_path / "run")]) == 0
