"""The strategies on planted curves: [002]'s sizes, and searches against an exhaustive sweep."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from helpers.planted import CURVES, Planted
from kasoku.core import InputError
from kasoku.tune import strategies
from kasoku.tune.measurement import interval
from kasoku.tune.strategies import EpochTimeMinimize, GpuUsageMaximize, Strategy, Throughput, TimeToTarget

GROWN = [32, 34, 37, 41, 46, 52, 59, 67, 76, 86, 96]  # by one image more each loop, to ten at most
every_strategy = pytest.mark.parametrize(
    "strategy", [Throughput(), TimeToTarget(), EpochTimeMinimize(), GpuUsageMaximize()], ids=lambda s: type(s).__name__
)


def shortened(start: int, share: float) -> Planted:
    """Epochs of which `share` of the first one's time falls as 1 / batch."""
    return Planted(lambda b: share * start + (1 - share) * b)


@pytest.mark.parametrize(
    ("start", "share", "batch", "loops"),
    [(32, 0.877, 196, 20), (32, 0.72, 196, 20), (8, 0.152, 72, 10), (32, 0.15, 96, 10)],
    ids=["CIFAR-100 VGG16", "CIFAR-100 ResNet50", "ImageNet VGG16", "ImageNet ResNet50"],
)
def test_epoch_time_minimize_finds_the_sizes_of_002_in_its_loops(start: int, share: float, batch: int, loops: int):
    device = shortened(start, share)
    found = EpochTimeMinimize().search(device.tries(start))
    assert found.batch == batch
    assert len(device.tried) - 1 == loops
    assert f"converged in {loops} loops" in found.why


def test_epoch_time_minimize_takes_the_steps_of_002():
    device = shortened(32, 0.15)
    EpochTimeMinimize().search(device.tries(32))
    assert device.tried == GROWN


def test_gpu_usage_maximize_grows_to_the_target_and_stays_there():
    device = Planted(lambda b: 10.0 + b, usage=lambda b: min(1.0, b / 59))
    found = GpuUsageMaximize().search(device.tries(32))
    assert device.tried[:7] == GROWN[:7]
    assert abs(found.batch - 59) <= 1
    assert "converged in 15 loops" in found.why


def test_gpu_usage_maximize_shrinks_where_less_will_do():
    device = Planted(lambda b: 10.0 + b, usage=lambda b: min(1.0, b / 20))
    found = GpuUsageMaximize().search(device.tries(32))
    assert abs(found.batch - 20) <= 2


def test_002s_strategies_end_with_the_last_size_that_fits():
    for strategy in (EpochTimeMinimize(), GpuUsageMaximize()):
        device = shortened(32, 0.95)
        device.fits = 90
        found = strategy.search(device.tries(32))
        assert device.tried == GROWN
        assert found.batch == 86
        assert "batch 96: out of memory" in found.why


def test_gpu_usage_maximize_begins_lower_where_its_start_does_not_fit():
    device = Planted(lambda b: 10.0 + b, usage=lambda b: 1.0 if b >= 24 else 0.9, fits=40)
    found = GpuUsageMaximize().search(device.tries(64))
    assert device.tried[:2] == [64, 32]
    assert found.batch <= 40


@pytest.mark.parametrize("jitter", [0.0, 0.005])
@pytest.mark.parametrize("name", CURVES)
def test_throughput_loses_3_percent_in_a_quarter_of_a_sweeps_time(name: str, jitter: float):
    device = Planted(CURVES[name], jitter=jitter, brief=True)
    found = Throughput().search(device.tries())
    sizes, sweep_s = device.sweep(512)

    def an_image_s(batch: int) -> float:
        return device.step_s(batch) / batch

    assert an_image_s(found.batch) <= 1.03 * min(map(an_image_s, sizes)), f"{found.batch} of {device.tried}"
    assert device.clock.now_s <= 0.25 * sweep_s, device.tried
    assert found.in_time


def test_throughput_stops_below_what_does_not_fit():
    device = Planted(CURVES["a line"], fits=200)
    found = Throughput().search(device.tries())
    sizes, _ = device.sweep(512)
    assert found.batch <= 200
    best = max(b / device.step_s(b) for b in sizes)
    assert found.batch / device.step_s(found.batch) >= 0.97 * best
    failed = [s.batch for s in found.samples if s.failed]
    assert failed == sorted(failed, reverse=True), "each one that failed bounds the next from above"


def test_an_interval_is_of_the_median_by_the_mad():
    middle, low, high = interval([1.0, 1.1, 0.9, 1.0, 50.0])
    assert middle == 1.0
    assert high - middle == pytest.approx(2 * 1.2533 * 1.4826 * 0.1 / math.sqrt(5))
    assert middle - low == pytest.approx(high - middle)


