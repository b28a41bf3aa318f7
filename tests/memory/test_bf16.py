"""SavedMemory(bf16=True): half the bytes between forward and backward, the same outputs, gradients that are near."""

import statistics
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.grids import covering
from helpers.nets import (
    FEW,
    Step,
    assert_equal,
    blocks,
    images,
    networks,
    one_step,
    peak_of_step,
    plain_chain,
    planner_of,
    smallest_budget,
    trained,
)
from kasoku.core import InputError, Job
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory, network
from kasoku.memory.graph import GraphNode, LayerGraph
from kasoku.memory.saved_memory import Planner
from kasoku.memory.segment import build_program, shared_bf16
from kasoku.memory.solver import segment_choices
from kasoku.models.resnet import Bottleneck
from kasoku.optim import sgd

BF16 = SavedMemory(factor=1, bf16=True, in_backward=False, show=False)


def vgg() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 4)),
    )


NETWORKS = {"chain": plain_chain, "vgg": vgg, "blocks": blocks, "bottlenecks": lambda: blocks(Bottleneck)}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def error(plain: Step, ours: Step) -> float:
    """The norm of the difference of two gradients over the norm of the plain one, of all parameters together."""
    both = [torch.cat([g.flatten() for g in step.gradients.values()]) for step in (plain, ours)]
    return float((both[0] - both[1]).norm() / both[0].norm())


def worst(plain: Step, ours: Step) -> float:
    """The largest of those of each parameter.

    Where that norm is less than 1/20 of the largest (what lies before BatchNorm may have no gradient), over that.
    """
    assert plain.gradients.keys() == ours.gradients.keys()
    least = 0.05 * max(float(g.norm()) for g in plain.gradients.values())
    found = [(g - ours.gradients[name]).norm() / g.norm().clamp(min=least) for name, g in plain.gradients.items()]
    return float(max(found))


def assert_same_outputs(a: Step, b: Step) -> None:
    """Loss and statistics, bit for bit."""
    assert torch.equal(a.loss, b.loss)
    for name, x in a.buffers.items():
        assert torch.equal(x, b.buffers[name]), name


def test_bits_that_must_stay_are_not_rounded():
    with pytest.raises(InputError, match="lossless=True with bf16=True: one of them"):
        SavedMemory(lossless=True, bf16=True)


# ---- how near gradients are, by remedy

REMEDIES = {"kept": (0, 1e-2), "norm and ReLU again": (1, 0.1), "all again": (-1, 0.1)}  # place, the most of any error


def only(at: int):
    """Of the ways to run a unit the one at this place, the most kept first; -1: the last, with norms in place."""

    def chosen(units, setting):
        alone = (way for way in segment_choices(units, setting) if way.first == way.last and not way.chunk)
        for _, ways in groupby(alone, key=lambda way: way.first):
            found = [way for way in ways if at < 0 or "in place" not in way.remedy]
            yield found[min(at, len(found) - 1)]

    return chosen


@pytest.mark.parametrize(
    "remedy", ["kept", pytest.param("norm and ReLU again", marks=pytest.mark.exhaustive), "all again"]
)
def test_gradients_of_any_network_are_near_by_remedy(remedy):
    at, bound = REMEDIES[remedy]
    found = []

    @FEW
    @given(networks(), st.booleans(), st.integers(2, 6))
    def near(model, last, batch):
        x, y = images(batch, 16)
        layout = [ChannelsLast()] if last else []
        plain, ours = one_step(model, x, y, *layout), one_step(model, x, y, *layout, BF16)
        assert_same_outputs(plain, ours)
        assert error(plain, ours) < bound
        found.append(worst(plain, ours))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(network, "segment_choices", only(at))
        near()
    assert statistics.median(found) < 2e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_in_parts_of_the_batch_are_near(name):
    model, (x, y) = NETWORKS[name](), images(18, 16)
    least = smallest_budget(model, x, y, bf16=True)
    plain, ours = (one_step(model, x, y, *t) for t in ([], [replace(BF16, factor=0.0, budget=least)]))
    torch.testing.assert_close(plain.loss, ours.loss, rtol=1e-5, atol=0)
    chosen = planner_of(ours.job).plan
    assert name not in ("chain", "vgg") or any(way.chunk for way in chosen.choices)
    assert error(plain, ours) < 5e-2


@pytest.mark.parametrize(("name", "accumulate"), covering([*NETWORKS], [1, 2], together=1))
def test_training_moves_weights_nearly_as_plain_pytorch_does(name, accumulate):
    model = NETWORKS[name]()
    moved = []
    for techniques in ([], [SavedMemory(factor=1, bf16=True, show=False)]):
        job = trained(model, *techniques, accumulate=accumulate, rule=lambda m, _: sgd(m, 0.02))
        pairs = zip(job.model.parameters(), model.parameters(), strict=True)
        moved.append(torch.cat([(p - q).flatten() for p, q in pairs]).detach())
    assert (moved[0] - moved[1]).norm() < 2e-2 * moved[0].norm()


# ---- what is rounded


