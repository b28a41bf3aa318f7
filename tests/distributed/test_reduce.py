"""Means in fewer bytes: the same bits on every rank, nothing lost over steps, and networks as good."""

import gc
import io
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts import one_thread as one_thread
from helpers.ranks import on_ranks
from kasoku.config.toml import parse, table
from kasoku.core import Comm, InputError, Solo, Work
from kasoku.data import digits
from kasoku.distributed.ddp.compression import ChainedReduce, Hierarchical, LowRank, Mean, Reduce, Reducer, Wire
from kasoku.distributed.environment import place

LENGTHS = (4096, 3001, 5, 1)
LOW = LowRank(min_elements=100)
ALL = [Mean(), Wire(), Wire("fp16"), LOW, Hierarchical(2), Hierarchical(2, Wire())]


PROCESSES = pytest.param("processes", marks=pytest.mark.process)
everywhere = pytest.mark.parametrize(
    ("where", "size"),
    [
        ("threads", 2),
        ("threads", 4),
        pytest.param("processes", 2, marks=pytest.mark.process),
        pytest.param("processes", 4, marks=[pytest.mark.process, pytest.mark.exhaustive]),
    ],
)


def gradient(rank: int, step: int, n: int) -> Tensor:
    """What ranks agree on, and noise of their own."""
    common = torch.randn(n, generator=torch.Generator().manual_seed(n))
    return common + 0.5 * torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + 10 * n + rank))


def true_mean(size: int, step: int, n: int) -> Tensor:
    return sum(gradient(r, step, n).double() for r in range(size)).float() / size  # type: ignore[return-value]


def reduced(reduce: Reduce, rank: int, step: int, waits: Sequence[int] = (0, 1, 2, 3)) -> list[Tensor]:
    """One step: all pieces are started, then waited for in the order of `waits`."""
    pieces = [gradient(rank, step, n) for n in LENGTHS]
    works = [reduce(str(i), x) for i, x in enumerate(pieces)]
    for i in waits:
        works[i].wait()
        works[i].wait()
        assert works[i].done()
    return pieces


def steps(comm: Comm, reducer: Reducer, count: int, waits: Sequence[Sequence[int]] = ((0, 1, 2, 3),)) -> Any:
    reduce = reducer.bind(comm)
    found = [reduced(reduce, comm.rank, step, waits[comm.rank % len(waits)]) for step in range(count)]
    reduce.settle()
    return found


def every_reducer(comm: Comm) -> list[Any]:
    return [steps(comm, reducer, 3) for reducer in ALL]


def unit(reducer: Reducer, n: int) -> float:
    """What one rounding may change, of a number."""
    if reducer in (Mean(), Hierarchical(2)) or (isinstance(reducer, LowRank) and n < LOW.min_elements):
        return 2**-22
    return 2**-11 if reducer == Wire("fp16") else 1.0 if isinstance(reducer, LowRank) else 2**-8


@pytest.mark.parametrize(
    ("where", "size"),
    [
        ("threads", 2),
        ("threads", 4),
        pytest.param("processes", 2, marks=[pytest.mark.process, pytest.mark.smoke]),
        pytest.param("processes", 4, marks=[pytest.mark.process, pytest.mark.exhaustive]),
    ],
)
def test_all_ranks_get_the_same_bits_near_the_mean(where: str, size: int):
    ranks = on_ranks(where, size, every_reducer)
    for which, reducer in enumerate(ALL):
        for other in ranks:
            for mine, theirs in zip(ranks[0][which], other[which], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), reducer
        for got, n in zip(ranks[0][which][0], LENGTHS, strict=True):
            most = torch.stack([gradient(r, 0, n).abs() for r in range(size)]).mean(0)
            roundings = size + 1  # of the share, of each addition, of the result
            near = (got - true_mean(size, 0, n)).abs() <= roundings * unit(reducer, n) * most + 1e-6
            assert bool(near.all()) or unit(reducer, n) == 1, (reducer, n)


def sums(comm: Comm, reducer: Reducer, count: int, n: int, forgets: bool) -> Tensor:
    reduce, total = reducer.bind(comm), torch.zeros(n)
    for _ in range(count):
        x = gradient(comm.rank, 0, n)
        reduce("piece", x).wait()
        total += x
        if forgets:
            reduce.load_state_dict({})
    reduce.settle()
    return total


def gap(size: int, where: str, reducer: Reducer, *, forgets: bool = False, count: int = 50, n: int = 2000) -> float:
    """How far the sum of what was applied is from the sum of true means, of its norm; gradients never change."""
    true = count * true_mean(size, 0, n)
    return float((on_ranks(where, size, sums, reducer, count, n, forgets)[0] - true).norm() / true.norm())


