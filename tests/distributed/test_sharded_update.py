"""Overlap with sharded updates moves the same weights as Overlap whose ranks each update all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_model, save_model
from test_overlap import Shared
from torch import Tensor, nn

import contracts
from helpers.ranks import on_processes
from helpers.virtual_comm import Emulate, SimComm
from kasoku.core import Comm, InputError, Job, Linear, Technique, Threads
from kasoku.device import Autocast, ChannelsLast, Compile, LossScale, Seeded
from kasoku.distributed import Asynchronous, Fixed, Graded, OneBucket, Overlap, PerLayer, Planned, Policy, Replay, Wire
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, LinkModel, Sized, UnitTimes, forecast
from kasoku.distributed.torch_comm import _Handle
from kasoku.memory import SavedMemory
from kasoku.optim import EMA, LARS, Clip, Rate, Trust, adamw, lars, muon, sgd
from kasoku.testing.toy import assert_near
from kasoku.tune.trial import copy_of

STEPS = 6
SMALL = Fixed(2000, 500)
CHUNKS = Planned(warm=1, measure=1)
Rule = Callable[[nn.Module], torch.optim.Optimizer]
TRUST = {form: Trust(eta=0.02, form=form) for form in ("mlperf", "pytorch", "mxnet")}
RULES: dict[str, Rule] = {
    "sgd": lambda model: sgd(model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda model: adamw(model, lr=1e-2),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    **{
        name: lambda model, trust=trust: lars(model, lr=1.0, momentum=0.9, weight_decay=1e-3, trust=trust)
        for name, trust in TRUST.items()
    },
}


def job_on(comm: Comm | None, rule: str, policy: Any = SMALL, *more: Technique, **own: Any) -> Job:
    """A job on the toy problem. Wide layers, so that the borders of shards cut tensors."""
    torch.manual_seed(5)
    accumulate, own_model = own.pop("accumulate", 1), own.pop("model", None)
    schedule = Rate(Linear(epochs=4, warmup=1))
    techniques = (Overlap(policy, **own), schedule, *more)
    return contracts.make(*techniques, model=own_model, optimizer=RULES[rule], accumulate=accumulate, comm=comm)


def trained(comm: Comm, *settings: Any, steps: int = STEPS, **own: Any) -> dict[str, Tensor]:
    job = job_on(comm, *settings, **own)
    contracts.train(job, steps)
    engine: Any = job.kept("overlap")
    assert bool(own.get("shard")) == bool(engine.sharing), "who updates"
    return contracts.weights(job) | {"out": contracts.judged(job)}


def both(comm: Comm, *settings: Any, **own: Any) -> list[dict[str, Tensor]]:
    return [trained(comm, *settings, shard=shard, **own) for shard in (False, True)]


@pytest.mark.parametrize("policy", [OneBucket(), SMALL, Graded(1, 1.5, 1000), PerLayer(0)], ids=lambda p: str(type(p)))
@pytest.mark.parametrize("rule", ["sgd", "adamw", "foreach", "adagrad"])
def test_on_two_ranks_the_bits_are_those_of_whole_updates(rule: str, policy: Any) -> None:
    for whole, sharded in Threads(2).run(lambda comm: both(comm, rule, policy)):
        contracts.assert_same(whole, sharded)


@pytest.mark.parametrize(
    "more",
    [
        (EMA(0.8, every=2),),
        (Autocast("bf16"), ChannelsLast()),
        (LossScale(2.0**129, every=3),),  # overflows at first, and after every third step that does not
        (Compile("eager"),),
        (SavedMemory(factor=1, in_backward=False, show=False), Seeded(3)),
    ],
    ids=lambda t: type(t[0]).__name__,
)
@pytest.mark.parametrize("next_forward", [True, False])
def test_sharded_updates_work_with(more: tuple[Technique, ...], next_forward: bool) -> None:
    for whole, sharded in Threads(2).run(lambda comm: both(comm, "sgd", SMALL, *more, next_forward=next_forward)):
        contracts.assert_same(whole, sharded)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_plan_in_chunks_is_sharded_once_it_is_found(rule: str) -> None:
    def run(comm: Comm) -> list[dict[str, Tensor]]:
        return [
            trained(comm, rule, OneBucket(), steps=12),
            trained(comm, rule, CHUNKS, shard=True, accumulate=1, steps=12),
        ]

    for whole, sharded in Threads(2).run(run):
        contracts.assert_same(whole, sharded)


def test_a_sharded_chunk_is_two_transfers_of_half_its_bytes() -> None:
    link = LinkModel(1e-3, 1e6)
    units = [UnitTimes("a", 0.1, 0.2, 0.4), UnitTimes("b", 0.3, 0.5, 0.8)]
    tensors = [Sized(0, 10_000, 40_000, name="a"), Sized(1, 20_000, 80_000, name="b")]
    plan = replace(PerLayer(0).plan(tensors), ranks=2)
    small_s, large_s = link.seconds(20_000), link.seconds(40_000)
    assert large_s < 0.2  # b's sum arrives beside the backward of a, then a's after it, and a's and b's parameters
    step_s = 0.7 + small_s + small_s + 0.2 + 0.1 + 0.4 + 0.3
    assert forecast(units, tensors, plan, link).step_s == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("update_s", "latency_s", "chosen"), [(5e-2, 1e-5, True), (6e-5, 1e-6, True), (1e-5, 1e-2, False)]
)
def test_the_planner_shares_updates_where_that_is_faster(update_s: float, latency_s: float, chosen: bool) -> None:
    def shares(tried: bool) -> bool:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        units = tuple(UnitTimes(str(i), 1e-3, 2e-3, update_s) for i in range(4))
        job = Job(model, lambda m: sgd(m, lr=0.1), comm=SimComm(2, LinkModel(latency_s, 1e9)))
        job.apply(Emulate(units), Overlap(Planned(warm=1, measure=1, shards=tried)))
        for _ in range(6):
            job.model(torch.zeros(2, 64)).sum().backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        engine: Any = job.kept("overlap")
        assert engine.profiler is None, "the plan is found"
        return engine.sharing is not None

    assert [shares(tried) for tried in (False, True)] == [False, chosen]


@pytest.mark.parametrize("shards", [True, False])
def test_a_plan_that_shares_updates_is_resumed_as_the_settings_allow(shards: bool) -> None:
    def run(comm: Comm) -> list[Any]:
        job = job_on(comm, "sgd", replace(CHUNKS, shards=True), model=Exact(torch.float32))
        engine: Any = job.kept("overlap")
        contracts.train(job, 1)
        engine.layers.order = [*reversed(range(len(engine.layers.modules)))]
        engine.change_plan(replace(engine.layout.plan, ranks=comm.size), True)
        contracts.train(job, 2)
        state = contracts.through_a_file({"model": job.model.state_dict(), "job": job.state_dict()})
        contracts.train(job, 2)
        again = job_on(comm, "sgd", replace(CHUNKS, shards=shards), model=Exact(torch.float32))
        again.model.load_state_dict(state["model"])
        resumed: Any = again.kept("overlap")
        with mock.patch.object(resumed.comm, "channel", side_effect=AssertionError("collective, and ranks take turns")):
            again.load_state_dict(state["job"])
        assert (resumed.sharing is not None) == shards
        assert [*resumed.layers.order] == [*engine.layers.order]
        state["job"]["kept"]["overlap"]["order"] = [0]  # as of a model that was compiled as a whole
        again.load_state_dict(state["job"])
        assert [*resumed.layers.order] == [*engine.layers.order]
        contracts.train(again, 2)
        return [contracts.weights(job), contracts.weights(again)]

    for never_stopped, resumed in Threads(2).run(run):
        contracts.assert_same(never_stopped, resumed)


@dataclass(frozen=True)
class Interleaved(Policy):
    """Two buckets, each in eight chunks, which are sent in turn."""

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        buckets = tuple(range(len(tensors)))[1::2], tuple(range(len(tensors)))[::2]
        sizes = [sum(tensors[i].elements for i in bucket) for bucket in buckets]
        order = tuple(Chunk(b, n * k // 8, n * (k + 1) // 8) for k in range(8) for b, n in enumerate(sizes))
        return BucketPlan(buckets, order, "interleaved")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rule", ["sgd", "mlperf"])
def test_buckets_of_several_chunks(rule: str, size: int) -> None:
    def run(comm: Comm) -> list[dict[str, Tensor]]:
        job = job_on(comm, rule, Interleaved(), shard=True, accumulate=2, model=Exact(torch.float32))
        engine: Any = job.kept("overlap")
        assert len(engine.layout.order) > len(engine.layout.buckets)
        assert max(len(x) for shard in engine.sharing.shards.values() for x in shard.slices.values()) >= 2
        contracts.train(job, STEPS)
        whole = job_on(comm, rule, Interleaved(), accumulate=2, model=Exact(torch.float32))
        contracts.train(whole, STEPS)
        return [contracts.weights(whole), contracts.weights(job)]

    for whole, sharded in Threads(size).run(run):
        assert_near(whole, sharded, 0.0 if (rule, size) == ("sgd", 2) else 1e-5)


@pytest.mark.process
def test_the_bits_are_those_of_whole_updates_on_two_processes() -> None:
    for rule in ("sgd", "adamw"):
        for whole, sharded in on_processes(2, both, rule, SMALL):
            contracts.assert_same(whole, sharded)


class Exact(nn.Module):
    """The network of the toy problem without dropout and BatchNorm, whose images may be of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = contracts.Net(norm=False, dropout=0.0).to(dtype), dtype

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out: Tensor = self.inner(x_NCHW.to(self.dtype))
        return out


