"""The strategies on planted curves: [002]'s sizes, and searches against an exhaustive sweep."""

from __future__ import annotations

import math

import pytest

from helpers.planted import CURVES, Planted
from kasoku.core import InputError
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
        return batch / device.step_s(batch) * (scale + 32) / (scale + batch)

    best = max(range(8, 513), key=goodput)
    assert goodput(found.batch) >= 0.97 * goodput(best), f"{found.batch}, not {best}"
    assert found.epochs == pytest.approx([(scale + s.batch) / (scale + 32) for s in found.samples])
    assert f"{scale:,.0f} images" in found.why


def test_time_to_target_takes_a_smaller_size_than_throughput_in_low_noise():
    device = Planted(CURVES["a line"], noise=20.0)
    assert TimeToTarget().search(device.tries()).batch < Throughput().search(device.tries()).batch / 4


def test_time_to_target_without_a_noise_scale_is_throughput_and_says_so():
    one, other = Planted(CURVES["a line"]), Planted(CURVES["a line"])
    found = TimeToTarget().search(one.tries())
    assert found.batch == Throughput().search(other.tries()).batch
    assert "noise scale is unknown" in found.why


def test_time_to_target_goes_by_a_curve_of_epochs_within_it():
    curve = ((16, 10.0), (64, 12.0), (256, 30.0))
    strategy = TimeToTarget(epochs=curve)
    device = Planted(CURVES["a line"], noise=1e9)
    found = strategy.search(device.tries())
    assert min(device.tried) >= 16
    assert max(device.tried) <= 256
    target_s = {b: strategy.epochs_at(b, 0, None) * device.step_s(b) / b for b in range(16, 257)}
    assert target_s[found.batch] <= 1.03 * min(target_s.values())
    assert [strategy.epochs_at(b, 0, None) for b in (16, 32, 64, 256)] == pytest.approx([10, 11, 12, 30])


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
