"""SavedMemory(host=True): what is held lies in host memory, and gradients are those of plain PyTorch bit for bit.

On the CPU the same code copies from memory to memory; what is on "the device" is what torch's allocator gives out once
the buffers are there. test_host_cuda.py has what needs streams.
"""

import gc
import math
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from contracts import one_thread as one_thread
from kasoku.core import InputError, Job
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory, network, saved
from kasoku.memory import host as host_memory
from kasoku.memory.host import Host
from kasoku.memory.look import install
from kasoku.memory.network import look
from kasoku.memory.ops import How
from kasoku.memory.plan import choices
from kasoku.memory.saved import Planner
from kasoku.optim import sgd
from memory.nets import assert_equal, images, one_step, plain_chain
from memory.test_bf16 import NETWORKS as SMALL
from memory.test_bf16 import assert_same_outputs, error, held_by, planner_of
from memory.test_budgets import peak_of_step
from memory.test_saved import NETWORKS
from memory.test_together import assert_same_weights, by_two_ranks, trained

HOST = SavedMemory(factor=1, lossless=True, host=True, in_backward=False, show=False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    monkeypatch.setattr(saved, "reaches", lambda device: True)
    monkeypatch.setattr(host_memory, "_TRIED", 2**16)


def away_only(longest=1, at=0):
    """Of the ways to run up to `longest` units the one at this place that keeps all it can in host memory."""

    def chosen(units, setting):
        stretches = {}
        for way in choices(units, setting):
            if not way.chunk and way.last - way.first < longest:
                stretches.setdefault((way.first, way.last), []).append(way)
        for ways in stretches.values():
            found = [way for way in ways if way.program.away] or ways
            yield found[min(at, len(found) - 1)]

    return chosen


@pytest.fixture
def all_away(monkeypatch):
    monkeypatch.setattr(network, "choices", away_only())


@pytest.fixture
def free_link(monkeypatch):
    monkeypatch.setattr(Host, "seconds_a_byte", lambda self, device: 0.0)


def a_job(model: nn.Module, technique: SavedMemory = HOST, *beside, accumulate=1) -> Job:
    return Job(model, lambda m: sgd(m, 0.05), accumulate=accumulate).apply(*beside, technique)


def test_without_a_device_of_its_own_it_is_refused(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"SavedMemory: host=True on cpu: .* leave it out"):
        a_job(plain_chain())


# ---- bits


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("longest", "at"), [(1, 0), (3, 1), (4, -1)])
def test_gradients_are_those_of_plain_pytorch_bit_for_bit(name, last, longest, at, monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(longest, at))
    make, side = NETWORKS[name]
    model, (x, y) = make(), images(4, side)
    layout = [ChannelsLast()] if last else []
    ours = one_step(model, x, y, *layout, HOST)
    assert_equal(one_step(model, x, y, *layout), ours)
    assert any(choice.program.away for choice in planner_of(ours.job).chosen.choices)


def test_every_value_is_away_but_the_ends_of_a_chain(all_away):
    job = a_job(SMALL["vgg"]())
    x, y = images()
    segments = held_by(job.loss(job.model(x), y))
    assert len(segments) == 4
    for place, (held,) in enumerate(segments):
        out = {max(held.values)} if place == 0 else set()
        assert held.values.keys() == out | ({0} if place == 3 else set())
        assert held.away
    for (later,), (earlier,) in pairwise(segments):
        assert later.away[0] is earlier.away[max(earlier.away)]  # one copy for both


