"""What SavedMemory cannot do as plain PyTorch does it is refused in a line, or left to plain PyTorch."""

import copy
import io
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.nets import assert_equal, images, one_step, plain_chain, smallest_budget
from kasoku.core import InputError, Job
from kasoku.memory import SavedMemory
from kasoku.optim import sgd

SAVED = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)


def conv(inner: int, outer: int) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, 3, padding=1)


def classifier(*layers: nn.Module, planes: int = 8) -> nn.Sequential:
    return nn.Sequential(conv(3, planes), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(planes, 4))


def with_norms() -> nn.Sequential:
    return classifier(nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def a_job(model: nn.Module, technique: SavedMemory = SAVED) -> Job:
    return Job(model, lambda m: sgd(m, 0.1)).apply(technique)


# ---- code that reads between two layers


class Two(nn.Module):
    """Two convolutions; `read` is what is made of the first one's output."""

    def __init__(self, read, *, between=lambda x: x):
        super().__init__()
        self.one, self.two, self.head, self.read = conv(3, 8), conv(8, 8), nn.Linear(8, 4), [read]
        self.between = [between]

    def forward(self, x):
        first = self.between[0](self.one(x))
        second = self.two(first)
        return self.read[0](self, first, second)


def pooled(model, x):
    return model.head(x.mean((2, 3)))


def second_alone(model, first, second):
    return pooled(model, second)


def both(model, first, second):
    return pooled(model, first) + pooled(model, second)


def in_training(model, first, second):
    return pooled(model, second) + (pooled(model, first) if model.training else 0)


def left_on_the_model(model, first, second):
    model.aux = first
    return pooled(model, second)


def summed(model, first, second):
    return pooled(model, first + second)


def rectified_twice(model, first, second):
    return pooled(model, functional.relu(second) + functional.relu(-second))


def written(model, first, second):
    first.mul_(2)
    return pooled(model, second)


@pytest.mark.parametrize("read", [both, in_training, summed, rectified_twice])
def test_reads_between_two_layers_have_the_gradients_of_plain_pytorch(read):
    model = Two(read)
    assert_equal(one_step(model, *images()), one_step(model, *images(), SAVED))


@pytest.mark.parametrize("read", [both, in_training, summed, left_on_the_model, written])
def test_a_reader_that_comes_later_is_found_then(read):
    job = a_job(Two(second_alone))
    job.model(images()[0])
    job.model.read[0] = read
    with pytest.raises(InputError, match="reads a tensor between two of its layers"):
        job.model(images()[0])


def test_a_tensor_between_two_layers_that_is_kept_is_found():
    with pytest.raises(InputError, match="reads a tensor between two of its layers"):
        a_job(Two(left_on_the_model)).model(images()[0])


def test_a_tensor_written_between_two_layers_is_told_in_backward():
    loss = a_job(Two(written)).model(images()[0]).sum()
    with pytest.raises(InputError, match="was written before backward"):
        loss.backward()


def test_shapes_between_two_layers_may_be_read():
    seen = []

    def sized(model, first, second):
        seen.append((first.shape, first.size(1), len(first), first.dim(), first.dtype, first.device))
        return pooled(model, second)

    for techniques in ([], [SAVED]):
        model = Two(sized)
        model.two = nn.Conv2d(8, 8, 3, 2)
        Job(model, lambda m: sgd(m, 0.1)).apply(*techniques).model(images()[0])
    assert seen[0] == seen[-1]


@pytest.mark.parametrize(
    "change", [lambda x: x.contiguous(), lambda x: x.to(x.device), lambda x: functional.dropout(x, 0.0)]
)
def test_functions_that_return_a_tensor_between_two_layers_may_take_it(change):
    model = Two(second_alone, between=change)
    assert_equal(one_step(model, *images()), one_step(model, *images(), SAVED))


def test_outputs_in_which_no_tensor_is_seen_are_refused():
    with pytest.raises(InputError, match="without a known tensor"):
        a_job(Two(lambda model, first, second: {"out"})).model(images()[0])


class Skips(nn.Module):
    """A convolution that the forward may leave out."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.act, self.skip = conv(3, 8), conv(8, 8), nn.ReLU(), [False]
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.one(x)
        x = x if self.skip[0] else self.two(x)
        return pooled(self, self.act(x))


def test_a_layer_that_is_left_out_later_is_told():
    job = a_job(Skips())
    job.model(images()[0])
    job.model.skip[0] = True
    with pytest.raises(InputError, match="follow one another in one forward and not in the next"):
        job.model(images()[0])


# ---- blocks whose forward is Python


class Dice(nn.Module):
    """Stochastic depth by torch, and a count of its calls."""

    def __init__(self, *, chance=0.5):
        super().__init__()
        self.conv, self.act, self.chance, self.calls = conv(8, 8), nn.ReLU(), chance, 0

    def forward(self, x):
        self.calls += 1
        if self.chance and self.training and torch.rand(1).item() < self.chance:
            return self.act(x)
        return self.act(self.conv(x))


def test_stochastic_depth_between_segments_has_the_gradients_of_plain_pytorch():
    plain = classifier(nn.ReLU(), Dice())
    ours = copy.deepcopy(plain)
    a_job(ours)
    x, y = images()
    for seed in range(8):
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(seed)
            functional.cross_entropy(model(x), y).backward()
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_block_may_count_its_calls_and_draw_random_numbers():
    model = classifier(nn.ReLU(), Dice(chance=1e-6))
    before = torch.get_rng_state()
    a_job(copy.deepcopy(model))
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(one_step(model, *images()), one_step(model, *images(), SAVED))


class Block(nn.Module):
    """A convolution and two activations; the forward reads attributes, and Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.last = conv(8, 8), nn.ReLU(), nn.Sigmoid()
        self.skip, self.chance, self.plan = False, 0.0, [1]

    def forward(self, x):
        x = self.conv(x)
        if not (self.skip or (self.training and random.random() < self.chance)):
            for _ in range(self.plan[0]):
                x = self.act(x)
        return self.last(x)


def skips(block):
    block.skip = True


def skips_by_numpy(block):
    block.skip = np.bool_(True)


def throws(block):
    block.chance = 1.0


def acts_twice(block):
    block.plan[0] = 2


def has_another_layer(block):
    block.act = nn.Tanh()


@pytest.mark.parametrize("change", [skips, skips_by_numpy, throws, acts_twice, has_another_layer])
def test_a_forward_that_changes_after_the_plan_is_refused(change):
    job = a_job(classifier(nn.ReLU(), Block()))
    x, y = images()
    job.loss(job.model(x), y).backward()
    change(job.model[2])
    with pytest.raises(InputError, match=r"SavedMemory: .*: leave it out"):
        job.model(x)


def test_stochastic_depth_within_a_segment_is_refused_when_it_skips():
    job = a_job(classifier(nn.ReLU(), Block()))
    job.model[2].chance, x = 0.5, images()[0]
    with pytest.raises(InputError, match="a network whose forward decides"):
        deque((job.model(x) for _ in range(30)), 0)


def test_an_attribute_that_the_forward_does_not_read_may_change():
    plain = classifier(nn.ReLU(), Block())
    ours = copy.deepcopy(plain)
    a_job(ours)
    x, y = images()
    for steps in range(3):
        for model in (plain, ours):
            model[2].steps = steps
            functional.cross_entropy(model(x), y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


class OverWritten(nn.Module):
    """A ReLU in place: the sum reads what it wrote."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.conv = nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(8, 8)

    def forward(self, x):
        x = self.norm(x)
        return self.conv(self.act(x)) + x


class Broadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.act = conv(8, 8), nn.AvgPool2d(16), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x) + self.pool(x))


class Promoted(nn.Module):
    """A float32 skip beside a branch that autocast computes in bfloat16."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x):
        return self.act(x + self.norm(self.conv(x)))


class Parts(nn.Module):
    """Two convolutions, a norm and a ReLU; `compute` is the forward."""

    def __init__(self, compute):
        super().__init__()
        self.one, self.two, self.norm, self.act = conv(8, 8), conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.compute = [compute]

    def forward(self, x):
        return self.compute[0](self, x)


def gated(block, x):
    """Squeeze and excitation, with a shortcut."""
    y = block.one(x)
    return functional.relu(y * torch.sigmoid(block.two(y.mean((2, 3), keepdim=True))) + x, inplace=True)


def preactivated(block, x):
    y = block.one(functional.relu(block.norm(x)))
    return x + block.two(y.relu())


def adds_to_its_input(block, x):
    x += block.one(block.act(x))
    return block.two(functional.relu_(x))


def branches(block, x):
    return torch.cat([block.act(block.one(x)), block.act(block.two(x))], 1)[:, ::2]


def shortcut_of_a_shortcut(block, x):
    y = block.act(block.norm(block.one(x)) + x)
    return block.act(block.two(y) + y + x)


def drops_a_branch(block, x):
    block.two(x)
    return block.act(block.one(x))


BLOCKS = (gated, preactivated, adds_to_its_input, branches, shortcut_of_a_shortcut, drops_a_branch)
NETWORKS = {
    "in place": lambda: classifier(OverWritten()),
    "broadcast": lambda: classifier(Broadcast()),
    "other layer first": lambda: nn.Sequential(nn.Linear(16, 16), nn.SiLU(), *classifier(nn.ReLU())),
    "in blocks without a convolution": lambda: classifier(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()), conv(8, 8)),
} | {block.__name__: lambda block=block: classifier(Parts(block), Parts(block)) for block in BLOCKS}


@pytest.mark.parametrize("name", NETWORKS)
def test_unusual_blocks_have_the_gradients_of_plain_pytorch(name):
    model, (x, y) = NETWORKS[name](), images()
    least = replace(SAVED, factor=0, budget=smallest_budget(model, x, y, lossless=True))
    for saved in (SAVED, least):
        assert_equal(one_step(model, x, y), one_step(model, x, y, saved))


class Islands(nn.Module):
    """Float32 between bfloat16 layers: a skip, or a region without autocast."""

    def __init__(self, region):
        super().__init__()
        self.one, self.block, self.head, self.region = conv(3, 8), Promoted(), nn.Linear(8, 4), [region]

    def forward(self, x):
        x = self.one(x).float() * 1.0
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.region[0]):
            x = self.block(x)
        return pooled(self, x)