@pytest.mark.parametrize(("scale", "overhead"), [(100.0, 10.0), (1000.0, 50.0), (5.0, 10.0)])
def test_time_to_target_finds_the_best_product_of_speed_and_worth(scale: float, overhead: float):
    device = Planted(lambda b: overhead + b, noise=scale)
    found = TimeToTarget().search(device.tries())

    def goodput(batch: int) -> float:
        return batch / device.step_s(batch) * (scale + 8) / (scale + batch)

    best = max(range(8, 513), key=goodput)
    assert goodput(found.batch) >= 0.97 * goodput(best), f"{found.batch}, not {best}"
    assert found.epochs == pytest.approx([(scale + s.batch) / (scale + 8) for s in found.samples], rel=0.06)
    critical = max(8 * 2**k for k in range(7) if scale + 8 * 2**k <= 1.1 * (scale + 8))
    assert f"(critical batch {critical})" in found.why


def test_branches_have_twice_the_batch_of_one_another_equal_images_and_rates_that_follow():
    for scaling, power in (("linear", 1.0), ("sqrt", 0.5)):
        device = Planted(CURVES["a line"], noise=100.0)
        TimeToTarget(scaling=scaling).search(device.tries(64, most=300))
        sizes = [64, 16, 32, 64, 128, 256]  # the trunk first
        assert [batch for batch, _, _ in device.trained] == sizes
        assert [rate for _, rate, _ in device.trained] == pytest.approx([(b / 64) ** power for b in sizes])
        (_, _, trunk), *branches = device.trained
        images = {images for _, _, images in branches}
        assert images == {2 * trunk}
        assert 0 < 2 * trunk <= 50_000


@pytest.mark.parametrize("budget_s", [3e4, 3e5, 3e6])
def test_branches_take_at_most_half_of_the_budget(budget_s: float):
    device = Planted(CURVES["a line"], noise=100.0)
    curve = strategies._branched(device.tries(until_s=budget_s), 1.0)
    assert device.clock.now_s <= 0.52 * budget_s
    assert device.clock.now_s >= 0.1 * budget_s or device.trained[1][2] > 40_000
    assert len(curve) >= 2


def test_the_trunk_has_the_jobs_own_batch_or_the_smallest():
    for start, trunk in ((64, 64), (100, 100), (20, 16), (8, 8)):
        device = Planted(CURVES["a line"], noise=100.0)
        TimeToTarget().search(device.tries(start))
        assert device.trained[0][0] == trunk


def test_sizes_outside_the_branches_are_not_tried():
    device = Planted(CURVES["a line"], noise=100.0)
    TimeToTarget().search(replace(device.tries(128), images=600))
    assert {batch for batch, *_ in device.trained} == {32, 64, 128}, "each makes at least four updates"
    assert min(device.tried) == 32
    assert max(device.tried) <= 128