def moved(comm: Comm | None, rule: str, *techniques: Technique, dtype: torch.dtype = torch.float32) -> Tensor:
    """All weights after some steps, in float64."""
    job = contracts.make(*techniques, model=Exact(dtype), optimizer=RULES[rule], comm=comm)
    contracts.train(job, STEPS)
    return torch.cat([p.detach().double().flatten() for p in job.model.parameters()])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rule", ["sgd", "adamw", *TRUST])
def test_no_farther_from_float64_than_whole_updates(rule: str, size: int) -> None:
    exact = moved(None, rule, dtype=torch.float64)

    def error(comm: Comm, shard: bool) -> tuple[Tensor, float]:
        weights = moved(comm, rule, Overlap(SMALL, shard=shard))
        return weights, float((weights - exact).norm())

    for shard in (False, True):
        ranks = Threads(size).run(lambda comm, shard=shard: error(comm, shard))
        assert all(torch.equal(weights, ranks[0][0]) for weights, _ in ranks), "ranks drift apart"
        if not shard:
            whole = ranks[0][1]
    assert ranks[0][1] <= 1.25 * whole, "errors of rounding vary with the order of sums"
    assert whole < 1e-4 * float(exact.norm())


def test_a_rank_keeps_its_share_of_the_state() -> None:
    def run(comm: Comm) -> tuple[int, int]:
        job = job_on(comm, "adamw", SMALL, shard=True)
        contracts.train(job, 3)
        kept = sum(x.numel() for values in job.optimizer.state.values() for x in values.values() if x.ndim)
        return kept, sum(2 * p.numel() for p in job.model.parameters())

    ranks = Threads(4).run(run)
    assert sum(kept for kept, _ in ranks) == ranks[0][1]
    assert max(kept for kept, _ in ranks) < 0.5 * ranks[0][1]