@everywhere
def test_feedback_gives_later_what_rounding_took(where: str, size: int):
    assert gap(size, where, Wire()) < 1e-4
    assert gap(size, where, Wire(), forgets=True) > 1.5e-3


def ones(comm: Comm, reducer: Reducer) -> float:
    x = torch.ones(3)
    reducer.bind(comm)("x", x).wait()
    return float(x[0])


def test_on_many_ranks_sums_are_taken_in_fp32():
    """In bf16 256 + 1 = 256."""
    assert on_ranks("threads", 512, ones, Wire())[0] == 1.0


def overflowing(comm: Comm, reducer: Reducer, bad: float) -> list[Tensor]:
    reduce, found = reducer.bind(comm), []
    for step in range(4):
        x = gradient(comm.rank, 0, 400)
        if step == 1 and comm.rank == 1:
            x[7] = bad
        reduce("piece", x).wait()
        found.append(x)
    return found


@pytest.mark.parametrize("reducer", [Wire("fp16"), Wire(), LOW], ids=str)
@pytest.mark.parametrize("bad", [1e7, float("inf"), float("nan")])
def test_what_is_not_finite_comes_through_and_is_forgotten(reducer: Reducer, bad: float):
    if bad == 1e7 and getattr(reducer, "dtype", "") != "fp16":
        return  # in their range
    for found in on_ranks("threads", 2, overflowing, reducer, bad):
        assert found[0].isfinite().all()
        assert not found[1][7].isfinite()
        assert found[2].isfinite().all()
        assert found[3].isfinite().all()
        if isinstance(reducer, Wire):
            assert torch.allclose(found[3], true_mean(2, 0, 400), rtol=0.02, atol=0.02)


def test_fp16_sums_stay_in_range():
    def large(comm: Comm, reducer: Reducer) -> float:
        x = torch.full((3,), 60_000.0)
        reducer.bind(comm)("x", x).wait()
        return float(x[0])

    assert on_ranks("threads", 4, large, Wire("fp16")) == [60_000.0] * 4


def low_rank(rank: int, step: int, n: int, of_rank: int) -> Tensor:
    side = round(n**0.5)
    left = torch.randn(side, of_rank, generator=torch.Generator().manual_seed(step))
    return (left @ torch.randn(of_rank, side, generator=torch.Generator().manual_seed(100 + rank))).view(-1)


def of_low_rank(comm: Comm) -> list[Tensor]:
    reduce, found = LowRank(rank=4, min_elements=0).bind(comm), []
    for step in range(3):
        x = low_rank(comm.rank, step, 2500, of_rank=4 if step else 2)
        reduce("x", x).wait()
        found.append(x)
    reduce.settle()
    return found


@everywhere
def test_a_matrix_of_low_rank_arrives_whole(where: str, size: int):
    """Also after one of lower rank, which leaves columns of the guess at zero."""
    for found in on_ranks(where, size, of_low_rank):
        for step in range(3):
            mean = torch.stack([low_rank(r, step, 2500, 4 if step else 2) for r in range(size)]).mean(0)
            assert (found[step] - mean).norm() < (1e-3 if step else 1e-5) * mean.norm(), step


def test_what_low_rank_holds_back_it_sends_later():
    after = [gap(2, "threads", LOW, count=count) for count in (1, 25, 100, 400)]
    assert after == sorted(after, reverse=True)
    assert after[0] > 0.8
    assert after[-1] < 0.1


def test_low_rank_recovers_from_zero_gradients():
    """A guess of zeros is no end: what it holds back comes with the next step."""
    reduce, value, total = LOW.bind(Solo()), low_rank(0, 0, 400, 1), torch.zeros(400)
    reduce("x", torch.zeros(400)).wait()
    for _ in range(2):
        x = value.clone()
        reduce("x", x).wait()
        total += x
    assert torch.allclose(total, 2 * value, atol=1e-4)


@pytest.mark.parametrize("seed", [2**32, -(2**40)])
def test_low_rank_takes_any_seed(seed: int):
    LowRank(1, seed=seed, min_elements=1).bind(Solo())("key", torch.ones(100)).wait()


