"""Asynchronous beside what acts within a step: nodes whose ranks step together, BatchNorm groups, loss scales, EMA."""

import itertools
import socket
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts import Batches, Net, assert_same, make, through_a_file, train, weights
from helpers.graphs import captured_on_cpu
from helpers.ranks import on_processes
from kasoku.core import Comm, InputError, Job, Technique, Threads
from kasoku.device import Graphs, LossScale
from kasoku.distributed import AllReduce, Asynchronous, Graded, Overlap, PerLayer, Planned, VirtualRanks, Wire
from kasoku.distributed.batchnorm import virtual_ranks
from kasoku.optim import EMA, sgd

SIZE, NODE = 4, 2
GROUPS = Graded(first=1, power=1.5, least_bytes=1000)
PLAIN = {"dropout": 0.0}  # dropout's draws belong to a rank


class Jumps(Technique, moves_weights=True):
    """Changes weights by more than the updates, as an average that is written back does."""


def nodes(**settings: Any) -> Asynchronous:
    return Asynchronous(node=NODE, buckets=PerLayer(least_bytes=0), **settings)


def whole(job: Job) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in job.model.parameters()])


def stepped(
    comm: Comm, *techniques: Technique, steps: int = 9, accumulate: int = 1
) -> tuple[list[Tensor], Tensor, int]:
    """The parameters after every step and after the last sync point, and the number of updates."""
    torch.set_num_threads(1)
    job, seen = make(*techniques, model=Net(seed=comm.rank, **PLAIN), comm=comm, accumulate=accumulate), []
    train(job, steps, each=lambda: seen.append(whole(job)))
    updates = sum(job.kept("asynchronous").staleness.values())
    found = seen, whole(job), updates
    job.close()
    return found


EXCHANGES = {
    "default": nodes(),
    "at once": nodes(hidden=False),
    "at once, predicted": nodes(hidden=False, predict=1.0),
    "bf16": nodes(wire="bf16", every=1),
    "int8": nodes(wire="int8", hidden=False),
    "bounded": nodes(max_staleness=1),
    "every third": nodes(every=3),
}


@pytest.mark.parametrize("inside", [Overlap(GROUPS), AllReduce()], ids=["Overlap", "AllReduce"])
@pytest.mark.parametrize("technique", EXCHANGES.values(), ids=EXCHANGES)
def test_ranks_of_a_node_have_equal_bits_after_every_step(technique: Asynchronous, inside: Technique):
    _equal_in_nodes(Threads(SIZE).run(lambda comm: stepped(comm, technique, inside)))


def _equal_in_nodes(ranks: list[tuple[list[Tensor], Tensor, int]]) -> None:
    for first in range(0, SIZE, NODE):
        for seen in zip(*(steps for steps, _, _ in ranks[first : first + NODE]), strict=True):
            assert all(torch.equal(seen[0], x) for x in seen[1:])
    assert any(not torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[NODE][0], strict=True))  # nodes run ahead
    assert all(torch.equal(ranks[0][1], end) for _, end, _ in ranks[1:])


@pytest.mark.process
@pytest.mark.parametrize(
    "technique",
    [nodes(wire="bf16"), pytest.param(nodes(hidden=False), marks=pytest.mark.smoke)],
    ids=["bf16", "at once"],
)
def test_nodes_of_processes_step_together_too(technique: Asynchronous):
    _equal_in_nodes(on_processes(SIZE, stepped, technique, Overlap(GROUPS)))