@pytest.mark.parametrize("rule", ["sgd", "adamw", "mxnet"])
@pytest.mark.parametrize("policy", [SMALL, CHUNKS], ids=lambda p: type(p).__name__)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(rule: str, policy: Any) -> None:
    def saved(comm: Comm) -> tuple[Any, dict[str, Tensor]]:
        job = job_on(comm, rule, policy, shard=True, model=Exact(torch.float32))
        contracts.train(job, STEPS)
        state = contracts.through_a_file({"model": job.model.state_dict(), "job": job.state_dict()})
        contracts.train(job, 4)  # after a checkpoint it goes on as without
        return state, contracts.weights(job)

    def resumed(comm: Comm, state: Any, shard: bool) -> dict[str, Tensor]:
        job = job_on(comm, rule, policy, shard=shard, model=Exact(torch.float32))
        job.model.load_state_dict(state["model"])
        job.load_state_dict(contracts.through_a_file(state["job"]))  # a copy, which training may change
        contracts.train(job, 4)
        return contracts.weights(job)

    states = Threads(2).run(saved)
    (state, never_stopped), _ = states
    for size in (1, 2, 4):
        for shard in (True, False):
            for found in Threads(size).run(lambda comm, shard=shard: resumed(comm, state, shard)):
                if size == 2 and (shard or rule != "mxnet"):
                    contracts.assert_same(never_stopped, found)
                else:
                    assert_near(never_stopped, found, 1e-5)


def test_whole_state_for_the_optimizers_own_checkpoint_and_after_close(tmp_path: Path) -> None:
    def run(comm: Comm) -> None:
        jobs = [job_on(comm, "adamw", SMALL, shard=shard) for shard in (False, True)]
        for job in jobs:
            torch.manual_seed(1)
            contracts.train(job, 3)
        plain, sharded = (
            {(i, k): x for i, s in job.optimizer.state_dict()["state"].items() for k, x in s.items()} for job in jobs
        )
        contracts.assert_same(plain, sharded)
        if comm.rank == 0:
            save_model(jobs[1].model, str(tmp_path / "model.safetensors"))
        jobs[1].close()
        storages = {p.untyped_storage().data_ptr() for p in jobs[1].model.parameters()}
        assert len(storages) == len([*jobs[1].model.parameters()])
        assert {*jobs[1].optimizer.state} == {*jobs[1].model.parameters()}
        contracts.assert_same(*map(contracts.weights, jobs))

    Threads(2).run(run)


