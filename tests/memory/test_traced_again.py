"""What the forward of a block decides by is seen when it changes, or the block is left to plain PyTorch."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from contracts import one_thread as one_thread
from kasoku.core import Job, Threads
from kasoku.memory import SavedMemory
from kasoku.memory.look import install
from kasoku.memory.network import look
from kasoku.memory.ops import How
from kasoku.memory.saved import Planner
from kasoku.memory.trace import graph_of
from kasoku.optim import sgd
from kasoku.parallel import Overlap
from memory.nets import images

SAVED = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)


class Block(nn.Module):
    """A convolution whose forward decides."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.skip, self.chance, self.plan = nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), False, 0.0, [1]

    def forward(self, x):
        if self.skip or (self.training and self.chance and torch.rand(1).item() < self.chance):
            return self.act(x)
        for _ in range(self.plan[0]):
            x = self.act(x)
        return self.conv(x)


def skips(block):
    block.skip = True


def skips_by_numpy(block):
    block.skip = np.bool_(True)


def throws(block):
    block.chance = 0.5


def acts_twice(block):
    block.plan[0] = 2


def has_another_layer(block):
    block.act = nn.Sigmoid()


def counts(block):
    block.steps = getattr(block, "steps", 0) + 1


@pytest.mark.parametrize("change", [skips, skips_by_numpy, throws, acts_twice, has_another_layer, counts])
def test_a_change_of_what_it_decides_by_is_seen(change):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Block(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    ours = copy.deepcopy(plain)
    Job(ours, lambda m: sgd(m, 0.1)).apply(SAVED)
    x, y = images()
    for model in (plain, ours):
        functional.cross_entropy(model(x), y).backward()
        change(model[2])
    for seed in range(4):
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(seed)
            functional.cross_entropy(model(x), y).backward()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)


class Dice(Block):
    def __init__(self, throw, own=None):
        super().__init__()
        self.throw, self.own = [throw], own

    def forward(self, x):
        return self.conv(x) if self.throw[0](self) < 0.99 else self.act(x)


DICE = {
    "numpy": (lambda block: np.random.rand(), None),
    "python's own": (lambda block: block.own.random(), random.Random(0)),
    "torch's own": (lambda block: torch.rand(1, generator=block.own).item(), torch.Generator().manual_seed(0)),
    "numpy's own": (lambda block: block.own.random(), np.random.default_rng(0)),
    "in a list": (lambda block: block.own[0].random(), [random.Random(0)]),
}


@pytest.mark.parametrize("name", DICE)
def test_a_block_with_dice_has_no_graph(name):
    before = np.random.get_state()[2]
    assert graph_of(Dice(*DICE[name])) is None
    assert np.random.get_state()[2] == before


class Writes(Block):
    def __init__(self):
        super().__init__()
        self.seen, self.by_name, self.names = [0], {"first": 1}, {"a"}

    def forward(self, x):
        self.seen.append(x)
        self.seen[0] += 1
        self.by_name["last"] = x
        self.names.discard("a")
        return self.conv(x)


def test_what_a_forward_writes_into_lists_while_it_is_traced_is_put_back():
    block = Writes()
    assert graph_of(block) is None
    assert (block.seen, block.by_name, block.names) == ([0], {"first": 1}, {"a"})


def test_hooks_of_overlap_keep_no_block_from_being_traced_again():
    def rank(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Block(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
        model[2].named = 0.0
        job = Job(model, lambda m: sgd(m, 0.1), comm=comm).apply(SAVED, Overlap())
        x, y = images()
        planned = []
        for chance in (0.0, 0.0, 0.5):  # a setting changes, and nothing that the forward does
            model[2].named = chance
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            planned.append(len(planner_of(model).network.units))
        job.close()
        return planned

    before, again, changed = Threads(2).run(rank)[0]
    assert before == again == changed


def planner_of(model):
    hooks = model._forward_pre_hooks.values()
    return next(hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), Planner))


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
        network = look(job, install(job), torch.zeros(64, 3, 16, 16), how=How(), freed=True)
        job.close()
        return (network.plain_bytes(64) - network.plain_bytes(32)) / 32

    gate = 4 * 8 * 14 * 14
    assert an_image(Gated()) - an_image(nn.Identity()) == pytest.approx(2 * gate, rel=0.05)  # and what it gives