def test_nodes_may_be_single_ranks_or_hold_all():
    for node, across in ((1, Mean()), (1, Wire()), (4, Wire()), (2, LOW)):
        found = on_ranks("threads", 4, steps, Hierarchical(node, across), 2)
        assert all(torch.equal(a, b) for rank in found for a, b in zip(rank[1], found[0][1], strict=True))
        tolerance = 1e-6 if node == 4 or across == Mean() else 0.05
        if across != LOW:
            assert torch.allclose(found[0][1][0], true_mean(4, 1, LENGTHS[0]), atol=tolerance)


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_the_node_is_the_ranks_of_a_host(hosts: str, monkeypatch: pytest.MonkeyPatch):
    def on_hosts(comm: Comm) -> Any:
        gather = comm.gather_objects
        monkeypatch.setattr(comm, "gather_objects", lambda x: gather(hosts[comm.rank] if x == host else x))
        return steps(comm, Hierarchical(), 1)

    host = socket.gethostname()
    found = on_ranks("threads", 4, on_hosts)
    wanted = on_ranks("threads", 4, steps, Hierarchical(2), 1)
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(found[rank][0], found[0][0], strict=True))
        assert all(map(torch.allclose, found[rank][0], wanted[rank][0]))


def test_nodes_that_are_not_equal_are_refused():
    with pytest.raises(InputError, match="4 ranks in nodes of 3: node must divide 4"):
        on_ranks("threads", 4, steps, Hierarchical(3), 1)


@pytest.mark.parametrize(
    "slurm",
    [
        {"SLURM_NTASKS_PER_NODE": "2"},  # as kasoku launch slurm has it in its script
        {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    ],
)
def test_the_ranks_of_a_host_are_what_srun_started_there(slurm: dict[str, str]):
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", **slurm}
    assert place({"SLURM_NTASKS": "4", "SLURM_NNODES": "2", **step}).local_size == 2


def test_a_process_that_srun_did_not_start_is_none_of_its_tasks():
    salloc = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    assert place(salloc).local_size == 1
    started = {**salloc, "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_ID": "0"}
    assert place(started).local_size == 8
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # of an interactive step
    assert place({**started, **shell}).size == 1
    part = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}  # a step on one of the nodes
    del started["SLURM_NTASKS_PER_NODE"]
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(4)]
    assert [place({**started, **part, **rank}).local_size for rank in ranks] == [4] * 4


def stopped_and_resumed(comm: Comm, reducer: Reducer) -> None:
    reduce = reducer.bind(comm)
    for step in range(3):
        reduced(reduce, comm.rank, step)
    file = io.BytesIO()
    torch.save(reduce.state_dict(), file)
    straight = [reduced(reduce, comm.rank, step) for step in (3, 4)]
    file.seek(0)
    other = reducer.bind(comm)
    other.load_state_dict(torch.load(file, weights_only=True))
    again = [reduced(other, comm.rank, step) for step in (3, 4)]
    for r in (reduce, other):
        r.settle()
    assert all(torch.equal(a, b) for x, y in zip(straight, again, strict=True) for a, b in zip(x, y, strict=True))


def all_stopped_and_resumed(comm: Comm) -> None:
    for reducer in (*ALL, Hierarchical(2, LOW)):
        stopped_and_resumed(comm, reducer)


@pytest.mark.parametrize("where", ["threads", PROCESSES])
def test_a_checkpoint_continues_bit_for_bit(where: str):
    on_ranks(where, 4, all_stopped_and_resumed)


def two_orders(comm: Comm) -> list[Any]:
    orders = ((3, 2, 1, 0), (1, 3, 0, 2), (0, 1, 2, 3))  # another one on each rank
    return [(steps(comm, reducer, 3), steps(comm, reducer, 3, orders)) for reducer in (*ALL, Hierarchical(2, LOW))]


@pytest.mark.parametrize("where", ["threads", PROCESSES])
def test_the_order_of_waiting_does_not_matter(where: str):
    for rank in on_ranks(where, 4, two_orders):
        for straight, crossed in rank:
            for a, b in zip(straight, crossed, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_key_whose_length_changes_starts_afresh():
    for reducer in (Wire(), LOW):
        used, fresh = reducer.bind(Solo()), reducer.bind(Solo())
        used("x", gradient(0, 0, 500)).wait()
        x, y = gradient(0, 1, 300), gradient(0, 1, 300)
        used("x", x).wait()
        fresh("x", y).wait()
        assert torch.equal(x, y)


def forgetful(comm: Comm, reducer: Reducer) -> list[Any]:
    reduce = reducer.bind(comm)
    first = reduced(reduce, comm.rank, 0)
    reduce.load_state_dict({})
    return [first, reduced(reduce, comm.rank, 0)]


def test_an_empty_state_forgets_all():
    for reducer in (Wire(), LOW, Hierarchical(2, Wire())):
        for first, second in on_ranks("threads", 4, forgetful, reducer):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), reducer