@pytest.mark.parametrize("region", [False, True], ids=["skip", "region"])
def test_float32_islands_under_autocast(region):
    x, y = images()
    found = []
    for technique in ([], [SAVED]):
        torch.manual_seed(0)
        model = Islands(region)
        Job(model, lambda m: sgd(m, 0.1)).apply(*technique)
        with torch.autocast("cpu", torch.bfloat16):
            functional.cross_entropy(model(x), y).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_may_come_and_go_between_steps():
    x, y = images()
    plain = with_norms()
    ours = copy.deepcopy(plain)
    a_job(ours)
    for enabled in (True, False, True):
        for model in (plain, ours):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                functional.cross_entropy(model(x), y).backward()
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# ---- weights that move in backward


class Wide(nn.Module):
    """A large Linear, called once or twice."""

    def __init__(self, times):
        super().__init__()
        self.conv, self.wide, self.head, self.times = conv(3, 8), nn.Linear(2048, 256), nn.Linear(256, 4), times

    def forward(self, x):
        x = self.conv(x).flatten(1)
        return self.head(sum(self.wide(x.roll(i, 1)) for i in range(self.times)))


def test_a_linear_layer_that_is_called_twice_takes_one_step():
    plain, x_y = Wide(2), images()
    ours = copy.deepcopy(plain)
    for model, techniques in ((plain, []), (ours, [SavedMemory(factor=1, show=False)])):
        job = Job(model, lambda m: sgd(m, 0.05)).apply(*techniques)
        for _ in range(2):
            job.loss(job.model(x_y[0]), x_y[1]).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    torch.testing.assert_close(ours.wide.weight, plain.wide.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", ["images", "weight"])
def test_asking_for_gradients_moves_no_weight(wanted):
    model = Wide(1)
    job = a_job(model, SavedMemory(factor=1, show=False))
    x, y = images()
    x.requires_grad_()
    before, plain = model.wide.weight.detach().clone(), copy.deepcopy(model)
    found = []
    for one in (model, plain):
        what = x if wanted == "images" else one.wide.weight
        found += torch.autograd.grad(job.loss(one(x), y), what)
    torch.testing.assert_close(*found)
    assert torch.equal(model.wide.weight, before)


# ---- between forward and backward, and hooks


def test_eval_between_forward_and_backward_changes_nothing():
    plain = with_norms()
    ours = copy.deepcopy(plain)
    a_job(ours)
    x, y = images()
    for model in (plain, ours):
        loss = functional.cross_entropy(model(x), y)
        model.eval()
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("where", ["0.weight", "2.weight"])
def test_weights_written_between_forward_and_backward_are_told(where):
    model = nn.Sequential(conv(3, 8), nn.Flatten(), nn.Linear(2048, 256))
    job = a_job(model, SavedMemory(factor=1, show=False))
    loss = job.model(images()[0]).square().mean()
    with torch.no_grad():
        model.get_parameter(where).mul_(2)
    with pytest.raises(InputError, match="was written"):
        loss.backward()


def test_a_hook_added_after_the_plan_sees_what_its_layer_gives():
    model = with_norms()
    plain = copy.deepcopy(model)
    job = a_job(model)
    x, _ = images()
    job.model(x)
    seen = []
    for one in (model, plain):
        one[2].register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
        one[1].register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(args[0].detach().clone()), with_kwargs=True
        )
    model(x)
    plain(x)
    assert torch.equal(seen[-4], seen[-2])  # those before are of the look
    assert torch.equal(seen[-3], seen[-1])


