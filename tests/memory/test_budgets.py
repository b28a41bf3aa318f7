"""A smaller budget never takes more, foreseen or measured; and the look leaves nothing behind."""

import gc
import weakref

import pytest
import torch
from torch import nn

from helpers.nets import blocks, images, peak_of_step, plain_chain
from kasoku.core import InputError, Job, Technique
from kasoku.core.hardware import computes_bf16
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory, network
from kasoku.memory.inspection import install, record_forward
from kasoku.memory.network import InspectedNetwork, optimizer_bytes
from kasoku.memory.ops import Numerics
from kasoku.memory.saved_memory import BUDGET_SHARE
from kasoku.models.resnet import Bottleneck, ResNet
from kasoku.optim import sgd


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bottlenecks":
        return ResNet(Bottleneck, (2, 1, 1, 1), 4, 3, "imagenet")
    return plain_chain() if name == "chain" else blocks(Bottleneck)


def seen(model: nn.Module, x: torch.Tensor) -> InspectedNetwork:
    job = Job(model, lambda m: sgd(m, 0.1))
    found = InspectedNetwork(job, install(job), x, how=Numerics(), gradients_freed=True)
    job.close()
    return found


def measured_peak(model: nn.Module, x: torch.Tensor, y: torch.Tensor, budget: float) -> int:
    """Bytes that torch's allocator had given out at most in a step, over those before it."""
    return peak_of(model, x, y, SavedMemory(budget=f"{budget / 2**20:.4f}MiB", show=False))


def peak_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, technique: Technique) -> int:
    """The same with any technique."""
    job = Job(model, lambda m: sgd(m, 0.1)).apply(ChannelsLast(), technique)
    most = peak_of_step(job, x, y)
    job.close()
    return most


@pytest.mark.parametrize("name", ["chain", "light", pytest.param("bottlenecks", marks=pytest.mark.exhaustive)])
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
    fixed = planned.outside.fixed
    assert all(fixed + taken <= budget + 2**14 for taken, budget in zip(measured, budgets, strict=True))


def smallest(planned: InspectedNetwork) -> float:
    with pytest.raises(InputError, match=r"at least [0-9.,]+ MiB are needed") as raised:
        planned.choose(1, share=BUDGET_SHARE)
    return float(str(raised.value).partition("at least ")[2].split()[0].replace(",", "")) * 2**20 + 2**17


def test_nothing_that_the_look_saw_stays_in_memory(monkeypatch):
    logs = []

    def recorded(*arguments):
        log = record_forward(*arguments)
        logs.append(weakref.ref(log))
        return log

    monkeypatch.setattr(network, "record_forward", recorded)
    seen(plain_chain(), images()[0])
    gc.collect()
    assert len(logs) == 1
    assert logs[0]() is None


def with_a_large_head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 4)),
    )


@pytest.mark.skipif(
    not computes_bf16(torch.device("cpu")), reason="this processor does not compute bf16: convolutions take other room"
)
def test_copies_of_weights_under_autocast_are_counted_once():
    x, y = images(32, 32)
    x = x.contiguous(memory_format=torch.channels_last)
    job = Job(with_a_large_head(), lambda m: sgd(m, 0.1)).apply(ChannelsLast(), Autocast("bf16"))
    seen = InspectedNetwork(job, install(job), x, how=Numerics(), gradients_freed=False)
    job.close()
    measured = peak_of(with_a_large_head(), x, y, Autocast("bf16"))
    assert abs(seen.plain_bytes(len(x)) / (measured + seen.plain_outside.fixed) - 1) < 0.05


RULES = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
}


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_keeps_is_foreseen(name):
    job = Job(made("chain"), RULES[name])
    before, (x, y) = optimizer_bytes(job), images()
    job.loss(job.model(x), y).backward()
    job.optimizer.step()
    few = 64 * len(job.optimizer.state)  # counts of steps
    assert before <= optimizer_bytes(job) <= before + few


class Keeps(torch.optim.SGD):
    """A rule that keeps what nobody can foresee."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
        return super().step(closure)


def test_a_plan_is_made_anew_when_the_rule_keeps_more_than_foreseen():
    job = Job(made("chain"), lambda m: Keeps(m.parameters(), 0.1)).apply(SavedMemory(factor=1, show=False))
    planner = next(hook.__self__ for hook in job.model._forward_pre_hooks.values())
    x, y = images()
    plans = []
    for _ in range(3):
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        plans.append(planner.plan)
    assert plans[0] is not plans[1] is plans[2]
    assert plans[1].peak == plans[0].peak + sum(p.nbytes for p in job.model.parameters())


class Gated(nn.Module):
    """A gate as large as the images, made of one weight."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1, 8, 1, 1))

    def forward(self, x):
        return x * torch.sigmoid(self.gate.expand(len(x), 8, *x.shape[2:]))


def test_what_is_computed_of_a_repeated_weight_grows_with_the_batch():
    def an_image(block):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), block, nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
        job = Job(model, lambda m: sgd(m, 0.1))
        found = InspectedNetwork(job, install(job), torch.zeros(64, 3, 16, 16), how=Numerics(), gradients_freed=True)
        job.close()
        return (found.plain_bytes(64) - found.plain_bytes(32)) / 32

    gate = 4 * 8 * 14 * 14
    assert an_image(Gated()) - an_image(nn.Identity()) == pytest.approx(2 * gate, rel=0.05)  # and what it gives