def in_bf16(comm: Comm, reducer: Reducer) -> Tensor:
    reduce, total = reducer.bind(comm), torch.zeros(501)
    for _ in range(2):
        x = torch.ones(501, dtype=torch.bfloat16)
        reduce("x", x).wait()
        total += x
    return total


def test_gradients_may_have_16_bits_themselves():
    for reducer in ALL:
        total = on_ranks("threads", 4, in_bf16, reducer)[0]
        assert torch.allclose(total, torch.full((501,), 2.0), atol=0.02), reducer


class Held(Solo):
    """One rank whose collectives end when they are let go, or fail."""

    thread_safe = True

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.error = error

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        return self

    def wait(self) -> None:
        assert self.let_go.wait(10)
        if self.error:
            raise self.error

    def done(self) -> bool:
        return self.let_go.is_set()


def reducer_threads() -> int:
    return sum(thread.name == "reducer" for thread in threading.enumerate())


def test_a_chain_does_not_hold_up_its_caller():
    comm = Held()
    reduce = LOW.bind(comm)
    works = [reduce(str(i), gradient(0, 0, 500)) for i in range(3)]
    assert not any(work.done() for work in works)
    assert reducer_threads() == 1
    comm.let_go.set()
    reduce.settle()
    assert all(work.done() for work in works)
    assert reducer_threads() == 0
    reduce("0", gradient(0, 0, 500)).wait()  # it may be used on
    reduce.settle()


def test_an_error_in_a_chain_comes_out_where_it_is_waited_for():
    comm = Held(RuntimeError("connection closed by peer"))
    comm.let_go.set()
    reduce = LOW.bind(comm)
    works = [reduce(str(i), gradient(0, 0, 500)) for i in range(2)]
    for work in reversed(works):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            work.wait()
    reduce.settle()


@dataclass(frozen=True)
class Holder:
    reducer: Reducer


def test_settings_are_plain_toml():
    for reducer in (*ALL, LowRank(2, 7, 3)):
        assert parse(Holder, table(Holder(reducer))) == Holder(reducer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wire("int8"), 'dtype="int8": "bf16" or "fp16"'),  # type: ignore[arg-type]
        (lambda: LowRank(0), "rank=0: at least 1"),
        (lambda: Hierarchical(-1), "node=-1: at least 0; 0 takes the ranks that share a host"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Reducer], message: str):
    with pytest.raises(InputError, match=message):
        make()


def digits_accuracy(comm: Comm, reducer: Reducer, seed: int) -> float:
    """Test accuracy in percent of a small network trained on one flat gradient a step."""
    data = digits()
    (x, y), (x_test, y_test) = (
        (split.images_NHWC.flatten(1).float() / 255, split.labels_N)
        for split in (data.train, data.test)  # type: ignore[attr-defined]
    )
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    reduce = reducer.bind(comm)
    for epoch in range(12):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - epoch / 12)
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64):
            mine = batch[comm.rank :: comm.size]
            functional.cross_entropy(model(x[mine]), y[mine]).backward()
            flat = torch.cat([p.grad.view(-1) for p in model.parameters()])  # type: ignore[union-attr]
            reduce("all", flat).wait()
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = g.view_as(p)
            optimizer.step()
            optimizer.zero_grad()
    return 100 * float((model(x_test).argmax(1) == y_test).float().mean())


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_networks_are_as_good(seeds: int):
    """Digits, 360 test images, mean over seeds."""
    plain, wire, low = (
        sum(on_ranks("threads", 2, digits_accuracy, reducer, seed)[0] for seed in range(seeds)) / seeds
        for reducer in (Mean(), Wire(), LowRank(min_elements=0))
    )
    assert min(plain, wire) > 95.5, (plain, wire, low)
    assert abs(wire - plain) <= 0.5, (plain, wire, low)
    assert low > plain - 1.5, (plain, wire, low)


class OnCuda:
    """In the place of a tensor; without `record_stream`, which would delay the reuse of its memory."""

    is_cuda, device = True, torch.device("cuda")


def test_a_chain_on_a_side_stream_holds_its_tensor_until_waited_for(monkeypatch):
    """By mocks of CUDA's streams; no GPU has seen it."""
    for name in ("Event", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    x = OnCuda()
    held = weakref.ref(x)
    work = ChainedReduce(mock.Mock(thread_safe=True), lambda *_: iter(()))("key", x)
    del x
    gc.collect()
    assert held() is not None
    work.wait()
    gc.collect()
    assert held() is None