def test_a_hook_on_a_block_sees_what_goes_in_and_comes_out():
    model = classifier(nn.ReLU(), Block(), conv(8, 8))
    plain = copy.deepcopy(model)
    job = a_job(model)
    x, _ = images()
    job.model(x)
    seen = []
    for one in (model, plain):
        one[2].register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    model(x)
    plain(x)
    assert all(map(torch.equal, seen[-2], seen[-1]))  # those before are of the look


# ---- copies, budgets, modes


def test_a_deep_copy_runs_by_itself():
    model = with_norms()
    job = a_job(model)
    x, _ = images()
    job.model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    twin(x).sum().backward()
    assert model[0].weight.grad is None
    assert twin[0].weight.grad is not None
    assert not torch.equal(twin(x), model(x))


def test_pickling_the_model_is_refused():
    with pytest.raises(InputError, match="cannot be pickled"):
        torch.save(a_job(with_norms()).model, io.BytesIO())


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least 1 byte"):
        SavedMemory(budget="0")


def test_the_budget_that_an_error_names_is_enough():
    with pytest.raises(InputError, match="are needed") as raised:
        a_job(plain_chain(), SavedMemory(budget="1KiB", show=False)).model(images()[0])
    named = str(raised.value).partition("at least ")[2].split()[0].replace(",", "")
    a_job(plain_chain(), SavedMemory(budget=f"{named}MiB", show=False)).model(images()[0])


def test_the_factor_that_an_error_names_is_enough():
    with pytest.raises(InputError, match=r"are needed, .*: set factor=") as raised:
        a_job(plain_chain(), SavedMemory(factor=50, show=False)).model(images()[0])
    named = float(str(raised.value).rpartition("=")[2])
    assert 1 < named < 50
    a_job(plain_chain(), SavedMemory(factor=named, show=False)).model(images()[0])


def test_a_first_layer_in_eval_mode_leaves_its_segment_on():
    job = a_job(with_norms())
    job.model[0].eval()
    steps, found = [job.model(images()[0]).grad_fn], set()
    while steps:
        step = steps.pop()
        found.add(type(step).__name__)
        steps += [behind for behind, _ in step.next_functions if behind is not None]
    assert "_SegmentFunctionBackward" in found
    assert "ConvolutionBackward0" not in found
