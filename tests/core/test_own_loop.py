"""What a loop of one's own may do with a job, and what is refused in one line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from contracts import assert_same
from contracts import one_thread as one_thread
from kasoku.core import Constant, InputError, Job, Linear
from kasoku.data import LowResolution, Mix
from kasoku.device import LossScale
from kasoku.optim import EMA, Rate
from kasoku.tracking import Track

BATCHES = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))


def batches() -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    images = torch.rand(4 * BATCHES, 3, 8, 8, generator=random)
    return DataLoader(TensorDataset(images, torch.arange(4 * BATCHES) % 3), batch_size=4)


def made(*techniques: Any, loader: Any = None) -> tuple[Job, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, loader=batches() if loader is None else loader).apply(*techniques), optimizer


def train(job: Job, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor] = cross_entropy) -> list[int]:
    """An epoch with the user's own objects; returns the width of each batch."""
    widths = []
    for x_NCHW, y_N in job.loader:
        widths.append(x_NCHW.shape[3])
        loss(job.model(x_NCHW), y_N).backward()
        optimizer.step()
        optimizer.zero_grad()
    return widths


def test_steps_of_the_users_own_optimizer_are_counted() -> None:
    job, optimizer = made(LowResolution(4, until=1))
    assert train(job, optimizer) + train(job, optimizer) == [4] * BATCHES + [8] * BATCHES
    assert job.steps == 2 * BATCHES


def test_the_attributes_of_the_users_loader_stay() -> None:
    job, _ = made(LowResolution(4, until=1))
    assert len(job.loader.dataset) == 4 * BATCHES
    with pytest.raises(AttributeError, match="no attribute 'sets'"):
        _ = job.loader.sets


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.rand(3, 8, 8), torch.tensor(0))] * BATCHES)


def test_a_loader_without_a_length_is_named_where_epochs_count() -> None:
    loader: Any = DataLoader(Endless(), batch_size=2)
    with pytest.raises(InputError, match=r"the loader has no len\(\), by which epochs are counted"):
        made(Rate(Constant()), loader=loader)
    job, optimizer = made(EMA(decay=0.5), Mix(mixup=0.1), loader=loader)
    assert train(job, optimizer, job.loss) == [8] * (BATCHES // 2)
    assert len(list(job.loader)) == BATCHES // 2


@pytest.mark.parametrize("technique", [LossScale(), Mix(mixup=0.4)])
def test_a_loss_that_passes_the_job_by_is_refused(technique: Any) -> None:
    job, optimizer = made(technique)
    assert train(job, optimizer, job.loss) == [8] * BATCHES
    with pytest.raises(InputError, match=r"job\.loss"):
        train(job, optimizer)


def test_a_scale_does_not_fall_without_end() -> None:
    job, optimizer = made(LossScale(start=2.0**-99, factor=2.0**2))

    def infinite(outputs: Tensor, labels: Tensor) -> Tensor:
        return job.loss(outputs * torch.inf, labels)

    train(job, optimizer, infinite)
    assert job.kept("loss_scale").scale == 2.0**-100
    before = job.model[2].bias.detach().clone()
    train(job, optimizer, job.loss)
    assert not torch.equal(job.model[2].bias, before)


def test_rates_are_set_by_one_of_two() -> None:
    job, optimizer = made(Rate(Linear(epochs=1)))
    train(job, optimizer)
    job.close()
    again = Job(job.model, optimizer, loader=batches()).apply(Rate(Linear(epochs=2)))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InputError, match="Rate: a torch lr_scheduler sets this optimizer's rates too"):
        train(again, optimizer)


def test_parameters_of_another_optimizer_are_averaged_too() -> None:
    averages = []
    for parts in ([["2.weight", "2.bias"]], [["2.weight"], ["2.bias"]]):
        model = network()
        named = dict(model.named_parameters())
        optimizers = [torch.optim.SGD([named[name] for name in names], lr=0.1) for names in parts]
        job = Job(model, optimizers[0], loader=batches()).apply(EMA(decay=0.5))
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            for optimizer in reversed(optimizers):  # that of the job is the last
                optimizer.step()
                optimizer.zero_grad()
        with job.evaluation() as averaged:
            averages.append({name: x.clone() for name, x in averaged.state_dict().items()})
    assert_same(*averages)


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as timm's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_runs_no_hooks_is_refused() -> None:
    model = network()
    job = Job(model, Wrapped(torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(2):
        with pytest.raises(InputError, match=r"Wrapped\.step\(\) runs no hooks: give Job the optimizer in it"):
            _ = job.optimizer


def test_a_tracker_that_was_not_opened_says_so(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    job, _ = made(Track(to="tensorboard"))
    for step in range(3):
        job.trackers[0].metrics(step, {"loss": 1.0})
    job.close()
    assert capsys.readouterr().err.count("before tracker.open(folder, settings)") == 1