class Quadratic(Planted):
    """SGD on h w^2 / 2 in two directions, with noise: rates in proportion to the batch are stable below 213."""

    def branch(self, batch: int, rate: float, images: int) -> list[float]:
        trunk = not self.trained
        super().branch(batch, rate, images)
        dice, w, losses = random.Random(0), [1.0, 50.0] if trunk else self.state, []
        for step in range(1, images // batch + 1):
            noisy = [h * x + dice.gauss(0, 0.1 / math.sqrt(batch)) for h, x in zip((1.0, 0.01), w, strict=True)]
            w = [x - 0.3 * rate * g for x, g in zip(w, noisy, strict=True)]
            if step % (images // batch // 4) == 0:
                losses.append(sum(h * x * x for h, x in zip((1.0, 0.01), w, strict=True)))
        self.state = w if trunk else self.state
        return losses


def test_the_critical_batch_of_a_noisy_quadratic_is_the_largest_at_which_its_rate_is_stable():
    device = Quadratic(CURVES["launches for long"])
    found = TimeToTarget().search(replace(device.tries(), images=8192))
    assert "(critical batch 128)" in found.why
    assert 128 <= found.batch < 256
    assert Throughput().search(device.tries()).batch > 256


def test_time_to_target_takes_a_smaller_size_than_throughput_in_low_noise():
    device = Planted(CURVES["a line"], noise=20.0)
    assert TimeToTarget().search(device.tries()).batch < Throughput().search(device.tries()).batch / 4


def test_where_branches_show_nothing_time_to_target_is_throughput_and_says_so():
    flat, short = Planted(CURVES["a line"]), Planted(CURVES["a line"], noise=5.0)
    searched = [TimeToTarget().search(flat.tries()), TimeToTarget().search(replace(short.tries(), images=60))]
    assert flat.trained, "no branch learns"
    assert not short.trained, "too few images for two sizes"
    for found in searched:
        assert found.batch / flat.step_s(found.batch) >= 0.97 * 512 / flat.step_s(512)
        assert "without branches all images count the same" in found.why


def test_where_the_smallest_branch_does_not_learn_epochs_are_relative_to_the_next():
    class Sparse(Planted):
        def branch(self, batch: int, rate: float, images: int) -> list[float]:
            losses = super().branch(batch, rate, images)
            return losses if batch > 8 else [math.nan] * 4

    found = TimeToTarget().search(Sparse(CURVES["a line"], noise=100.0).tries())
    assert "times the epochs of batch 16" in found.why
    assert min(zip((s.batch for s in found.samples), found.epochs, strict=True), key=lambda pair: pair[1])[1] == 1


def test_a_size_that_does_not_fit_ends_the_branches():
    device = Planted(CURVES["a line"], noise=100.0, fits=100)
    found = TimeToTarget().search(device.tries())
    assert [batch for batch, *_ in device.trained] == [32, 8, 16, 32, 64]
    assert found.batch <= 100


def test_a_size_whose_branch_has_no_memory_is_not_chosen():
    class Short(Planted):
        def branch(self, batch: int, rate: float, images: int) -> list[float]:
            return [] if batch > 64 else super().branch(batch, rate, images)

    device = Short(CURVES["a line"], noise=1e9)  # so that the largest would win
    found = TimeToTarget().search(device.tries())
    assert max(device.tried) > 64
    assert found.batch <= 64


def test_time_to_target_goes_by_a_curve_of_epochs_within_it():
    curve = ((16, 10.0), (64, 12.0), (256, 30.0))
    strategy = TimeToTarget(epochs=curve)
    device = Planted(CURVES["a line"], noise=1e9)
    found = strategy.search(device.tries())
    assert min(device.tried) >= 16
    assert max(device.tried) <= 256
    assert not device.trained
    logs, epochs = np.log([b for b, _ in curve]), [e for _, e in curve]
    target_s = {b: np.interp(math.log(b), logs, epochs) * device.step_s(b) / b for b in range(16, 257)}
    assert target_s[found.batch] <= 1.03 * min(target_s.values())
    assert found.epochs == pytest.approx(np.interp(np.log([s.batch for s in found.samples]), logs, epochs))


@pytest.mark.parametrize(
    "epochs", [((8, 10.0),), ((16, 10.0), (8, 9.0)), ((8, 10.0), (8, 11.0)), ((8, 10.0), (16, 0.0))]
)
def test_a_curve_that_is_none_is_refused(epochs: tuple[tuple[int, float], ...]):
    with pytest.raises(InputError, match=r"at least two pairs \(batch, epochs\)"):
        TimeToTarget(epochs=epochs)


@every_strategy
def test_sizes_are_multiples_within_the_limits(strategy: Strategy):
    device = Planted(CURVES["a line"], noise=50.0)
    found = strategy.search(device.tries(32, least=10, most=200, multiple=6))
    assert all(b % 6 == 0 and 12 <= b <= 198 for b in [*device.tried, found.batch])


@every_strategy
def test_when_time_is_over_it_is_the_best_so_far_and_says_so(strategy: Strategy):
    device = Planted(CURVES["launches for long"], noise=1e6)
    found = strategy.search(device.tries(until_s=1.0))
    assert len(device.tried) == 1
    assert found.batch == device.tried[0]
    assert not found.in_time
    assert found.why.startswith("time was over, the best so far")


@every_strategy
def test_where_nothing_fits_it_is_said(strategy: Strategy):
    device = Planted(CURVES["a line"], fits=2)
    with pytest.raises(InputError, match=r"batch=\d+: out of memory: start with a smaller batch"):
        strategy.search(device.tries(least=4))
    with pytest.raises(InputError, match=r"batch=\d+: out of memory: start with a smaller batch"):
        strategy.search(device.tries(least=8))


@every_strategy
def test_the_same_samples_give_the_same_search(strategy: Strategy):
    devices = [Planted(CURVES["a cliff at 94"], noise=100.0, jitter=0.02) for _ in range(2)]
    found = [strategy.search(d.tries()) for d in devices]
    assert found[0].batch == found[1].batch
    assert devices[0].tried == devices[1].tried


@pytest.mark.parametrize(("least", "most", "multiple"), [(64, 32, 1), (33, 60, 32), (8, 0, 1)])
def test_an_empty_range_is_refused(least: int, most: int, multiple: int):
    with pytest.raises(InputError, match=f"batches from {least} to {most}: none of them can be tried"):
        Planted(CURVES["a line"]).tries(least=least, most=most, multiple=multiple)


@pytest.mark.parametrize("gain", [0.0, 1.0, -0.1])
def test_a_gain_that_is_no_share_is_refused(gain: float):
    for kind in (Throughput, TimeToTarget):
        with pytest.raises(InputError, match=r"least_gain=.*: above 0 and below 1; a share such as 0.02"):
            kind(least_gain=gain)
