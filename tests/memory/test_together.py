"""SavedMemory beside what reads, adds up or clips gradients, and in training: right, or refused in a line."""

import copy

import pytest
import torch
from torch import nn

from helpers.grids import covering
from helpers.nets import assert_equal, images, one_step, plain_chain, planner_of, trained
from helpers.started import RECIPE
from kasoku.config.recipe import load
from kasoku.core import Comm, InputError, Job, Threads, process_start
from kasoku.core.blocks import blocks
from kasoku.data import digits, loader
from kasoku.device import Autocast, ChannelsLast, Compile
from kasoku.distributed import Overlap
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.memory import SavedMemory
from kasoku.memory.inspection import reads_values
from kasoku.optim import EMA, Clip, sgd
from kasoku.report.profiler import block_hooks
from kasoku.training.evaluation import evaluate
from kasoku.training.trainer import build, fit


def assert_same_weights(a: Job, b: Job):
    for (name, x), y in zip(a.model.state_dict().items(), b.model.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    with a.evaluation() as one, b.evaluation() as two:
        assert torch.equal(one(images()[0]), two(images()[0]))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return plain_chain()


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr)


BESIDE = {"nothing": [], "clip": [Clip(0.05)], "ema": [EMA(0.5)], "nhwc": [ChannelsLast()]}


@pytest.mark.parametrize(("accumulate", "rule", "beside"), covering([1, 3], [sgd, adamw], [*BESIDE]))
def test_updates_in_backward_give_the_weights_of_plain_steps_bit_for_bit(model, accumulate, rule, beside):
    saved = SavedMemory(factor=1, lossless=True, show=False)
    techniques = BESIDE[beside]
    plain = trained(model, *techniques, accumulate=accumulate, rule=rule)
    assert_same_weights(plain, trained(model, *techniques, saved, accumulate=accumulate, rule=rule))


def test_clipping_by_hand_is_told_when_gradients_are_gone(model):
    job = Job(model, lambda m: sgd(m, 0.05)).apply(SavedMemory(factor=1, show=False))
    x, y = images()
    job.loss(job.model(x), y).backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_a_second_backward_without_accumulate_is_refused(model):
    job = Job(model, lambda m: sgd(m, 0.05)).apply(SavedMemory(factor=1, show=False))
    x, y = images()
    job.loss(job.model(x), y).backward()
    with pytest.raises(InputError, match="say accumulate=k to Job"):
        job.model(x)


def test_what_is_changed_between_backward_and_step_is_told(model):
    job = Job(model, lambda m: sgd(m, 0.05)).apply(SavedMemory(factor=1, show=False))
    x, y = images()
    job.loss(job.model(x), y).backward()
    model[0].weight.grad = model[0].weight.grad * 0.5
    with pytest.raises(InputError, match=r"a gradient was replaced between backward and optimizer.step\(\)"):
        job.optimizer.step()
    model[0].weight.grad = None
    job.optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(InputError, match="a rate, or another setting of the optimizer, was changed between"):
        job.optimizer.step()
    job.optimizer.param_groups[0]["lr"] = 0.05
    job.optimizer.step()


def test_a_rule_with_a_step_of_its_own_is_told_only_where_shown(model, capsys):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for show in (True, False):
        job = Job(copy.deepcopy(model), lambda m: Own(m.parameters(), 0.05))
        job.apply(SavedMemory(factor=1, show=show)).model(images()[0])
        assert ("Own has its own step()" in capsys.readouterr().out) == show


def test_a_second_backward_through_the_same_forward_is_refused(model):
    job = Job(model, lambda m: sgd(m, 0.05)).apply(SavedMemory(factor=1, in_backward=False, show=False))
    x, y = images()
    loss = job.loss(job.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second backward through"):
        loss.backward()


def test_a_large_linear_layer_moves_as_with_plain_sgd():
    torch.manual_seed(0)
    large = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 256), nn.Linear(256, 4)
    )

    def rule(model, lr):
        return sgd(model, lr, weight_decay=1e-2)

    plain, ours = trained(large, rule=rule), trained(large, SavedMemory(factor=1, show=False), rule=rule)
    for (name, x), y in zip(plain.model.state_dict().items(), ours.model.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=name)
    states = [{n: job.optimizer.state[p] for n, p in job.model.named_parameters()} for job in (plain, ours)]
    for name, state in states[0].items():
        buffer = states[1][name]["momentum_buffer"]
        torch.testing.assert_close(state["momentum_buffer"], buffer, rtol=1e-4, atol=1e-6)