def test_tied_weights_stay_tied_in_files(tmp_path: Path) -> None:
    """From sharded ranks to whole updates on one rank, and back."""

    def trained(comm: Comm, start: str, end: str, **own: Any) -> dict[str, Tensor]:
        job = contracts.make(Overlap(PerLayer(0), **own), model=Shared(), comm=comm)
        if start:
            load_model(job.model, str(tmp_path / start))
        contracts.train(job, 2)
        if comm.rank == 0:
            save_model(job.model, str(tmp_path / end))
        state = job.model.state_dict()
        assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()
        return contracts.weights(job)

    (saved, _) = Threads(2).run(lambda comm: trained(comm, "", "sharded", shard=True))
    load_model(other := Shared(), str(tmp_path / "sharded"))
    contracts.assert_same(saved, dict(other.state_dict()))
    Threads(1).run(lambda comm: trained(comm, "sharded", "whole"))
    Threads(3).run(lambda comm: trained(comm, "whole", "again", shard=True))


def test_readers_after_a_step() -> None:
    """A forward in inference mode, the version counters of parameters, and copies of the job."""

    def run(comm: Comm) -> None:
        job = job_on(comm, "adamw", SMALL, EMA(0.8), shard=True)
        x_NCHW, y_N = next(iter(job.loader))
        for _ in range(2):
            before = {p: p._version for p in job.model.parameters()}
            job.loss(out := job.model(x_NCHW), y_N).backward(retain_graph=True)
            job.optimizer.step()
            job.optimizer.zero_grad()
            with torch.inference_mode():
                job.model(x_NCHW)
            assert all(p._version > version for p, version in before.items())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            job.optimizer.zero_grad()
        model, optimizer = copy_of(job)
        assert {*optimizer.state} == {*model.parameters()}

    Threads(2).run(run)


def test_parameters_outside_the_optimizer_stay() -> None:
    def run(comm: Comm, shard: bool) -> dict[str, Tensor]:
        def rule(model: nn.Module) -> LARS:
            return LARS([{"params": [p for n, p in model.named_parameters() if "stage" in n]}], 0.1)

        job = contracts.make(Overlap(OneBucket(), shard=shard), EMA(0.8), optimizer=rule, comm=comm)
        contracts.train(job, 3)
        job.optimizer.state_dict()
        return contracts.weights(job) | job.kept("ema").averages

    for whole, sharded in zip(*(Threads(2).run(lambda comm, s=s: run(comm, s)) for s in (False, True)), strict=True):
        assert_near(whole, sharded, 1e-5)


def test_memory_of_parameters_that_was_replaced_is_told() -> None:
    def run(comm: Comm) -> None:
        job = job_on(comm, "sgd", SMALL, shard=True)
        contracts.train(job, 2)
        p = next(job.model.parameters())
        p.data = p.data.clone()
        contracts.train(job, 1)

    with pytest.raises(InputError, match=r"\w+ has other memory than at the last step: convert the model before apply"):
        Threads(2).run(run)