def test_values_of_16_bits_stay_as_they_are_bit_for_bit():
    model, (x, y) = vgg(), images()
    beside = [ChannelsLast(), Autocast("bf16")]
    without = SavedMemory(factor=1, in_backward=False, show=False)
    assert_equal(one_step(model, x, y, *beside, without), one_step(model, x, y, *beside, BF16))


def test_autocast_beside_it_is_near():
    model, (x, y) = blocks(), images()
    beside = [ChannelsLast(), Autocast("bf16")]
    plain, ours = one_step(model, x, y, *beside), one_step(model, x, y, *beside, BF16)
    assert_same_outputs(plain, ours)
    assert error(plain, ours) < 1e-2


def held_by(loss: torch.Tensor) -> list[dict[str, object]]:
    """What the segments behind a loss hold, the last segment first."""
    found, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if getattr(node, "saved_values", None) and all(node.saved_values is not one for one in found):
            found.append(node.saved_values)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def test_what_two_segments_hold_lies_there_once(monkeypatch):
    monkeypatch.setattr(network, "segment_choices", only(0))
    job = Job(vgg(), lambda m: sgd(m, 0.1)).apply(BF16)
    x, y = images()
    segments = held_by(job.loss(job.model(x), y))
    assert len(segments) == 4
    for later, earlier in pairwise(segments):
        (mine,), (before,) = later, earlier
        assert mine.in_bf16[0] is before.in_bf16[max(before.in_bf16)]
        assert not mine.values.keys() & {0}
    assert segments[-1][0].values[0].data_ptr() == x.data_ptr()  # the images lie there anyway
    assert segments[-1][0].values[0].dtype == torch.float32


def test_what_the_head_keeps_is_held_as_it_is():
    job = Job(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 4)), lambda m: sgd(m, 0.1))
    job.apply(SavedMemory(factor=1, bf16=True, in_backward=False, show=False))
    x, y = images()
    ((held,),) = held_by(job.loss(job.model(x), y))
    assert not held.in_bf16


def test_what_was_written_since_is_rounded_again():
    x = torch.randn(2, 3, 4, 4)
    first = shared_bf16(x)
    assert shared_bf16(x) is first
    x.add_(1)
    assert torch.equal(shared_bf16(x), x.to(torch.bfloat16))


def test_layouts_and_small_values_survive():
    x = torch.full((2, 3, 4, 4), 1e-38).contiguous(memory_format=torch.channels_last)
    found = shared_bf16(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found > 0).all()  # so that the gradient of a ReLU knows its sign


def test_between_reads_that_are_far_only_the_bf16_lies_there():
    conv = nn.Conv2d(4, 4, 1)
    chain = [GraphNode("conv", (i,), conv) for i in range(4)]
    graph = LayerGraph((*chain, GraphNode("add", (4, 0)), GraphNode("conv", (0,), conv), GraphNode("add", (5, 6))))
    steps = build_program(graph, {0, 1, 2, 3}, input_gradient=True, bf16=frozenset({0})).backward
    found = [event for do in steps for event in (*do.loads, *do.frees) if event in ((0, False), (0, True), 0)]
    assert found == [(0, False), 0, (0, True), 0]  # the first load keeps the bf16


# ---- bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_half_the_bytes_are_kept(name):
    x, y = images(16, 32)
    kept = []
    for bf16 in (False, True):
        job = Job(NETWORKS[name](), lambda m: sgd(m, 0.1))
        job.apply(ChannelsLast(), SavedMemory(budget="1GiB", bf16=bf16, show=False))
        job.loss(job.model(x), y).backward()
        kept.append(planner_of(job).plan.kept)
    assert 0.45 < kept[1] / kept[0] < 0.6


@pytest.mark.parametrize(("name", "share"), covering([*NETWORKS], [0.0, 0.5, 1.0], together=1))
def test_the_peak_is_foreseen(name, share):
    x, y = images(32, 48)
    x = x.contiguous(memory_format=torch.channels_last)
    least = float(smallest_budget(NETWORKS[name](), x, y, ChannelsLast(), bf16=True, in_backward=True)[:-3])
    most = planned(name, x, 1024.0).plan.peak / 2**20
    job = planned(name, x, least + share * (most - least) + 0.01).job
    foreseen = planner_of(job).plan.peak
    measured = peak_of_step(job, x, y) + planner_of(job).network.outside.fixed
    assert 0.95 < foreseen / measured < 1.05


def planned(name: str, x: torch.Tensor, mib: float) -> Planner:
    job = Job(NETWORKS[name](), lambda m: sgd(m, 0.1))
    job.apply(ChannelsLast(), SavedMemory(budget=f"{mib / 0.98:.4f}MiB", bf16=True, show=False))
    job.model(x)
    return planner_of(job)


class FromView(nn.Module):
    """Begins with a view of its images, and gives what its last ReLU gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, :2])


def test_what_lies_there_for_others_is_not_rounded_beside_itself():
    job = Job(FromView(), lambda m: sgd(m, 0.1)).apply(BF16)
    job.model(images()[0]).square().mean().backward()
    chosen = planner_of(job).plan.choices
    assert any(choice.program.in_bf16 for choice in chosen)  # what lies between the layers
    assert 0 not in chosen[0].program.in_bf16
    assert chosen[-1].program.graph.out not in chosen[-1].program.in_bf16
    job.close()