def test_autocast_computes_the_same_bits(model):
    x, y = images()
    saved = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)
    plain = one_step(model, x, y, ChannelsLast(), Autocast("bf16"))
    assert_equal(plain, one_step(model, x, y, ChannelsLast(), Autocast("bf16"), saved))


class Mixer(nn.Module):
    """A block of which nothing can be planned, though it has a layer that could be."""

    def __init__(self, n: int):
        super().__init__()
        self.norm, self.one, self.act, self.two = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)

    def forward(self, x):
        return x + self.two(self.act(self.one(self.norm(x))))


def test_compile_takes_the_blocks_of_which_nothing_is_planned(model, capsys):
    both = nn.Sequential(*model[:-2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), Mixer(16), nn.Linear(16, 4))
    saved = SavedMemory(factor=1, lossless=True, show=False)
    ours = trained(both, saved, Compile(backend="aot_eager"))
    assert "Compile: 4 of 6 blocks are not compiled" in capsys.readouterr().err
    assert "_SegmentFunction" in str(ours.model[:5](images()[0]).grad_fn)  # a whole segment
    assert ours.model[-2].forward.__func__ is not Mixer.forward
    assert_same_weights(trained(both, saved), ours)


@pytest.mark.parametrize("factor", [1, 2])
def test_digits_are_learned_as_well(factor):
    found = [digits_right(), digits_right(SavedMemory(factor=factor, show=False))]
    assert min(found) > 0.9
    assert abs(found[0] - found[1]) <= 0.01


def digits_right(*techniques) -> float:
    """The part of the test images told after two epochs."""
    torch.manual_seed(0)
    dataset = digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )
    batches = loader(dataset, "train", 64, seed=0)
    job = Job(model, lambda m: sgd(m, 0.05), loader=batches).apply(*techniques)
    for _ in range(2):
        for x, y in job.loader:
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    with job.evaluation() as judge:
        return evaluate(judge, loader(dataset, "test", 360)).top1


def by_two_ranks(*techniques):
    """The states of two ranks with Overlap after three steps."""

    def rank(comm):
        torch.manual_seed(0)
        job = Job(plain_chain(), lambda m: sgd(m, 0.05), comm=comm).apply(Overlap(), *techniques)
        for i in range(3):
            x, y = images(seed=2 * i + comm.rank)
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return {name: value.clone() for name, value in job.model.state_dict().items()}

    return Threads(2).run(rank)


def test_two_ranks_with_overlap_move_the_same_bits_as_without_it():
    plain, saved = by_two_ranks(), by_two_ranks(SavedMemory(factor=1, lossless=True, show=False))
    for one, other in zip(plain, saved, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_kasoku_train_takes_it_on_several_ranks():
    recipe = load(
        RECIPE,
        [
            "model={use='kasoku.models.cifarnet', widths=[8, 16]}",
            "optimizer={use='kasoku.optim.sgd', lr=0.05}",
            "techniques=[{use='kasoku.memory.SavedMemory', factor=1.5, show=false}]",  # twice: not in fp32
            "device.threads=1",
            "evaluate.target=0",
            "schedule={use='kasoku.core.Constant'}",
            "epochs=1",
        ],
    )

    def rank(comm: Comm) -> float:
        return fit(build(recipe, comm), None, started=process_start(), quiet=True).top1 or 0.0

    found = Threads(2).run(rank)
    assert found[0] == found[1] > 0.3


def test_hooks_of_the_report_and_of_overlap_keep_no_layer_from_the_plan():
    model = plain_chain()
    job = Job(model, lambda m: sgd(m, 0.1)).apply(SavedMemory(factor=1, show=False))
    layers = planner_of(job).running.names
    block_hooks(blocks(model), lambda block, what: None)
    LayerIndex(model).before(job, lambda unit: None)
    assert any(len(m._forward_pre_hooks) for m in model)
    assert not any(reads_values(layer) for layer in layers)
    model[1].register_forward_hook(lambda *_: None)
    assert [name for layer, name in layers.items() if reads_values(layer)] == ["1"]
    job.close()
