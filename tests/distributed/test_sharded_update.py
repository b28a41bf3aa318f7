"""Overlap with sharded updates moves the same weights as Overlap whose ranks each update all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

import contracts
from helpers.ranks import on_processes
from kasoku.core import Comm, InputError, Job, Linear, Technique, Threads
from kasoku.device import Autocast, ChannelsLast, Compile, LossScale, Seeded
from kasoku.distributed import Asynchronous, Fixed, Graded, OneBucket, Overlap, PerLayer, Planned, Wire
from kasoku.memory import SavedMemory
from kasoku.optim import EMA, LARS, Clip, Rate, Trust, adamw, lars, muon, sgd
from kasoku.testing.toy import assert_near

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
        ({}, "muon", (), "Muon is not known to update slices of tensors: use sgd, adamw or lars"),
    ],
    ids=lambda x: "",
)
def test_what_needs_whole_gradients_is_refused(
    settings: Any, rule: str, more: tuple[Technique, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "muon", muon)
    with pytest.raises(InputError, match=rf"^Overlap\(shard=true\): .*{message}"):
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
