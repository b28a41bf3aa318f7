"""SavedMemory on several ranks: buckets are averaged, used and freed in backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from contracts import go_on
from helpers.nets import blocks, images, peak_of_step, plain_chain, planner_of
from helpers.ranks import on_processes, on_ranks
from kasoku.core import Comm, InputError, Job, Technique, Threads, backward_updates
from kasoku.device import Autocast, ChannelsLast
from kasoku.distributed import AllReduce, OneBucket, Overlap, VirtualRanks
from kasoku.distributed.ddp.bucket_buffers import Bucket
from kasoku.memory import SavedMemory
from kasoku.memory.large_linear import LinearInBackward
from kasoku.optim import EMA, Clip, sgd

LOSSLESS = SavedMemory(factor=1, lossless=True, show=False)
PROCESSES = pytest.param("processes", marks=pytest.mark.process)


def with_linear() -> nn.Sequential:
    """Convolutions, and a Linear of 2 MiB, which is large."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 4)),
    )


class Branches(nn.Module):
    """Heads that read the same features; ranks may call them, and so get their gradients, in different orders."""

    def __init__(self, width: int = 8, out: int = 4, *, convolutions: int = 0) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, width, 3), nn.Linear(width, out), nn.Linear(width, out)
        self.others = nn.ModuleList(nn.Conv2d(width, out, 1) for _ in range(convolutions))
        self.order = [0, 1, *range(2, 2 + convolutions)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        heads = [
            self.one,
            self.two,
            *(lambda x, layer=layer: layer(x[:, :, None, None]).flatten(1) for layer in self.others),
        ]
        results = {i: heads[i](x) for i in self.order}
        return torch.stack([results[i] for i in sorted(results)]).sum(0)


NETWORKS = {
    "chain": plain_chain,
    "blocks": blocks,
    "linear": with_linear,
    "branches": Branches,
    "large branches": partial(Branches, 512, 512, convolutions=2),
}


def job_of(comm: Comm, network: str, *techniques: Technique, accumulate: int = 1) -> Job:
    torch.manual_seed(0)
    model = NETWORKS[network]()
    if "branches" in network:
        model.order.sort(reverse=comm.rank == 1)
    rule = partial(sgd, lr=0.05, weight_decay=1e-3)
    return Job(model, rule, comm=comm, accumulate=accumulate).apply(*techniques)


def backward(job: Job, step: int, *, batch: int = 6) -> None:
    """All backward passes of a step, on images of this rank."""
    for part in range(job.accumulate):
        x, y = images(batch, seed=100 * step + 10 * part + job.comm.rank)
        job.backward(job.loss(job.model(x), y))


def train(job: Job, steps: range = range(4), *, batch: int = 6) -> None:
    for step in steps:
        backward(job, step, batch=batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.drain()


def state_of(job: Job) -> dict[str, Tensor]:
    """Weights, statistics and momentum."""
    momenta = {f"momentum of {n}": job.state_of(p)["momentum_buffer"] for n, p in job.model.named_parameters()}
    return {name: x.clone() for name, x in (job.model.state_dict() | momenta).items()}


def trained(comm: Comm, network: str, accumulate: int, *techniques: Technique, batch: int = 6) -> dict[str, Tensor]:
    job = job_of(comm, network, *techniques, accumulate=accumulate)
    train(job, batch=batch)
    return state_of(job)


def trained_unevenly(comm: Comm, *techniques: Technique) -> dict[str, Tensor]:
    return trained(comm, "linear", 1, *techniques, batch=6 - 2 * comm.rank)


def assert_equal(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(a, b, strict=True):
        for name, x in ours.items():
            assert torch.equal(x, theirs[name]), name


def assert_near(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(a, b, strict=True):
        for name, x in ours.items():
            assert (x - theirs[name]).abs().max() <= tolerance * max(1.0, float(x.abs().max())), name


# ---- the same steps


@pytest.mark.parametrize("where", ["threads", PROCESSES])
@pytest.mark.parametrize(("network", "accumulate"), [("chain", 1), ("blocks", 2), ("linear", 1)])
def test_lossless_moves_the_bits_of_overlap_alone(where, network, accumulate):
    plain = on_ranks(where, 2, trained, network, accumulate, Overlap())
    assert_equal(plain, on_ranks(where, 2, trained, network, accumulate, Overlap(), LOSSLESS))


@pytest.mark.parametrize("beside", [EMA(0.5), Clip(0.05), Autocast("bf16")])
def test_other_techniques_beside_it_see_the_same_bits(beside):
    plain = on_ranks("threads", 2, trained, "blocks", 1, Overlap(), beside)
    assert_equal(plain, on_ranks("threads", 2, trained, "blocks", 1, Overlap(), beside, LOSSLESS))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_linear_by_gathered_factors_moves_as_with_overlap(ranks):
    plain = on_ranks("threads", ranks, trained, "linear", 1, Overlap())
    ours = on_ranks("threads", ranks, trained, "linear", 1, Overlap(), SavedMemory(factor=1, show=False))
    assert_near(plain, ours)
    assert_equal(ours[:1], ours[1:2])


@pytest.mark.parametrize("where", ["threads", PROCESSES])
def test_ranks_with_unequal_batches_gather_factors_too(where):
    plain = on_ranks(where, 2, trained_unevenly, Overlap())
    ours = on_ranks(where, 2, trained_unevenly, Overlap(), SavedMemory(factor=1, show=False))
    assert_near(plain, ours)
    assert_equal(ours[:1], ours[1:])


@pytest.mark.parametrize(("batch", "buckets", "gathers"), [(6, None, 8), (240, None, 0), (6, OneBucket(), 0)])
def test_factors_are_gathered_where_they_are_fewer_bytes(monkeypatch, batch, buckets, gathers):
    used, update = [], LinearInBackward.update
    monkeypatch.setattr(LinearInBackward, "update", lambda *args, **scale: used.append(args) or update(*args, **scale))
    overlap = Overlap() if buckets is None else Overlap(buckets)
    train_it = partial(trained, batch=batch)
    ours = Threads(2).run(lambda comm: train_it(comm, "linear", 1, overlap, SavedMemory(factor=1, show=False)))
    assert_near(Threads(2).run(lambda comm: train_it(comm, "linear", 1, overlap)), ours)
    assert len(used) == gathers  # 4 steps of 2 ranks


def test_ranks_whose_gradients_arrive_in_another_order_send_in_one_order():
    plain = on_ranks("threads", 2, trained, "branches", 1, Overlap())
    assert_equal(plain, on_ranks("threads", 2, trained, "branches", 1, Overlap(), LOSSLESS))


def in_order(comm: Comm, order: tuple[int, ...], *techniques: Technique) -> dict[str, Tensor]:
    """Rank 1 calls the heads in this order."""
    job = job_of(comm, "large branches", *techniques)
    job.model.order[:] = order if comm.rank == 1 else sorted(order)
    train(job, range(2))
    return state_of(job)


@pytest.mark.parametrize("limit", [1, backward_updates.LIMIT])
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 2, 3, 0), (2, 3, 0, 1), (0, 3, 1, 2)])
def test_large_layers_in_any_order_move_as_with_overlap(monkeypatch, order, limit):
    monkeypatch.setattr(backward_updates, "LIMIT", limit)  # of 1 byte: each gradient waits for the one before it
    plain, lossless, ours = (
        Threads(2).run(lambda comm, techniques=techniques: in_order(comm, order, Overlap(), *techniques))
        for techniques in ([], [LOSSLESS], [SavedMemory(factor=1, show=False)])
    )
    assert_equal(plain, lossless)
    assert_near(plain, ours)
    assert_equal(ours[:1], ours[1:])


def trained_with_a_log(comm: Comm, log: str, *techniques: Technique) -> dict[str, Tensor]:
    """Rank 0 alone runs one forward more before each step, in training mode; `log`: what becomes of its output."""
    job = job_of(comm, "linear", *techniques)
    for step in range(3):
        out = job.model(images(4)[0]) if comm.rank == 0 and log else None
        out = out if log == "kept" else None
        train(job, range(step, step + 1))
        del out
    return state_of(job)


@pytest.mark.parametrize("where", ["threads", PROCESSES])
@pytest.mark.parametrize("log", ["dropped", "kept"])
def test_one_rank_alone_may_run_a_forward_to_log_its_output(where, log):
    ours = on_ranks(where, 2, trained_with_a_log, log, Overlap(), SavedMemory(factor=1, show=False))
    assert_near(on_ranks(where, 2, trained_with_a_log, "", Overlap()), ours)
    assert_equal(ours[:1], ours[1:])


@pytest.mark.parametrize(("setting", "value"), [("lr", 0.01), ("momentum", 0.0)])
@pytest.mark.parametrize("lossless", [True, False])
def test_a_setting_changed_after_backward_is_refused_on_every_rank(setting, value, lossless):
    def rank(comm: Comm) -> bool:
        job = job_of(comm, "linear", Overlap(), SavedMemory(factor=1, lossless=lossless, show=False))
        backward(job, 0)
        for group in job.optimizer.param_groups:
            group[setting] = value
        try:
            job.optimizer.step()
        except InputError as error:
            return "a rate, or another setting of the optimizer, was changed" in str(error)
        return False

    assert Threads(2).run(rank) == [True, True]


def test_channels_of_freed_gradients_are_opened_before_the_first_step(monkeypatch):
    opened: list[Comm] = []
    monkeypatch.setattr(Comm, "warm", lambda comm, device, *, channels=0: opened.append(comm))
    exchanges = Threads(2).run(lambda comm: job_of(comm, "chain", Overlap(), LOSSLESS).in_backward.exchange)
    assert all(exchange.factors in opened for exchange in exchanges)


# ---- memory


def test_buckets_are_freed_in_backward_while_few_bytes_are_in_flight(monkeypatch):
    monkeypatch.setattr(backward_updates, "LIMIT", 1)
    monkeypatch.setattr("kasoku.distributed.ddp.bucket_plan.MIB", 1)  # a bucket for each tensor
    most, left, allocate = [], [], Bucket.allocate

    def rank(comm: Comm) -> dict[str, Tensor]:
        job = job_of(comm, "chain", Overlap(), LOSSLESS)
        buckets = job.in_backward.exchange.layout.buckets if comm.rank == 0 else []

        def counted(bucket: Bucket) -> None:
            allocate(bucket)
            if bucket in buckets:
                most.append(sum(b.flat.numel() > 0 for b in buckets))

        monkeypatch.setattr(Bucket, "allocate", counted if comm.rank == 0 else Bucket.allocate)
        for step in range(4):
            backward(job, step)
            every = job.in_backward.exchange.layout.buckets
            left.append(sum(b.flat.nbytes for b in every) <= max(b.nbytes for b in every))
            job.optimizer.step()
            job.optimizer.zero_grad()
        return state_of(job)

    ours = Threads(2).run(rank)
    assert len(most) == 4 * 10  # of 10 tensors
    assert max(most) < 10  # those of a segment come together
    assert all(left)
    monkeypatch.undo()
    assert_equal(on_ranks("threads", 2, trained, "chain", 1, Overlap()), ours)


def peaks(comm: Comm, network: str) -> tuple[float, float]:
    """The predicted peak, and the measured one."""
    job = job_of(comm, network, ChannelsLast(), Overlap(), SavedMemory(factor=1.2, show=False))
    x, y = images(96, 16)
    measured = peak_of_step(job, x.contiguous(memory_format=torch.channels_last), y)
    planner = planner_of(job)
    return planner.plan.peak, measured + planner.network.outside.fixed


@pytest.mark.process
@pytest.mark.parametrize("network", ["chain", "linear", "blocks"])
def test_the_peak_is_foreseen_on_every_rank(network):
    for predicted, measured in on_processes(2, peaks, network):
        assert 0.97 < predicted / measured < 1.03


# ---- resume, and what is less


def test_two_ranks_resume_bit_for_bit():
    techniques = (Overlap(), SavedMemory(factor=1, show=False), VirtualRanks(norm_batch=3))

    def whole(comm: Comm) -> dict[str, Tensor]:
        job = job_of(comm, "linear", *techniques)
        train(job, range(6))
        return state_of(job)

    def resumed(comm: Comm) -> dict[str, Tensor]:
        first = job_of(comm, "linear", *techniques)
        train(first, range(3))
        second = job_of(comm, "linear", *techniques)
        go_on(first, second)
        train(second, range(3, 6))
        return state_of(second)

    assert_equal(Threads(2).run(whole), Threads(2).run(resumed))


@pytest.mark.parametrize(
    ("techniques", "reason"),
    [
        ([AllReduce()], "ranks exchange at the step"),
        ([Overlap(unused="skip")], "ranks exchange at the step"),
        ([Overlap(), Clip(0.5)], "a technique needs all gradients before any update"),
    ],
)
def test_gradients_that_stay_until_the_step_are_told_once(techniques, reason, capsys):
    shown = SavedMemory(factor=1, lossless=True)
    ours = on_ranks("threads", 2, trained, "chain", 1, *techniques, shown)
    assert capsys.readouterr().out.count(f"SavedMemory: {reason}") == 1
    assert_equal(on_ranks("threads", 2, trained, "chain", 1, *techniques), ours)


# ---- groups of images that share statistics


@pytest.mark.parametrize(("norm_batch", "accumulate"), [(2, 1), (3, 2), (6, 1), (12, 1)])
def test_virtual_ranks_move_the_same_bits_beside_it(norm_batch, accumulate):
    steered = VirtualRanks(norm_batch)
    plain = on_ranks("threads", 2, trained, "blocks", accumulate, Overlap(), steered)
    ours = on_ranks("threads", 2, trained, "blocks", accumulate, Overlap(), steered, LOSSLESS)
    assert_equal(plain, ours)
    for name in (name for name in ours[0] if "running" in name or "tracked" in name):
        assert torch.equal(ours[0][name], ours[1][name]), name


@pytest.mark.parametrize("norm_batch", [2, 12])
def test_plans_that_recompute_groups_come_near(norm_batch):
    steered = VirtualRanks(norm_batch)

    def rank(comm: Comm) -> dict[str, Tensor]:
        job = job_of(comm, "blocks", Overlap(), steered, SavedMemory(factor=1.5, show=False))
        train(job)
        programs = [choice.program for choice in planner_of(job).plan.choices]
        assert any(step.kind == "compute" for program in programs for step in program.backward)
        assert sum(node.op == "norm" for program in programs for node in program.graph.nodes) == 7  # all
        return state_of(job)

    assert_near(on_ranks("threads", 2, trained, "blocks", 1, Overlap(), steered), Threads(2).run(rank), 1e-4)


@pytest.mark.parametrize("beside", [(VirtualRanks(1),), ()])
def test_a_group_of_one_value_has_no_variance(beside):
    model = nn.Sequential(nn.Conv2d(3, 8, 16), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    job = Job(model, partial(sgd, lr=0.05)).apply(*beside, LOSSLESS)
    with pytest.raises(InputError, match="BatchNorm of one image of one pixel has no variance"):
        job.model(images(4 if beside else 1, 16)[0])