@pytest.mark.parametrize("beside", [[], [ChannelsLast(), Autocast("bf16")]], ids=["", "autocast"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_moves_the_same_weights(all_away, beside, accumulate):
    ours = SavedMemory(factor=1, lossless=True, host=True, show=False)
    model = plain_chain()
    plain = trained(model, *beside, accumulate=accumulate)
    assert_same_weights(plain, trained(model, *beside, ours, accumulate=accumulate))


def test_two_ranks_move_the_same_bits(all_away):
    for one, other in zip(by_two_ranks(), by_two_ranks(HOST), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", SMALL)
def test_in_bf16_half_the_bytes_cross(name, all_away):
    model, (x, y) = SMALL[name](), images()
    halves = SavedMemory(factor=1, bf16=True, in_backward=False, show=False)
    both = SavedMemory(factor=1, bf16=True, host=True, in_backward=False, show=False)
    ours = [one_step(model, x, y, technique) for technique in (both, HOST)]
    away = [sum(c.need.link.away for c in planner_of(one.job).chosen.choices) for one in ours]
    assert 0 < away[0] <= 0.55 * away[1]
    plain = one_step(model, x, y)
    assert_same_outputs(plain, ours[0])
    assert error(plain, ours[0]) < 0.1
    if name in ("chain", "vgg"):
        assert_equal(ours[0], one_step(model, x, y, halves))


def test_a_neighbour_that_runs_in_parts_reads_the_same_copy(monkeypatch):
    def chosen(units, setting):
        for way in choices(units, setting):
            if way.first == way.last and (way.chunk == 4 if way.first < 2 else way.program.away):
                yield way

    monkeypatch.setattr(network, "choices", chosen)
    model, (x, y) = SMALL["vgg"](), images(10)
    technique = SavedMemory(factor=1, host=True, in_backward=False, show=False)
    plain, ours = one_step(model, x, y), one_step(model, x, y, technique)
    assert [way.chunk for way in planner_of(ours.job).chosen.choices] == [4, 4, 0, 0]
    assert error(plain, ours) < 1e-6


# ---- when


class Told(Host):
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = []
        self.copies = []

    def put(self, x):
        ticket = super().put(x)
        self.told.append(("put", ticket))
        return ticket

    def ahead(self, ticket):
        self.told.append(("ahead", ticket))
        super().ahead(ticket)

    def get(self, ticket, *, last):
        here = ticket.here is not None
        self.told.append(("get", ticket, here))
        return super().get(ticket, last=last)

    def _copy(self, into, x, device):
        self.copies.append(x.nbytes)
        return super()._copy(into, x, device)


@pytest.mark.parametrize("name", ["chain", "vgg with norms", "basic blocks", "bottlenecks"])
@pytest.mark.parametrize("longest", [1, 3])
def test_what_comes_back_was_asked_for_ahead(name, longest, monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(longest))
    monkeypatch.setattr(saved, "Host", Told)
    make, side = NETWORKS[name]
    job = a_job(make())
    x, y = images(4, side)
    loss = job.loss(job.model(x), y)
    host = planner_of(job).host
    puts = [entry for entry in host.told if entry[0] == "put"]
    host.told.clear()
    host.copies.clear()
    loss.backward()
    gets = [entry for entry in host.told if entry[0] == "get"]
    assert len(gets) >= len(planner_of(job).chosen.choices)
    assert all(here for _, _, here in gets)
    assert {id(entry[1]) for entry in gets} <= {id(entry[1]) for entry in puts}
    crossed = sum(c.need.link.crossed - c.need.link.away for c in planner_of(job).chosen.choices)
    assert sum(host.copies) == crossed  # what two share comes back once


def test_one_comes_ahead_no_more(monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(3, 0))
    job = a_job(SMALL["bottlenecks"]())
    x, y = images()
    loss = job.loss(job.model(x), y)
    coming, most, ask, take = set(), [], Host.ahead, Host.get

    def asked(self, ticket):
        fresh = ticket.here is None and ticket.buffer is not None
        ask(self, ticket)
        coming.update({ticket} if fresh else ())
        most.append(len(coming))

    def taken(self, ticket, *, last):
        found = take(self, ticket, last=last)
        coming.discard(ticket)
        return found

    monkeypatch.setattr(Host, "ahead", asked)
    monkeypatch.setattr(Host, "get", taken)
    loss.backward()
    assert len(most) > 10
    assert max(most) == 1


# ---- buffers


def test_buffers_are_used_again_and_go_with_the_technique(all_away, monkeypatch):
    made = []
    plain = Host._buffer

    def noted(self, x):
        found = plain(self, x)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Host, "_buffer", noted)
    job = a_job(SMALL["blocks"]())
    x, y = images()

    def step():
        made.clear()
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return [one() for one in made]

    step()
    first, second = ({buffer.data_ptr() for buffer in step()} for _ in range(2))
    assert first == second
    host = planner_of(job).host
    assert sum(map(len, host.free.values())) == len(first)
    kept = [weakref.ref(b) for buffers in host.free.values() for b in buffers]
    job.close()
    gc.collect()
    assert not any(one() is not None for one in kept)


def test_a_smaller_last_batch_takes_the_buffers_that_are_there(all_away):
    job = a_job(SMALL["vgg"]())
    for batch in (8, 3, 8):
        x, y = images(batch)
        job.loss(job.model(x), y).backward()
    host = planner_of(job).host
    crossed = sum(len(c.program.away) for c in planner_of(job).chosen.choices)
    assert sum(map(len, host.free.values())) == crossed


def test_a_forward_without_backward_gives_its_buffers_back(all_away):
    job = a_job(SMALL["vgg"]())
    x, y = images()
    job.loss(job.model(x), y).backward()
    host = planner_of(job).host
    before = sum(map(len, host.free.values()))
    loss = job.loss(job.model(x), y)
    assert sum(map(len, host.free.values())) == 0
    del loss
    gc.collect()
    assert sum(map(len, host.free.values())) == before
    assert host.leaving is None


def test_an_error_in_forward_leaves_nothing(all_away):
    model = SMALL["vgg"]()
    job = a_job(model)
    x, y = images()
    job.loss(job.model(x), y).backward()
    host = planner_of(job).host
    before = sum(map(len, host.free.values()))

    def raises(*_):
        raise KeyboardInterrupt

    hook = model[-1].register_forward_pre_hook(raises)
    with pytest.raises(KeyboardInterrupt):
        job.model(x)
    hook.remove()
    gc.collect()
    assert sum(map(len, host.free.values())) == before
    reference = one_step(model, x, y)
    model.zero_grad()
    job.loss(job.model(x), y).backward()
    assert all(torch.equal(p.grad, reference.gradients[name]) for name, p in model.named_parameters())


def test_a_backward_after_close_is_right(all_away):
    model, (x, y) = SMALL["blocks"](), images()
    plain = one_step(model, x, y)
    job = a_job(model)
    loss = job.loss(job.model(x), y)
    host = planner_of(job).host
    job.close()
    loss.backward()
    assert all(torch.equal(p.grad, plain.gradients[name]) for name, p in model.named_parameters())
    assert not host.free


def test_a_second_backward_is_refused(all_away):
    job = a_job(plain_chain())
    x, y = images()
    loss = job.loss(job.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second backward through"):
        loss.backward()


def test_two_forwards_before_their_backwards_are_right(all_away):
    model, batches = SMALL["blocks"](), [images(seed=i) for i in range(2)]
    plain = Job(SMALL["blocks"](), lambda m: sgd(m, 0.05), accumulate=2)
    plain.model.load_state_dict(model.state_dict())
    job = a_job(model, accumulate=2)
    for one in (plain, job):
        losses = [one.loss(one.model(x), y) for x, y in batches]
        (losses[0] + losses[1]).backward()
    for p, q in zip(plain.model.parameters(), job.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_what_was_written_while_it_was_copied_is_told():
    host, x = Host(), torch.zeros(4)
    host.put(x)
    x.add_(1)
    with pytest.raises(InputError, match="was written while it was copied to host memory"):
        host.settle()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_types_survive(layout, dtype):
    host = Host()
    host._give_back(host.put(torch.zeros(10_000)))  # a larger buffer than is needed
    x = torch.randn(3, 5, 7, 6).to(dtype).contiguous(memory_format=layout)
    found = host.get(host.put(x), last=True)
    assert torch.equal(found, x)
    assert found.stride() == x.stride()
    assert found.dtype is dtype


# ---- bytes and the plan


def planned(name: str, x: torch.Tensor, mib: float, **settings) -> Planner:
    job = Job(SMALL[name](), lambda m: sgd(m, 0.1))
    job.apply(ChannelsLast(), SavedMemory(budget=f"{mib / 0.98:.4f}MiB", host=True, show=False, **settings))
    job.model(x)
    return planner_of(job)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_peak_is_foreseen(name, share, bf16, free_link):
    x, y = images(32, 48)
    x = x.contiguous(memory_format=torch.channels_last)
    most = planned(name, x, 1024.0, bf16=bf16)
    least = most.network.least / 2**20
    planner = planned(name, x, least + share * (most.chosen.peak / 2**20 - least) + 0.07, bf16=bf16)
    foreseen = planner.chosen.peak
    measured = peak_of_step(planner.job, x, y) + planner.network.around.fixed
    assert 0.95 < foreseen / measured < 1.05


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_peak_is_foreseen_with_all_away(name, longest, bf16, monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(longest))
    x, y = images(32, 48)
    planner = planned(name, x.contiguous(memory_format=torch.channels_last), 1024.0, bf16=bf16)
    assert all(choice.program.away for choice in planner.chosen.choices[1:])
    measured = peak_of_step(planner.job, x.contiguous(memory_format=torch.channels_last), y)
    assert 0.95 < planner.chosen.peak / (measured + planner.network.around.fixed) < 1.05


def deep() -> nn.Sequential:
    """Many layers of the same width: what is kept is most of what is there."""
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(10)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(layer for some in layers for layer in some), *head)


def seen(make, *, host: bool, price: float = 0.0):
    job = Job(make().to(memory_format=torch.channels_last), lambda m: sgd(m, 0.1))
    x = images(16, 48)[0].contiguous(memory_format=torch.channels_last)
    found = look(job, install(job), x, how=How(host=host), freed=True)
    job.close()
    found.charge(price)
    return found


def test_it_is_taken_where_it_costs_less_than_running_again():
    without = seen(deep, host=False)
    budget = without.least * 1.1
    again = without.choose(budget)
    assert again.work > 0
    cheap, dear = (seen(deep, host=True, price=price).choose(budget) for price in (1e-3, 1e6))
    assert cheap.work < again.work
    assert any(choice.program.away for choice in cheap.choices)
    assert not any(choice.program.away for choice in dear.choices)
    assert dear.work == again.work
    ample = seen(deep, host=True, price=1e-3).choose(2**40)
    assert not any(choice.program.away for choice in ample.choices)  # nor where all fits


def test_less_memory_can_be_had():
    assert seen(deep, host=True).least < 0.9 * seen(deep, host=False).least


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("price", [0.0, 1.0, 30.0, 300.0])
def test_the_peak_falls_or_stays_as_the_budget_shrinks(name, price):
    found = seen(SMALL[name], host=True, price=price)
    most = found.within(math.inf).peak
    budgets = [most + (found.least - most) * i / 40 for i in range(41)]
    plans = [found.choose(budget + 1) for budget in budgets]
    peaks, works = [plan.peak for plan in plans], [plan.work for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert works == sorted(works)
    assert all(peak <= budget + 1 for peak, budget in zip(peaks, budgets, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_no_plan_of_all_takes_less_time(name):
    """By trying every chain of ways, of the few ones of each stretch."""
    found = seen(SMALL[name], host=True, price=30.0)
    ways = [way for way in found.ways if not way.chunk and way.first == way.last]
    found.ways = [way for n in range(len(found.units)) for way in [w for w in ways if w.first == n][:6]]
    budget = 1.1 * found.least
    plan, least = found.within(budget), math.inf
    chains = [()]
    for n in range(len(found.units)):
        chains = [(*chain, way) for chain in chains for way in found.ways if way.first == n]
    for chain in chains:
        kept = peak = reach = 0
        for way in chain:
            need, link = way.need, way.need.link
            before = found.around.fixed + kept
            peak = max(peak, before + need.x + need.forward + reach, before + need.backward)
            peak = max(peak, before + need.backward - link.slack + reach)
            kept, reach = kept + need.kept + need.x, link.reach
        around = found.around
        peak = max(peak, around.fixed + kept + around.after + around.copies + max(around.head, reach))
        if peak <= budget:
            least = min(least, sum(way.need.work for way in chain))
    assert plan is not None
    assert plan.work == pytest.approx(least)


def test_the_price_is_measured_and_told(capsys, monkeypatch):
    monkeypatch.setattr(network.Network, "speed", lambda self, x: 1e9)
    monkeypatch.setattr(Host, "seconds_a_byte", lambda self, device: 2e-9)
    monkeypatch.setattr(network, "choices", away_only())
    job = a_job(SMALL["vgg"](), SavedMemory(factor=1, lossless=True, host=True, in_backward=False))
    job.model(images()[0])
    chosen = planner_of(job).chosen
    crossed = sum(way.need.link.crossed for way in chosen.choices)
    assert chosen.work == pytest.approx(2 * crossed)
    said = capsys.readouterr().out
    assert "in host memory, charged as if none of its copies were hidden" in said
    assert "kept, in host memory" in said


def test_the_link_and_the_network_are_measured():
    host = Host()
    taken = host.seconds_a_byte(torch.device("cpu"))
    assert 1e-12 < taken < 1e-7
    assert not host.free
    assert host.seconds_a_byte(torch.device("cpu")) == taken
    found = seen(SMALL["vgg"], host=True)
    assert 1e6 < found.speed(images(16, 48)[0]) < 1e13
