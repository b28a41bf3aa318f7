"""Sizes are tried on copies: nothing of the job changes, ranks agree, and what fails holds up no one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contracts import Net, assert_same, make, rule, train, weights
from helpers.planted import Hand, Slow
from helpers.toy_images import image_job, judged
from kasoku.core import Comm, DeadlockError, InputError, Job, Linear, Solo, Technique, Threads
from kasoku.core.files import json_text
from kasoku.data import Augment, Loader, Mix, digits, loader
from kasoku.device import Autocast, ChannelsLast, Compile, LossScale, Seeded
from kasoku.distributed import AllReduce, Overlap, VirtualRanks
from kasoku.models import cifarnet
from kasoku.optim import EMA, Clip, Rate, sgd
from kasoku.tune import EpochTimeMinimize, GpuUsageMaximize, Throughput, TimeToTarget, tune_batch_size
from kasoku.tune.measurement import BatchSizeResult, Measurement, MemoryForecast
from kasoku.tune.strategies import Strategy
from kasoku.tune.trial import Sandbox, copy_of

pytestmark = pytest.mark.usefixtures("ticking")

SETS: dict[str, tuple[Technique, ...]] = {
    "nothing": (),
    "as the trainer does": (ChannelsLast(), Seeded(3), Rate(Linear(epochs=12, warmup=1)), Overlap()),
    "an average": (EMA(decay=0.8, every=2), Clip(norm=0.5), AllReduce()),
    "another": (EMA(decay=0.5, every=3, warmup=False), Seeded(4)),
    "statistics": (VirtualRanks(norm_batch=8, average=0.5), Autocast("bf16"), Seeded(1)),
    "losses": (Mix(0.1, 0.1), LossScale(start=1024.0, every=2)),
    "compiled": (Compile(backend="eager"), Seeded(2)),
}


def tuned(job: Job, strategy: Strategy | None = None, **more: Any) -> BatchSizeResult:
    return tune_batch_size(job, strategy or TimeToTarget(), **{"most": 32, **more})


def chosen(found: BatchSizeResult) -> Measurement:
    """The measurement of the size that was found."""
    return next(sample for sample in found.samples if sample.batch == found.batch)


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


WHOLE = {"as the trainer does", "statistics", "compiled"}  # sets that are tried without accumulation by default
PAIRS = [
    pytest.param(name, parts, marks=[] if (parts == 1) == (name in WHOLE) else pytest.mark.exhaustive)
    for name in SETS
    for parts in (1, 2)
]


@pytest.mark.parametrize(("name", "accumulate"), PAIRS)
def test_a_training_goes_on_bit_for_bit_as_if_nothing_had_been_tried(name: str, accumulate: int):
    jobs = []
    for tries in (False, True):
        torch.manual_seed(7)
        job = image_job(*SETS[name], accumulate=accumulate)
        train(job, 3)  # in mid-epoch
        if tries:
            before = random_states(), weights(job), job.hyper(), job.plain_loader.state_dict()
            found = tuned(job)
            assert len(found.samples) > 1
            assert random_states() == before[0]
            assert_same(weights(job), before[1])
            assert (job.hyper(), job.plain_loader.state_dict()) == before[2:]
        train(job, 4)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))
    assert torch.equal(judged(jobs[0]), judged(jobs[1]))
    assert jobs[0].hyper() == jobs[1].hyper()


def test_it_may_be_called_before_the_first_step():
    jobs = []
    for tries in (False, True):
        torch.manual_seed(7)
        job = image_job(EMA(decay=0.8), Seeded(3))
        if tries:
            tuned(job)
            assert all(p.grad is None for p in job.model.parameters())
            assert not job.optimizer.state
        train(job, 4)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))


def small_job(batch: int = 64, **more: Any) -> Job:
    """A real loader and a small network for the digits."""
    dataset = digits()
    torch.manual_seed(0)
    model = cifarnet(len(dataset.classes), in_channels=dataset.channels, widths=(16, 16))
    train_loader = loader(dataset, "train", batch)
    return Job(model, lambda m: sgd(m, lr=0.05), loader=train_loader, **more).apply(Augment(translate=1), Seeded(0))


def test_the_order_of_the_data_stays():
    jobs = [small_job(), small_job()]
    for job in jobs:
        for _ in zip(range(3), job.loader, strict=False):
            pass
    found = tuned(jobs[1], Throughput(), most=256)
    assert jobs[0].plain_loader.state_dict() == jobs[1].plain_loader.state_dict()
    assert (jobs[1].plain_loader.batch, len(jobs[1].loader)) == (64, len(jobs[0].loader))
    assert chosen(found).images_per_s > 0
    for (x, y), (other_x, other_y) in zip(jobs[0].loader, jobs[1].loader, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def slow_job(clock: Hand, cliff: int = 10**9) -> Job:
    """A step takes 4 ms whatever the batch, and 40 ms beyond a cliff."""
    model = Slow(clock, lambda images: 0.004 if images <= cliff else 0.04)
    return image_job(model=model, comm=Solo(clock))


def test_throughput_finds_the_largest_where_steps_take_the_same():
    found = tuned(slow_job(Hand()), Throughput(), most=64)
    assert found.batch == 64
    assert found.strategy == "Throughput"
    sample = chosen(found)
    assert sample.step_s == pytest.approx(0.004)
    assert sample.low_s <= sample.step_s <= sample.high_s


def test_throughput_stays_below_a_cliff():
    assert tuned(slow_job(Hand(), cliff=32), Throughput(), most=64).batch == 32


def test_waiting_for_input_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    quick = tuned(slow_job(Hand()), Throughput(), least=32, most=32).samples[0]
    assert (quick.input_s, quick.step_s) == pytest.approx((0.0, 0.004))
    clock, read = Hand(), Loader.__iter__

    def slowly(batches: Loader) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in read(batches):
            clock.now_s += 0.010
            yield batch

    monkeypatch.setattr(Loader, "__iter__", slowly)
    sample = tuned(slow_job(clock), Throughput(), least=32, most=32).samples[0]
    assert (sample.input_s, sample.step_s) == pytest.approx((0.010, 0.014))


@pytest.mark.parametrize("strategy", [Throughput(), TimeToTarget(), EpochTimeMinimize(), GpuUsageMaximize()])
def test_every_strategy_runs_on_a_real_job(strategy: Strategy):
    found = tuned(small_job(32), strategy, least=16, most=48, budget_s=5.0)
    assert 16 <= found.batch <= 48
    assert found.budget_s == 5.0
    assert found.spent_s > 0
    assert all(0 <= s.utilisation <= 1 for s in found.samples)


def test_branches_show_how_the_digits_need_more_epochs_with_a_larger_batch():
    job = small_job()
    before = weights(job)
    found = tuned(job, most=512)
    assert_same(weights(job), before)
    assert "times the epochs of batch 16 (critical batch " in found.why
    epochs = dict(sorted(zip((s.batch for s in found.samples), found.epochs, strict=True)))
    assert [*epochs.values()] == sorted(epochs.values())
    assert epochs[16] == 1
    assert max(epochs.values()) > 1.2


def test_a_budget_too_short_gives_the_first_size_and_says_so():
    found = tuned(image_job(), budget_s=1e-6)
    assert (found.batch, len(found.samples), found.in_time) == (8, 1, False)
    assert "time was over" in found.why


def test_the_steps_of_a_copy_are_those_of_the_job():
    job = image_job(ChannelsLast(), Autocast("bf16"), Overlap(), EMA(decay=0.5))
    calls: list[int] = []
    sandbox = Sandbox(job)
    alone = sandbox.at(8)
    assert [type(t).__name__ for t in alone.applied] == ["Autocast", "EMA", "Overlap"]
    alone.model.register_forward_hook(lambda m, args, out: calls.append(len(args[0])))
    x_NCHW, _ = next(iter(alone.loader))
    assert alone.model(x_NCHW).shape == (8, 4)
    assert calls == [8]
    assert alone.model.stage[1].conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_has_hooks_of_the_user_and_none_of_techniques():
    calls: list[str] = []
    model = Net()
    model.head.register_forward_hook(lambda *_: calls.append("user"))
    job = image_job(VirtualRanks(norm_batch=8), Autocast("bf16"), model=model)
    train(job, 1)
    calls.clear()
    other, optimizer = copy_of(job)
    assert all("forward" not in vars(m) and "steer" not in vars(m) for m in other.modules())
    assert not other._forward_hooks
    assert model._forward_hooks, "the job keeps its own"
    other(torch.zeros(8, 3, 8, 8))
    assert calls == ["user"]
    params = dict(other.named_parameters())
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in params.values()}
    for name, p in model.named_parameters():
        twin = params[name]
        assert torch.equal(p, twin)
        assert p.data_ptr() != twin.data_ptr()
        buffer, own = optimizer.state[twin]["momentum_buffer"], job.optimizer.state[p]["momentum_buffer"]
        assert torch.equal(buffer, own)
        assert buffer.data_ptr() != own.data_ptr()


# ---- ranks


class Bounded(Net):
    """Raises at more images than it takes."""

    def __init__(self, most: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.most, self.error = most, error

    def forward(self, x_NCHW: Tensor) -> Tensor:
        if len(x_NCHW) > self.most:
            raise self.error()
        return super().forward(x_NCHW)


def on_ranks(model: Callable[[int], nn.Module], *techniques: Technique, **more: Any) -> list[BatchSizeResult]:
    def rank(comm: Comm) -> BatchSizeResult:
        return tuned(image_job(*techniques, model=model(comm.rank), comm=comm), **more)

    return Threads(2).run(rank)


@pytest.mark.parametrize("strategy", [Throughput(), TimeToTarget(), EpochTimeMinimize()])
@pytest.mark.parametrize("technique", [AllReduce(), Overlap()])
def test_all_ranks_find_the_same(strategy: Strategy, technique: Technique):
    one, other = on_ranks(lambda _: Net(), technique, strategy=strategy)
    assert [s.batch for s in one.samples] == [s.batch for s in other.samples]
    assert [s.step_s for s in one.samples] == [s.step_s for s in other.samples]
    assert one.batch == other.batch
    assert one.batch % 2 == 0


def test_a_rank_out_of_memory_bounds_all_and_holds_up_no_one():
    def model(rank: int) -> nn.Module:
        return Bounded(8 if rank else 10**6, lambda: torch.OutOfMemoryError("planted"))

    found = on_ranks(model, Overlap(), strategy=Throughput(), most=64)
    assert found[0].batch == found[1].batch <= 16
    for one in found:
        assert [s.failed for s in one.samples if s.batch > 16] == ["out of memory"] * sum(
            s.batch > 16 for s in one.samples
        )
        assert any(s.failed for s in one.samples)


def test_another_error_on_one_rank_ends_all():
    def model(rank: int) -> nn.Module:
        return Bounded(8 if rank else 10**6, lambda: InputError("planted"))

    with pytest.raises(InputError, match=r"planted|another rank could not make a step") as error:
        on_ranks(model, AllReduce(), strategy=Throughput(), most=64)
    assert not isinstance(error.value, DeadlockError)


def test_a_rank_that_cannot_copy_its_model_ends_all():
    class Stuck(Net):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise InputError("planted")

    with pytest.raises(InputError, match=r"planted|another rank could not copy"):
        on_ranks(lambda rank: Stuck() if rank else Net())


def test_a_size_that_one_rank_foresees_not_to_fit_is_tried_by_none(monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []
    monkeypatch.setattr(MemoryForecast, "fits", lambda self, batch: batch <= 16)

    class Told(Net):
        def forward(self, x_NCHW: Tensor) -> Tensor:
            tried.append(len(x_NCHW))
            return super().forward(x_NCHW)

    found = on_ranks(lambda _: Told(), strategy=Throughput(), most=64)
    assert found[0].batch == found[1].batch <= 16
    assert max(tried) <= 8, "of each of two ranks"
    assert any(s.failed == "it would not fit in memory" for s in found[0].samples)


def test_where_no_size_fits_it_is_said():
    with pytest.raises(InputError, match="batch=8: out of memory: start with a smaller batch"):
        tuned(image_job(model=Bounded(2, MemoryError)), Throughput())


# ---- what is refused


def test_bad_settings_are_one_clear_line_each():
    with pytest.raises(InputError, match="budget_s=0: above 0; seconds"):
        tuned(image_job(), budget_s=0)
    with pytest.raises(InputError, match="least=-1: at least 0; images, or 0 to choose by the job"):
        tuned(image_job(), least=-1)
    with pytest.raises(InputError, match="batches from 40 to 32: none of them can be tried"):
        tuned(image_job(), least=40)
    with pytest.raises(InputError, match="batches from 100 to 64"):
        tuned(image_job(), least=100, most=200)  # an epoch has 64 images
    with pytest.raises(InputError, match="loader: a ToyBatches cannot change its batch: take kasoku"):
        tuned(make())
    with pytest.raises(InputError, match="loader: a tuple cannot change its batch"):
        tuned(Job(Net(), rule))


# ---- what is kept


def test_tuning_json_has_what_the_page_shows():
    samples = (
        Measurement(8, 0.1, 0.09, 0.11, input_s=0.01, utilisation=0.5),
        Measurement(16, 0.15, 0.14, 0.16),
        Measurement(32, failed="out of memory"),
    )
    epochs, speeds = (1.0, 1.5, 2.5), (100.0, 50.0)
    found = BatchSizeResult(16, samples, "planted", 3.0, True, epochs, "TimeToTarget", 60.0, speeds)
    text = json_text(found.as_json())
    assert "NaN" not in text
    assert "Infinity" not in text
    told = json.loads(text)
    assert (told["strategy"], told["chosen"]) == ("TimeToTarget", 16)
    assert (told["spent_s"], told["budget_s"], told["speeds"]) == (3.0, 60.0, [100.0, 50.0])
    first, second, failed = told["samples"]
    keys = {"batch", "step_s", "low_s", "high_s", "images_per_s", "utilisation", "epochs", "goodput", "failed"}
    assert keys <= first.keys()
    assert first["images_per_s"] == pytest.approx(80)
    assert second["goodput"] == pytest.approx(16 / 0.15 / 1.5)
    assert second["utilisation"] is None
    assert (failed["step_s"], failed["failed"]) == (None, "out of memory")
