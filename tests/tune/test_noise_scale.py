"""The gradient noise scale of problems whose scale is known."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from kasoku.tune.trial import NoiseEstimate, mean, noise_of_parts

DIMS, PLACE = 50, 0.5
SIGNAL, TRACE = DIMS * PLACE**2, float(DIMS)  # of the gradient w - mean(x) with x ~ N(0, 1)


def planted(images: int, parts: int, generator: torch.Generator) -> NoiseEstimate:
    """The estimate of one step on the bowl |w - x|^2 / 2."""
    w = nn.Parameter(torch.full((DIMS,), PLACE))

    def backwards() -> Iterator[int]:
        for _ in range(parts):
            x_ND = torch.randn(images, DIMS, generator=generator)
            (0.5 * (w - x_ND).square().sum(1)).mean().backward()
            yield images

    noise = noise_of_parts([w, nn.Parameter(torch.zeros(3))], backwards())  # one that gets no gradient
    assert noise is not None
    assert w.grad is None
    return noise


@pytest.mark.parametrize(("images", "parts", "times"), [(1, 2, 1600), (8, 8, 200), (32, 4, 200)])
def test_the_scale_of_a_planted_bowl_is_found(images: int, parts: int, times: int):
    generator = torch.Generator().manual_seed(images)
    noises = [planted(images, parts, generator) for _ in range(times)]
    found = mean(noises)
    assert found is not None
    assert found.signal == pytest.approx(SIGNAL, rel=0.06)
    assert found.trace == pytest.approx(TRACE, rel=0.06)
    assert found.scale == pytest.approx(TRACE / SIGNAL, rel=0.1)


def test_expected_lengths_give_the_planted_numbers_exactly():
    signal, trace, images = 3.0, 50.0, 4
    # a common part and opposite noise: the lengths that are expected of gradients of 4 and of 8 images
    common, noise = (signal + trace / (2 * images)) ** 0.5, (trace / (2 * images)) ** 0.5
    w = nn.Parameter(torch.zeros(2))

    def backwards() -> Iterator[int]:
        for sign in (1, -1):
            w.grad = torch.tensor([common, sign * noise])
            yield images

    found = noise_of_parts([w], backwards())
    assert found is not None
    assert (found.signal, found.trace) == pytest.approx((signal, trace))
    assert found.scale == pytest.approx(trace / signal)


def test_a_signal_lost_in_the_noise_has_no_scale():
    assert NoiseEstimate(-0.1, 5.0).scale == math.inf
    assert NoiseEstimate(float("nan"), 5.0).scale == math.inf
    assert NoiseEstimate(2.0, -1.0).scale == 0.0


def test_what_is_not_finite_does_not_spoil_the_mean():
    found = mean([NoiseEstimate(1.0, 4.0), NoiseEstimate(float("inf"), 1.0), NoiseEstimate(3.0, 8.0)])
    assert found == NoiseEstimate(2.0, 6.0)
    assert mean([]) is None


def test_one_part_tells_nothing():
    w = nn.Parameter(torch.ones(2))
    w.sum().backward()
    assert noise_of_parts([w], [8]) is None
