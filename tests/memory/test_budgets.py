"""A smaller budget never takes more, foreseen or measured; and the look leaves nothing behind."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from contracts import one_thread as one_thread
from kasoku.core import InputError, Job
from kasoku.device import ChannelsLast
from kasoku.memory import SavedMemory, larger, network
from kasoku.memory.look import install, watch
from kasoku.memory.network import Network, look
from kasoku.models.resnet import Bottleneck, ResNet
from kasoku.optim import sgd
from memory.nets import images, plain_chain


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return plain_chain() if name == "chain" else ResNet(Bottleneck, (2, 1, 1, 1), 4, 3, "imagenet", False)


def seen(model: nn.Module, x: torch.Tensor) -> Network:
    job = Job(model, lambda m: sgd(m, 0.1))
    found = look(job, install(job), x, lossless=False, freed=True)
    job.close()
    return found


def measured_peak(model: nn.Module, x: torch.Tensor, y: torch.Tensor, budget: float) -> int:
    """Bytes that torch's allocator had given out at most in a step, over those before it."""
    budget_text = f"{budget / 2**20:.4f}MiB"
    job = Job(model, lambda m: sgd(m, 0.1)).apply(ChannelsLast(), SavedMemory(budget=budget_text, show=False))

    def step() -> None:
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    job.close()
    return most


@pytest.mark.parametrize("name", ["chain", "bottlenecks"])
def test_the_peak_falls_or_stays_as_the_budget_shrinks(name):
    x, y = images(16, 48)
    x = x.contiguous(memory_format=torch.channels_last)
    planned = seen(made(name).to(memory_format=torch.channels_last), x)
    most, least = planned.plain_bytes(len(x)), smallest(planned)
    budgets = [most + (least - most) * i / 4 for i in range(5)]
    foreseen = [planned.choose(budget + 2**14).peak for budget in budgets]
    assert foreseen == sorted(foreseen, reverse=True)
    assert all(peak <= budget + 2**14 for peak, budget in zip(foreseen, budgets, strict=True))
    measured = [measured_peak(made(name), x, y, budget + 2**14) for budget in budgets]
    assert measured == sorted(measured, reverse=True)
    assert measured[-1] < 0.75 * measured[0]


def smallest(planned: Network) -> float:
    with pytest.raises(InputError, match=r"at least [0-9.,]+ MiB are needed") as raised:
        planned.choose(1)
    return float(str(raised.value).partition("at least ")[2].split()[0].replace(",", "")) * 2**20 + 2**17


def test_nothing_that_the_look_saw_stays_in_memory(monkeypatch):
    logs = []

    def watched(*arguments):
        log, outputs = watch(*arguments)
        logs.append(weakref.ref(log))
        return log, outputs

    monkeypatch.setattr(network, "watch", watched)
    seen(plain_chain(), images()[0])
    gc.collect()
    assert len(logs) == 1
    assert logs[0]() is None


@pytest.mark.parametrize(
    ("factor", "said"), [(1.5, r"batch 1.5x fits: \+\d+ % time"), (100, "batch 100x does not fit")]
)
def test_a_larger_batch_is_told_with_its_cost(factor, said):
    job = Job(made("chain"), lambda m: sgd(m, 0.1))
    assert re.fullmatch(said, larger(job, images(16, 48)[0], factor))
    job.close()
