"""The gradient of a BatchNorm over the area of its input: the same gradient, in no room of its own."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.grids import covering
from helpers.nets import FEW, assert_near, images, networks, one_step, peak_of_step, plain_chain, planner_of
from helpers.nets import blocks as light_blocks
from kasoku.core import Job
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory, network, ops
from kasoku.memory.graph import GraphNode, LayerGraph
from kasoku.memory.segment import build_program
from kasoku.memory.solver import segment_choices
from kasoku.models.resnet import BasicBlock, Bottleneck, ResNet
from kasoku.optim import sgd

IN_PLACE = ", norm gradients in place"
SAVED = SavedMemory(factor=1, in_backward=False, show=False)


# ---- one layer

SHAPES = [(5, 3, 1, 1), (1, 2, 2, 2), (6, 8, 6, 6), (33, 4, 5, 7)]
KINDS = {
    "training": lambda c: nn.BatchNorm2d(c),
    "not affine": lambda c: nn.BatchNorm2d(c, affine=False),
    "no running statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False).eval(),
    "eval": lambda c: nn.BatchNorm2d(c).eval(),
    "eval, not affine": lambda c: nn.BatchNorm2d(c, affine=False).eval(),
    "frozen": lambda c: nn.BatchNorm2d(c).requires_grad_(False),
}


def norm_of(kind: str, channels: int) -> nn.BatchNorm2d:
    """With weights and running statistics that nobody would guess."""
    layer = KINDS[kind](channels)
    for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        if t is not None:
            t.data.uniform_(0.5, 1.5)
    return layer


def plain(layer: nn.BatchNorm2d, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of the input and of the weights that learn, by autograd."""
    leaf = x.clone().requires_grad_()
    return [*torch.autograd.grad(layer(leaf), [leaf, *(p for p in layer.parameters() if p.requires_grad)], dy)]