def test_a_node_is_one_worker():
    layers, steps = 5, 8
    for _, _, updates in Threads(SIZE).run(lambda comm: stepped(comm, nodes(every=1), AllReduce(), steps=steps)):
        assert updates == (SIZE // NODE) * steps * layers * (SIZE // NODE)  # workers, and owners of a piece of each


class Slope(nn.Module):
    """Its gradient is its input, so the sum of all updates is known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def moved(comm: Comm, *techniques: Technique, steps: int = 8, accumulate: int = 1) -> tuple[Tensor, Tensor]:
    """How far the weights moved, and how far the mean gradients of all ranks move them."""
    model, wanted = Slope(), torch.zeros(7)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm, accumulate=accumulate).apply(*techniques)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        for _ in range(accumulate):
            x = torch.randint(-60, 60, (7,), generator=generator).float() * 8
            job.backward(model(x))
            wanted -= x / (accumulate * comm.size)
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.drain()
    comm.all_reduce(wanted).wait()
    found = model.w.detach().clone(), wanted
    job.close()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("beside", [(), (Overlap(GROUPS),), (AllReduce(),)], ids=["alone", "Overlap", "AllReduce"])
def test_the_weights_move_by_the_mean_of_all_ranks(beside: tuple[Technique, ...], accumulate: int):
    for found, wanted in Threads(SIZE).run(lambda comm: moved(comm, nodes(), *beside, accumulate=accumulate)):
        assert torch.equal(found, wanted)


def _trained(comm: Comm, *techniques: Technique) -> dict[str, Tensor]:
    job = make(*techniques, model=Net(seed=comm.rank, **PLAIN), comm=comm)
    train(job, 6)
    return weights(job)


@pytest.mark.parametrize("technique", [Asynchronous(node=SIZE), Asynchronous(), Asynchronous(max_staleness=0)])
def test_one_node_of_all_ranks_is_overlap_bit_for_bit(technique: Asynchronous, capsys):
    ours = Threads(SIZE).run(lambda comm: _trained(comm, technique, Overlap(GROUPS)))
    theirs = Threads(SIZE).run(lambda comm: _trained(comm, Overlap(GROUPS)))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)
    said = capsys.readouterr()
    assert ("all ranks share a host, so that Overlap has them all step together" in said.out + said.err) == (
        technique.is_asynchronous
    )


def test_nodes_are_the_ranks_of_a_host(monkeypatch):
    def run(comm: Comm) -> tuple[int, int]:
        gather = comm.gather_objects
        monkeypatch.setattr(comm, "gather_objects", lambda x: gather("ab"[comm.rank % 2] if x == host else x))
        job = make(Asynchronous(), AllReduce(), comm=comm)
        return job.step_comm.size, job.step_comm.rank

    host = socket.gethostname()
    assert Threads(SIZE).run(run) == [(2, 0), (2, 0), (2, 1), (2, 1)]


def test_synchronous_phases_of_nodes_have_equal_bits_on_all_ranks():
    technique = nodes(warmup=1.0, finish=2.0)  # epochs of four steps
    ranks = Threads(SIZE).run(lambda comm: stepped(comm, technique, Overlap(GROUPS), LossScale(), steps=12))
    for step, every in enumerate(zip(*(seen for seen, _, _ in ranks), strict=True)):
        assert all(torch.equal(every[0], x) for x in every[1:]) == (step < 4 or step >= 8), step


def test_synchronous_phases_start_from_the_smallest_loss_scale():
    def run(comm: Comm) -> list[float]:
        job, scales = make(nodes(warmup=0.0, finish=1.0), LossScale(), model=Net(**PLAIN), comm=comm), []
        job.kept("loss_scale").scale = 2.0 ** (10 + comm.rank)
        train(job, 6, each=lambda: scales.append(job.kept("loss_scale").scale))
        return scales

    for rank, scales in enumerate(Threads(SIZE).run(run)):
        assert scales == [2.0 ** (10 + rank)] * 4 + [2.0**10] * 2


def test_ranks_agree_on_a_loss_scale_where_a_phase_begins_not_in_a_loss():
    """So a loss may be computed on one rank alone, or on none."""

    def run(comm: Comm) -> tuple[float, float]:
        job = make(nodes(finish=1.0), LossScale(), model=Net(**PLAIN), comm=comm)
        (x_NCHW, y_N), scaler = job.plain_loader.batches[0], job.kept("loss_scale")
        scaler.scale = 2.0 ** (10 + comm.rank)
        train_alone(job, 4)
        outputs = job.model(x_NCHW)  # the phase begins
        agreed = scaler.scale
        if comm.rank == 1:
            job.loss(outputs, y_N)
        return agreed, scaler.scale

    assert Threads(SIZE).run(run) == [(2.0**10, 2.0**10)] * SIZE


class Sometimes(Net):
    """On ranks below the number of the step, only the bias of its head has a gradient."""

    def __init__(self, rank: int) -> None:
        super().__init__(**PLAIN)
        self.calls, self.rank = 0, rank

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out, self.calls = super().forward(x_NCHW), self.calls + 1
        return out if self.calls <= self.rank else out.detach() + self.head.bias


def test_synchronous_phases_skip_what_nodes_skip():
    def run(comm: Comm) -> list[Tensor]:
        beside, seen = Overlap(GROUPS, unused="skip"), []
        job = make(nodes(warmup=1.0), beside, model=Sometimes(comm.rank), comm=comm)
        train(job, 4, each=lambda: seen.append(whole(job)))
        return seen

    ranks = Threads(SIZE).run(run)
    for every in zip(*ranks, strict=True):
        assert all(torch.equal(every[0], x) for x in every[1:])
    changed = [float((after != before).float().mean()) for before, after in itertools.pairwise(ranks[0])]
    assert min(changed[:2]) > 0.9
    assert 0 < changed[2] < 0.01  # only the bias has a gradient on any rank


@pytest.mark.parametrize(("beside", "skips"), [((), [0]), ((AllReduce(),), [0, 1])], ids=["a rank", "a node"])
def test_an_overflow_skips_the_step_of_its_rank_or_node_alone(beside: tuple[Technique, ...], skips: list[int]):
    def run(comm: Comm) -> float:
        model = Slope()
        job = Job(model, sgd(model, lr=1.0), comm=comm, loss=lambda out, _: out)
        job.apply(LossScale(start=4.0), nodes(hidden=False), *beside)
        for step in range(3):
            x = torch.ones(7)
            if step == 1 and comm.rank == 0:
                x[0] = float("inf")
            job.backward(job.loss(model(x), x))
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        assert model.w.isfinite().all()
        return job.kept("loss_scale").scale

    scales = Threads(SIZE).run(run)
    assert [rank for rank, scale in enumerate(scales) if scale == 2.0] == skips
    assert {*scales} == {2.0, 4.0}


@pytest.mark.parametrize(("beside", "images"), [((), 2), ((), 4), ((AllReduce(),), 8)], ids=["half", "share", "node"])
def test_groups_have_norm_batch_images_of_those_that_step_together(beside, images: int, monkeypatch):
    """A rank takes 4 images of a batch of 16. One node makes no step, so that nothing may wait for it."""
    counts, means = set[int](), dict[int, Tensor]()
    take, values = virtual_ranks._RunningStatistics.take, 8 * 8  # of a channel of an image

    def noted(self: Any, i: int, mean_C: Tensor, variance_C: Tensor, n: int) -> None:
        counts.add(n // values)
        means.setdefault(self.job.comm.rank, mean_C.clone())
        take(self, i, mean_C, variance_C, n)

    monkeypatch.setattr(virtual_ranks._RunningStatistics, "take", noted)

    def run(comm: Comm) -> dict[str, Tensor]:
        technique = VirtualRanks(norm_batch=images, average=0.5)
        job = make(technique, nodes(), *beside, model=Net(seed=comm.rank, **PLAIN), comm=comm)
        if comm.rank < NODE:
            train_alone(job, 3)
        job.drain()
        return weights(job)

    ranks = Threads(SIZE).run(run)
    assert counts == {min(images, 4)}  # a rank's own of its group
    assert torch.equal(means[0], means[1]) == (images > 4)
    for other in ranks[1:]:
        assert_same(ranks[0], other)


def train_alone(job: Job, steps: int) -> None:
    """Steps without a sync point after them."""
    for _, (x_NCHW, y_N) in zip(range(steps), job.loader, strict=False):
        job.backward(job.loss(job.model(x_NCHW), y_N))
        job.optimizer.step()
        job.optimizer.zero_grad()


def test_ema_averages_at_sync_points_by_the_steps_between():
    """Ranks make 4 and 2 steps, 3 of a worker on average."""

    def run(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        job = make(EMA(decay=0.8, warmup=False), nodes(), model=Net(seed=comm.rank, **PLAIN), comm=comm)
        wanted: dict[str, Tensor] = {}
        for _ in range(3):
            train_alone(job, 4 if comm.rank % 2 else 2)
            job.plain_loader.position = 0
            job.drain()
            for name, x in job.model.named_parameters():
                first = wanted.setdefault(name, x.detach().clone())
                wanted[name] = torch.lerp(first, x.detach(), 1 - 0.8**3)
        own = weights(job)
        with job.evaluation() as model:
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
        return found, wanted, own

    ranks = Threads(SIZE).run(run)
    for found, wanted, own in ranks:
        assert_same(ranks[0][0], found)
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)
            assert not torch.equal(found[name], own[name])


@pytest.mark.parametrize("beside", [(), (AllReduce(),), (Overlap(GROUPS),)], ids=["alone", "AllReduce", "Overlap"])
def test_a_replayed_graph_reads_the_weights_that_were_exchanged(beside: tuple[Technique, ...]):
    """By a stand-in on the CPU; no GPU has seen it."""
    own, net = Asynchronous(node=NODE, hidden=False), {**PLAIN, "norm": False}

    def run(comm: Comm, *techniques: Technique) -> tuple[list[Tensor], int]:
        job, seen = make(*techniques, own, *beside, model=Net(seed=comm.rank, **net), comm=comm), []
        train(job, 6, each=lambda: seen.append(whole(job)))
        return [*seen, whole(job)], job.step_comm.size

    plain = Threads(SIZE).run(run)
    with captured_on_cpu() as counts:
        replayed = Threads(SIZE).run(lambda comm: run(comm, Graphs()))
    assert counts.captured == SIZE
    for (a, _), (b, _) in zip(plain, replayed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_resumed_nodes_go_on_from_the_same_weights():
    def run(comm: Comm) -> tuple[dict[str, Tensor], ...]:
        beside = (EMA(decay=0.5), LossScale(start=8.0), Overlap(GROUPS), VirtualRanks(norm_batch=8))
        job = make(nodes(), *beside, comm=comm)
        train(job, 3)
        state, kept = through_a_file(job.state_dict()), weights(job)
        other = make(nodes(), *beside, model=Net(seed=7), comm=comm)
        other.model.load_state_dict(kept)
        other.load_state_dict(state)
        assert other.steps == 3
        train(other, 3)
        return kept, weights(other)

    ranks = Threads(SIZE).run(run)
    for kept, later in ranks:
        assert_same(ranks[0][0], kept)
        assert_same(ranks[0][1], later)
    assert not torch.equal(ranks[0][0]["head.weight"], ranks[0][1]["head.weight"])


def of_unequal_speed(comm: Comm, *techniques: Technique) -> Job:
    """The second node has half of the batches: where ranks wait for all others, it has made half as many steps."""
    job = make(*techniques, model=Net(seed=comm.rank, **PLAIN), comm=comm)
    assert isinstance(job.plain_loader, Batches)
    del job.plain_loader.batches[4 - 2 * (comm.rank // NODE) :]
    return job


def test_a_node_may_measure_its_plan_while_another_has_one():
    """It measures on in synchronous steps, which all ranks make together."""

    def run(comm: Comm) -> tuple[bool, bool, dict[str, Tensor]]:
        planned = Overlap(Planned(warm=0, measure=1))
        job = of_unequal_speed(comm, nodes(finish=1.0), planned)
        engine = job.kept("overlap")
        train_alone(job, len(job.plain_loader))
        job.plain_loader.position = 0
        early = engine.profiler is None
        train(job, 8)  # of both nodes: as many steps, all of them synchronous
        return early, engine.profiler is None, weights(job)

    ranks = Threads(SIZE).run(run)
    assert [early for early, _, _ in ranks] == [True, True, False, False]
    assert all(late for _, late, _ in ranks)
    for _, _, found in ranks[1:]:
        assert_same(ranks[0][2], found)


@pytest.mark.parametrize("busy", [[0], [1], [0, 1]], ids=["first node", "second node", "both"])
def test_nodes_save_the_errors_of_their_reducer_at_any_step(busy: list[int]):
    def run(comm: Comm) -> tuple[list[bool], bool]:
        job = make(nodes(), Overlap(GROUPS, reducer=Wire()), model=Net(seed=comm.rank, **PLAIN), comm=comm)
        if comm.rank // NODE in busy:
            train_alone(job, 3)
        state = through_a_file(job.state_dict())
        other = make(nodes(), Overlap(GROUPS, reducer=Wire()), model=Net(seed=7, **PLAIN), comm=comm)
        other.model.load_state_dict(job.model.state_dict())
        other.load_state_dict(state)
        own, found = (j.kept("overlap").reduce.state_dict() for j in (job, other))
        same = own.keys() == found.keys()
        for name, by_key in own.items():
            assert_same(by_key, found[name])
        return [bool(errors) for errors in state["kept"]["overlap"]["reduce"]], same

    for saved, same in Threads(SIZE).run(run):
        assert saved == [rank // NODE in busy for rank in range(SIZE)]
        assert same


def test_nodes_of_unequal_numbers_of_steps_meet_in_a_synchronous_phase():
    def run(comm: Comm) -> tuple[int, list[Tensor]]:
        job = of_unequal_speed(comm, nodes(finish=1.0), Overlap(GROUPS, reducer=Wire()), LossScale(start=8.0))
        seen: list[Tensor] = []
        train_alone(job, len(job.plain_loader))
        job.plain_loader.position, own = 0, job.steps
        train(job, 4, each=lambda: seen.append(whole(job)))
        return own, seen

    ranks = Threads(SIZE).run(run)
    assert [steps for steps, _ in ranks] == [4, 4, 2, 2]
    for every in zip(*(seen for _, seen in ranks), strict=True):
        assert all(torch.equal(every[0], x) for x in every[1:])


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ((Asynchronous(node=3), AllReduce()), "4 ranks in nodes of 3: node must divide 4"),
        ((Jumps(), Asynchronous()), "all ranks would add its jump to the slow weights as an update; use EMA"),
        ((Overlap(), AllReduce(), Asynchronous()), "both average gradients over the ranks; leave one of them out"),
        ((VirtualRanks(norm_batch=16), nodes(), AllReduce()), r"2 of 4 ranks step together: norm_batch at most 8"),
    ],
)
def test_what_nodes_cannot_have_is_refused_in_a_line(techniques: tuple[Technique, ...], words: str):
    def run(comm: Comm) -> None:
        job = make(comm=comm)
        job.plain_loader.batch, job.plain_loader.parts = 16, 1
        job.apply(*techniques)

    with pytest.raises(InputError, match=words):
        Threads(SIZE).run(run)


def test_hosts_of_unequal_numbers_of_ranks_are_refused(monkeypatch):
    def run(comm: Comm) -> None:
        gather = comm.gather_objects
        comm.gather_objects = lambda x: gather("aaab"[comm.rank] if x == socket.gethostname() else x)
        make(Asynchronous(), AllReduce(), comm=comm)

    with pytest.raises(InputError, match=r"hosts of \[3, 1\] ranks; start as many on each, or give node"):
        Threads(SIZE).run(run)


def test_a_technique_that_divides_the_ranks_comes_before_those_that_average():
    with pytest.raises(InputError, match="Asynchronous comes before AllReduce: give both to one call of apply"):
        Threads(SIZE).run(lambda comm: make(AllReduce(), comm=comm).apply(Asynchronous()))
