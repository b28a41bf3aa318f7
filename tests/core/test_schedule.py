"""Schedules against published values."""

from dataclasses import replace

import pytest

from kasoku.core import ArcCotangent, Constant, Cosine, InputError, Linear, Polynomial, Schedule, StepDecay


@pytest.mark.parametrize(
    ("decay", "epoch", "factor"),
    [
        (5, 15, 0.998),
        (5, 30, 0.996),
        (5, 50, 0.974),
        (5, 60, 0.898),
        (5, 65, 0.769),
        (5, 68, 0.623),
        (5, 70, 0.500),
        (5, 72, 0.273),
        (5, 75, 0.102),
        (5, 80, 0.026),
        (5, 90, 0.004),
        (20, 50, 0.965),
        (20, 60, 0.813),
        (20, 65, 0.614),
        (20, 70, 0.500),
        (20, 72, 0.418),
        (20, 75, 0.187),
        (20, 80, 0.035),
    ],
)
def test_arc_cotangent_is_the_published_code(decay: float, epoch: float, factor: float):
    assert ArcCotangent(turn=70, decay=decay)(epoch) == pytest.approx(factor, abs=5e-4)
    assert ArcCotangent(decay=decay).over(30)(epoch / 3) == pytest.approx(factor, abs=5e-4)


def test_arc_cotangent_rises_to_its_own_value_at_the_end_of_the_warm_up():
    schedule = ArcCotangent(warmup=15, turn=70, decay=5)
    assert schedule(0) == 0
    assert schedule(7.5) == pytest.approx(schedule(15) / 2)
    assert schedule(15) == pytest.approx(0.998, abs=5e-4)


def test_mlperf_polynomial():
    # step <= W: lr0 * step / W; after: (lr0 - end) * (1 - (step - W) / D)^2 + end, in epochs: 90, of them 5 warm-up
    lr0, end, total, warm = 10.0, 1e-4, 90, 5
    schedule = Polynomial(warmup=warm, epochs=total, end=end / lr0)
    for epoch in (0, 1, 2.5, 5, 6, 47.5, 89, 90, 95):
        if epoch <= warm:
            wanted = lr0 * epoch / warm
        else:
            passed = min(1.0, (epoch - warm) / (total - warm))
            wanted = (lr0 - end) * (1 - passed) ** 2 + end
        assert lr0 * schedule(epoch) == pytest.approx(wanted, rel=1e-12)


def test_goyal_steps_with_five_epochs_of_warm_up():
    # 0.1 * 8192 / 256 = 3.2, reached after 5 epochs from 0.1; a tenth at 30, 60, 80
    lr = 3.2
    schedule = StepDecay(warmup=5, start=0.1 / lr, milestones=(30, 60, 80))
    found = [lr * schedule(epoch) for epoch in (0, 2.5, 5, 29.9, 30, 59.9, 60, 80, 89)]
    assert found == pytest.approx([0.1, 1.65, 3.2, 3.2, 0.32, 0.32, 0.032, 0.0032, 0.0032])


def test_linear_and_cosine_end_where_they_say():
    assert Linear(epochs=8)(2) == 0.75
    assert Linear(epochs=8, end=0.5)(9) == 0.5
    assert Cosine(epochs=10, warmup=2)(6) == pytest.approx(0.5)
    assert Cosine(epochs=10)(10) == pytest.approx(0)
    assert Constant()(1e6) == 1
    assert Constant(warmup=4)(1) == 0.25


def test_a_schedule_without_epochs_takes_those_of_the_training():
    assert Linear().over(8) == Linear(epochs=8)
    assert Cosine(warmup=1, end=0.5).over(8) == Cosine(warmup=1, end=0.5, epochs=8)
    assert Polynomial(epochs=5).over(8) == Polynomial(epochs=5)
    with pytest.raises(InputError, match=r"Linear without epochs.*as Linear\(epochs=8\)"):
        Linear()(0.5)
    with pytest.raises(InputError, match="beyond warmup=2"):
        Linear(warmup=2).over(2)


@pytest.mark.parametrize(
    ("shares", "epochs"),
    [
        (Constant(warmup=0.25, start=0.5), Constant(warmup=10, start=0.5)),
        (StepDecay(warmup=0.125, milestones=(0.5, 0.75)), StepDecay(warmup=5, milestones=(20, 30))),
        (Linear(warmup=0.1), Linear(warmup=4, epochs=40)),
        (ArcCotangent(warmup=0.1, turn=0.5, epochs=90), ArcCotangent(warmup=9, turn=45)),
        (ArcCotangent(warmup=0.1, turn=30), ArcCotangent(warmup=4, turn=30)),
    ],
)
def test_times_below_one_are_shares_of_the_training(shares: Schedule, epochs: Schedule):
    times = [i / 2 for i in range(200)]
    assert [shares.over(40)(t) for t in times] == pytest.approx([epochs(t) for t in times], abs=1e-12)
    assert [replace(epochs, epochs=90)(t) for t in times] == [epochs(t) for t in times] or isinstance(epochs, Linear)
    if not shares.epochs:
        assert [shares.over(20)(t) for t in times[:3]] != [epochs(t) for t in times[:3]]
        with pytest.raises(InputError, match=r"without epochs: give the epochs of the training"):
            shares(1)


def test_a_schedule_that_ends_within_its_warm_up_is_refused():
    with pytest.raises(InputError, match=r"epochs=5.*beyond warmup=5"):
        Polynomial(warmup=5, epochs=5)
    with pytest.raises(InputError, match="warmup=-1: at least 0"):
        Constant(warmup=-1)
    with pytest.raises(InputError, match="decay=0: above 0"):
        ArcCotangent(decay=0)