def in_place(layer: nn.BatchNorm2d, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same over a copy of x."""
    node, area, given_dy = GraphNode("norm", (0,), layer), x.clone(), dy.clone()
    with torch.no_grad():
        _, side = ops.compute(node, [area], None, how=ops.Numerics(), inplace=False)
        dx, found = ops.norm_gradients(node, dy, area, side, inplace=True)
    assert dx.data_ptr() == area.data_ptr()
    assert dx.stride() == x.stride()
    assert torch.equal(dy, given_dy)
    return [dx, *(g for g in found if g is not None)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Each within `tolerance` of its largest element."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max() + 1e-6 * tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_it_is_that_of_autograd(shape, kind, last):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    x, dy = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
    layer = norm_of(kind, shape[1])
    assert_close(in_place(layer, x, dy), plain(layer, x, dy), 1e-5)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["nhwc", "nchw"])
def test_its_incoming_gradient_may_lie_otherwise(layout):
    torch.manual_seed(0)
    x = torch.randn(6, 8, 5, 5).contiguous(memory_format=layout)
    layer = norm_of("training", 8)
    given = torch.randn(6, 5, 5, 8).permute(0, 3, 1, 2), torch.randn(6, 8, 5, 5), torch.randn(8, 5, 5).expand(x.shape)
    for dy in given:
        assert_close(in_place(layer, x, dy), plain(layer, x, dy), 1e-5)


def test_a_mean_far_from_zero_costs_no_digits():
    torch.manual_seed(0)
    x, dy = 300 + torch.randn(16, 8, 12, 12), torch.randn(16, 8, 12, 12)
    layer = norm_of("training", 8)
    exact = plain(layer.double(), x.double(), dy.double())[0].float()
    layer.float()
    off = [float((found - exact).abs().max()) for found in (in_place(layer, x, dy)[0], plain(layer, x, dy)[0])]
    assert off[0] < 1.5 * off[1]


def test_in_bf16_it_is_rounded_once():
    torch.manual_seed(0)
    x, dy = (torch.randn(16, 8, 12, 12).to(torch.bfloat16) for _ in range(2))
    layer = norm_of("training", 8)
    found, wanted = in_place(layer, x, dy)[0], plain(layer, x, dy)[0]
    assert ((found - wanted).abs() <= 2**-7 * wanted.abs() + 1e-6).all()
    assert (found == wanted).float().mean() > 0.99


# ---- where it is done


def chain(*ops_: str) -> LayerGraph:
    layers = {"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)}
    return LayerGraph(tuple(GraphNode(op, (i,), layers.get(op)) for i, op in enumerate(ops_)))


def written_over(graph: LayerGraph, kept: set[int]) -> list[int]:
    """The nodes whose gradient is written over their input."""
    steps = build_program(graph, kept, input_gradient=True, over_inputs=True).backward
    return [do.at for do in steps if do.kind == "grad" and graph.nodes[do.at].op == "norm" and do.inplace]


def test_only_where_nobody_else_holds_the_input_and_nobody_reads_it_later():
    assert written_over(chain("conv", "norm", "conv"), set()) == [1]  # made again
    assert written_over(chain("conv", "norm", "conv"), {1}) == [1]  # kept
    assert written_over(chain("norm", "conv"), {0}) == []  # what came in
    conv, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    readers = [GraphNode("norm", (1,), norm), GraphNode("conv", (1,), conv)]
    for first, second, found in ((0, 1, [1]), (1, 0, [])):  # backward comes to the second one first
        nodes = (GraphNode("conv", (0,), conv), readers[first], readers[second], GraphNode("add", (2, 3)))
        assert written_over(LayerGraph(nodes), {1}) == found


# ---- within networks


def forced(units, setting, number=0, *, over=True):
    """Of the ways to run a unit the last that has it (not `over`: the same without it); where none has it, the last."""
    alone = [way for way in segment_choices(units, setting, number) if way.first == way.last and not way.chunk]
    for first in range(number, number + len(units)):
        mine = {way.remedy: way for way in alone if way.first == first}
        name = next((name for name in reversed(mine) if IN_PLACE in name), [*mine][-1])
        yield mine[name if over else name.replace(IN_PLACE, "")]


def blocks(kind=BasicBlock) -> ResNet:
    torch.manual_seed(0)
    return ResNet(kind, (2, 1, 1, 1), 4, 3, "imagenet")


def still(model: nn.Module) -> nn.Module:
    """Its norms take running statistics, whatever the mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module
    return model


NETWORKS = {
    "chain": lambda: plain_chain().double(),  # a bias before a norm has no gradient, but for rounding
    "basic blocks": blocks,
    "bottlenecks": lambda: blocks(Bottleneck),
    "running statistics": lambda: still(blocks(Bottleneck)),
}


def remedies(job: Job) -> list[str]:
    return [way.remedy for way in planner_of(job).plan.choices]


@pytest.mark.parametrize(("name", "layout"), covering([*NETWORKS], ["nchw", "nhwc"], together=1))
def test_gradients_are_near_those_of_plain_pytorch(name, layout, monkeypatch):
    monkeypatch.setattr(network, "segment_choices", forced)
    torch.manual_seed(0)
    model, (x, y) = NETWORKS[name](), images(6, 48)
    x = x.to(next(model.parameters()).dtype)
    beside = [ChannelsLast()] if layout == "nhwc" else []
    ours = one_step(model, x, y, *beside, SAVED)
    assert any(IN_PLACE in remedy for remedy in remedies(ours.job))
    assert_near(one_step(model, x, y, *beside), ours, 1e-5)


@FEW
@given(networks(), st.integers(2, 6))
def test_gradients_of_any_network_are_near_those_of_plain_pytorch(model, batch):
    x, y = images(batch, 16)
    model, x = model.double(), x.double()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(network, "segment_choices", forced)
        assert_near(one_step(model, x, y), one_step(model, x, y, SAVED), 1e-9)


def test_autocast_beside_it_is_near(monkeypatch):
    monkeypatch.setattr(network, "segment_choices", forced)
    model, (x, y) = blocks(Bottleneck), images(6, 48)
    beside = [ChannelsLast(), Autocast("bf16")]
    plain_step, ours = one_step(model, x, y, *beside), one_step(model, x, y, *beside, SAVED)
    off = [torch.cat([g.flatten() for g in step.gradients.values()]) for step in (plain_step, ours)]
    assert (off[0] - off[1]).norm() < 2e-2 * off[0].norm()


def test_bits_that_must_stay_have_no_such_remedy():
    exact = SavedMemory(factor=1, lossless=True, show=False)
    job = Job(blocks(), lambda m: sgd(m, 0.1)).apply(exact)
    job.model(images(6, 48)[0])
    assert not any(IN_PLACE in way.remedy for way in planner_of(job).network.choices)


# ---- bytes


class Wide(nn.Sequential):
    """A 1x1 that widens, then a norm: its gradient is what takes most."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 48, 1), nn.BatchNorm2d(48), nn.ReLU()),
            *(nn.Conv2d(48, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        )


@pytest.mark.parametrize("name", ["wide", "bottlenecks", "wide in bf16", "wide in bf16, frozen"])
def test_the_peak_is_foreseen_and_less(name, monkeypatch):
    x, y = images(32, 48)
    x = x.contiguous(memory_format=torch.channels_last)
    make = Wide if name.startswith("wide") else partial(light_blocks, Bottleneck)
    found = []
    for over in (False, True):
        monkeypatch.setattr(network, "segment_choices", partial(forced, over=over))
        techniques = [ChannelsLast(), *([Autocast("bf16")] if "bf16" in name else [])]
        model = make()
        if "frozen" in name:
            model[3].eval()
        job = Job(model, lambda m: sgd(m, 0.1)).apply(*techniques, SavedMemory(factor=1, show=False))
        measured = peak_of_step(job, x, y) + planner_of(job).network.outside.fixed
        assert 0.95 < planner_of(job).plan.peak / measured < 1.05
        found.append(measured)
    assert found[1] < 0.95 * found[0]


def test_it_is_chosen_where_the_budget_asks_for_it_and_not_before():
    x = images(32, 48)[0]
    x = x.contiguous(memory_format=torch.channels_last)
    taken = []
    for budget in ("1GiB", "least"):
        job = Job(Wide(), lambda m: sgd(m, 0.1)).apply(ChannelsLast(), SavedMemory(budget="1GiB", show=False))
        job.model(x)
        seen = planner_of(job).network
        plan = seen.choose(2**30 if budget == "1GiB" else seen.least + 2**16)
        taken.append(any(IN_PLACE in way.remedy for way in plan.choices))
        job.close()
    assert taken == [False, True]