class Hollow(nn.Module):
    """The network of the toy problem, beside a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.none = contracts.Net(norm=False, dropout=0.0), nn.Parameter(torch.empty(0))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out: Tensor = self.inner(x_NCHW)
        return out + self.none.sum()


def hollow(comm: Comm, shard: bool) -> dict[str, Tensor]:
    job = job_on(comm, "adamw", PerLayer(0), shard=shard, model=Hollow())
    contracts.train(job, 3)
    job.state_dict()
    return contracts.weights(job)


def test_a_parameter_without_elements() -> None:
    whole, sharded = (Threads(2).run(lambda comm, s=s: hollow(comm, s)) for s in (False, True))
    contracts.assert_same(whole[0], sharded[0])


def hollow_on_gloo(comm: Comm) -> list[dict[str, Tensor]]:
    comm.reduce_scatter(torch.empty(0), torch.empty(0)).wait()
    comm.all_gather(torch.empty(0), torch.empty(0)).wait()
    return [hollow(comm, shard) for shard in (False, True)]


@pytest.mark.process
def test_a_parameter_without_elements_on_processes() -> None:
    for whole, sharded in on_processes(2, hollow_on_gloo):
        contracts.assert_same(whole, sharded)


def test_a_work_that_failed_is_not_taken_for_done() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed")

    ended: list[int] = []
    handle = _Handle(Broken(), finish=lambda: ended.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            handle.wait()
    assert not ended


def test_a_plan_that_changes_between_steps_finishes_the_step_before() -> None:
    def run(comm: Comm, between: bool) -> dict[str, Tensor]:
        job = job_on(comm, "sgd", SMALL, shard=True)
        engine: Any = job.kept("overlap")
        other = Interleaved().plan(engine.layers.tensors)
        contracts.train(job, 1, each=lambda: between and engine.change_plan(other, late=True))
        return contracts.weights(job)

    contracts.assert_same(*(Threads(2).run(lambda comm, b=b: run(comm, b))[0] for b in (False, True)))


def test_parameters_have_memory_of_their_own_when_the_last_update_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Comm) -> None:
        job = job_on(comm, "sgd", SMALL, shard=True)
        contracts.train(job, 1)
        engine: Any = job.kept("overlap")
        monkeypatch.setattr(engine.sharing, "join", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.close()
        parameters = [*job.model.parameters()]
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)

    Threads(2).run(run)


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 4])
def test_lars_on_processes_is_near_whole_updates_and_all_ranks_agree(size: int) -> None:
    ranks = on_processes(size, both, "mlperf", SMALL)
    for whole, sharded in ranks:
        assert_near(whole, sharded, 1e-5)
        assert all(torch.equal(x, ranks[0][1][name]) for name, x in sharded.items() if name.endswith("weight"))


def test_lars_without_its_c_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Comm) -> Tensor:
        return moved(comm, "pytorch", Overlap(SMALL, shard=True))

    compiled = Threads(2).run(run)[0]
    monkeypatch.setattr(sys.modules[LARS.__module__], "_path", lambda device: "foreach")
    torch.testing.assert_close(Threads(2).run(run)[0], compiled, rtol=1e-6, atol=1e-6)


def test_parameters_that_no_rank_used_are_not_updated() -> None:
    def run(comm: Comm, shard: bool) -> dict[str, Tensor]:
        net = contracts.Net(norm=False, dropout=0.0)
        spare = net.stage.append(nn.Conv2d(8, 8, 1))[-1]
        job = contracts.make(Overlap(SMALL, unused="skip", shard=shard), model=net, optimizer=RULES["adamw"], comm=comm)
        for step in range(6):
            spare.forward = (lambda x: x) if 1 < step < 4 else nn.Conv2d.forward.__get__(spare)
            contracts.train(job, 1)
        return contracts.weights(job)

    for whole, sharded in zip(*(Threads(2).run(lambda comm, s=s: run(comm, s)) for s in (False, True)), strict=True):
        contracts.assert_same(whole, sharded)


@pytest.mark.parametrize(
    ("settings", "rule", "more", "message"),
    [
        ({"reducer": Wire()}, "sgd", (), "reducer Wire .*: use Mean, or set shard = false"),
        ({}, "sgd", (Clip(1.0),), "Clip needs whole gradients"),
        ({}, "sgd", (Asynchronous(),), "Asynchronous needs"),
        ({}, "sgd", (SavedMemory(factor=1, show=False),), "set its in_backward = false, or set shard"),
        ({}, "sgd", (Replay(),), "Replay needs the optimizer's whole state"),
        ({}, "muon", (), "Muon is not known to update slices .*: use sgd, adamw or lars, declare slices = .elements."),
        ({}, "own_lars", (), "OwnLars is not known to update slices"),
    ],
    ids=lambda x: "",
)
def test_what_needs_whole_gradients_is_refused(
    settings: Any, rule: str, more: tuple[Technique, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnLars(LARS):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)

    monkeypatch.setitem(RULES, "muon", muon)
    monkeypatch.setitem(RULES, "own_lars", lambda model: OwnLars([{"params": [*model.parameters()]}]))
    with pytest.raises(InputError, match=rf"^Overlap: shared updates: .*{message}"):
        Threads(2).run(lambda comm: job_on(comm, rule, SMALL, *more, shard=True, **settings))


def test_a_rule_of_the_users_own_may_declare_that_it_updates_slices() -> None:
    class Signs(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.data.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])

    def run(comm: Comm, shard: bool) -> dict[str, Tensor]:
        own = contracts.make(
            Overlap(SMALL, shard=shard), optimizer=lambda model: Signs(model.parameters(), lr=0.01), comm=comm
        )
        contracts.train(own, 3)
        return contracts.weights(own)

    with pytest.raises(InputError, match="Signs is not known"):
        Threads(2).run(lambda comm: run(comm, True))
    Signs.slices = "elements"  # type: ignore[attr-defined]
    contracts.assert_same(*(Threads(2).run(lambda comm, s=s: run(comm, s))[0] for s in (False, True)))
