"""Overlap moves the same weights as the step that waits, whatever is hidden behind what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contracts
from helpers.ranks import on_processes, on_ranks
from kasoku.core import Comm, InputError, Job, Linear, Technique, Threads
from kasoku.core.blocks import blocks
from kasoku.device import Autocast, ChannelsLast, Compile, LossScale, Seeded
from kasoku.distributed import AllReduce, Fixed, Graded, LowRank, OneBucket, Overlap, PerLayer, Planned, Reducer, Wire
from kasoku.distributed.ddp.bucket_plan import Policy
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.optim import EMA, Clip, Rate, Trust, lars, sgd

BY_HAND = pytest.mark.filterwarnings("ignore:nothing averages")  # the plain side averages gradients by hand

STEPS = 6
POLICIES = [OneBucket(), Fixed(2000, 500), Graded(first=1, power=1.5, least_bytes=1000), PerLayer(0)]


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.1, momentum=0.9, weight_decay=1e-3)


def large_batch(model: nn.Module) -> torch.optim.Optimizer:
    return lars(model, lr=1.0, momentum=0.9, weight_decay=1e-3, trust=Trust(eta=0.02))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": momentum_sgd,
    "lars": large_batch,
    "adamw": adam,
}


class ByHand:
    """The plain step, written down: all gradients into the same groups, one all-reduce a group, then step()."""

    def __init__(self, job: Job, policy: Any) -> None:
        self.job = job
        self.params = [p for p in job.model.parameters() if p.requires_grad]
        self.groups = policy.plan(LayerIndex(job.model).tensors).buckets

    def average(self) -> None:
        for group in self.groups:
            members = [self.params[i] for i in group]
            flat = torch.cat([torch.as_strided(p.grad, (p.numel(),), (1,)) for p in members])
            self.job.comm.all_reduce(flat, op="mean").wait()
            for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                p.grad.copy_(torch.as_strided(part, p.shape, p.stride()))


def by_hand(comm: Comm, rule: str, policy: Any, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    job = contracts.make(Rate(Linear(epochs=4, warmup=1)), optimizer=RULES[rule], accumulate=accumulate, comm=comm)
    plain = ByHand(job, policy)
    job.before_step(plain.average)
    contracts.train(job, STEPS)
    return contracts.weights(job)


def overlapped(
    comm: Comm, rule: str, policy: Any, accumulate: int, *more: Technique, next_forward: bool = True
) -> dict[str, Tensor]:
    torch.manual_seed(5)
    own = Overlap(policy, next_forward=next_forward)
    schedule = Rate(Linear(epochs=4, warmup=1))
    job = contracts.make(own, schedule, *more, optimizer=RULES[rule], accumulate=accumulate, comm=comm)
    contracts.train(job, STEPS)
    return contracts.weights(job)


def both(comm: Comm, rule: str, policy: Any, accumulate: int) -> list[dict[str, Tensor]]:
    return [
        by_hand(comm, rule, policy, accumulate),
        overlapped(comm, rule, policy, accumulate),
        overlapped(comm, rule, policy, accumulate, next_forward=False),
    ]


def check_bits(ranks: list[list[dict[str, Tensor]]]) -> None:
    for plain, hidden, barrier in ranks:
        contracts.assert_same(plain, hidden)
        contracts.assert_same(plain, barrier)


@BY_HAND
@pytest.mark.parametrize(
    ("size", "rule", "accumulate"), [(2, "sgd", 2), (4, "lars", 1), (2, "lars", 2), (4, "adamw", 1)]
)
def test_overlap_is_bit_identical_to_the_step_that_waits(size: int, rule: str, accumulate: int) -> None:
    policy = POLICIES[(size + accumulate + len(rule)) % len(POLICIES)]
    check_bits(Threads(size).run(lambda comm: both(comm, rule, policy, accumulate)))


@pytest.mark.process
@pytest.mark.smoke
def test_overlap_is_bit_identical_on_two_processes() -> None:
    check_bits(on_processes(2, both, "lars", Fixed(2000, 500), 2))


@pytest.mark.process
@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rule", "accumulate"), [("sgd", 1), ("sgd", 2), ("lars", 1), ("lars", 2), ("adamw", 1)])
def test_overlap_is_bit_identical_on_processes(size: int, rule: str, accumulate: int) -> None:
    policy = POLICIES[(size + accumulate + len(rule)) % len(POLICIES)]
    check_bits(on_processes(size, both, rule, policy, accumulate))


@BY_HAND
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_every_policy_trains_to_the_same_bits_in_threads(policy: Any) -> None:
    check_bits(Threads(3).run(lambda comm: both(comm, "sgd", policy, 1)))


def planned(comm: Comm, accumulate: int = 1) -> list[dict[str, Tensor]]:
    found = []
    for policy in (OneBucket(), Planned(warm=1, measure=1)):
        torch.manual_seed(5)
        job = contracts.make(Overlap(policy, next_forward=policy != OneBucket()), comm=comm, accumulate=accumulate)
        contracts.train(job, 2 * STEPS)
        found.append(contracts.weights(job))
    engine: Any = job.kept("overlap")
    assert engine.profiler is None, "the plan was not made"
    assert engine.forecast is not None
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_planned_groups_train_to_the_same_bits_on_two_ranks(accumulate: int) -> None:
    for plain, found in Threads(2).run(lambda comm: planned(comm, accumulate)):
        contracts.assert_same(plain, found)


@pytest.mark.process
@pytest.mark.parametrize("accumulate", [1, 2])
def test_planned_groups_train_to_the_same_bits_on_two_processes(accumulate: int) -> None:
    for plain, found in on_processes(2, planned, accumulate):
        contracts.assert_same(plain, found)


def test_updates_wait_for_the_next_forward_unless_it_is_measured() -> None:
    def run(comm: Comm) -> list[bool]:
        job = contracts.make(Overlap(Planned(warm=2, measure=1)), comm=comm)
        engine: Any = job.kept("overlap")
        waiting: list[bool] = []
        contracts.train(job, 3, each=lambda: waiting.append(any(group.pending for group in engine.layout.buckets)))
        return waiting

    assert Threads(2).run(run) == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("batches", "accumulate", "each"), [(98, 1, 1), (150, 1, 3), (150, 2, 1), (20, 32, 1), (0, 1, 6)]
)
def test_of_a_short_epoch_few_steps_are_measured(batches: int, accumulate: int, each: int) -> None:
    def run(comm: Comm) -> list[str]:
        loader = [(torch.zeros(1), torch.zeros(1))] * (batches + 50 * comm.rank if batches else 0)
        job = Job(contracts.Net(), contracts.rule, loader=loader, comm=comm, accumulate=accumulate).apply(Overlap())
        engine: Any = job.kept("overlap")
        kinds: list[str] = engine.profiler.kinds
        return kinds

    one, other = Threads(2).run(run)
    assert one == other == ["warm"] * 3 + ["alone", "beside"] * each


@pytest.mark.parametrize("reducer", [Wire(), LowRank(rank=2, min_elements=100)], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_training_may_end_or_be_saved_while_it_measures(
    steps: int, reducer: Reducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kasoku.distributed.ddp.step_profiler._SHARE", 1)  # as in a long epoch

    def run(comm: Comm) -> int:
        job = contracts.make(Overlap(Planned(warm=0, measure=2), reducer=reducer), comm=comm)
        contracts.train(job, steps)
        engine: Any = job.kept("overlap")
        state = engine.state_dict()
        assert bool(state["plan"]) == (engine.profiler is None) == (steps == 5)
        job.close()
        assert engine.profiler is None or not engine.profiler.background
        return len([key for kept in state["reduce"] for by_key in kept.values() for key in by_key if "beside" in key])

    kept = Threads(2).run(run)
    assert kept[0] == kept[1]
    assert steps < 5 or not kept[0], "what the reducer kept of transfers that mean nothing"


@pytest.mark.parametrize(
    "more",
    [
        (EMA(0.8, every=2),),
        (Autocast("bf16"), ChannelsLast()),
        (Clip(0.1),),
        (LossScale(2.0**129, every=3),),  # overflows at first, and after every third step that does not
        (Compile("eager"),),
    ],
    ids=lambda t: type(t[0]).__name__,
)
def test_overlap_works_with(more: tuple[Technique, ...], capsys: pytest.CaptureFixture[str]) -> None:
    def run(comm: Comm, next_forward: bool) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(5)
        job = contracts.make(Overlap(PerLayer(0), next_forward=next_forward), *more, comm=comm)
        contracts.train(job, STEPS)
        return contracts.weights(job), contracts.judged(job)

    waits = Threads(2).run(lambda comm: run(comm, False))
    hides = Threads(2).run(lambda comm: run(comm, True))
    for (plain, plain_out), (hidden, hidden_out) in zip(waits, hides, strict=True):
        contracts.assert_same(plain, hidden)
        assert torch.equal(plain_out, hidden_out)
    said = capsys.readouterr().err.count("waits for all of them")
    assert said == (1 if isinstance(more[0], Clip) else 0)


# ---- models that are not a plain chain


class Shared(nn.Module):
    """Two blocks with one weight, a block that may be left out, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(192, 192)
            self.second = nn.Linear(192, 192)
            self.second.weight = self.first.weight
            self.spare = nn.Linear(192, 192)
            self.head = nn.Linear(192, 4)
            self.scale = nn.Parameter(torch.ones(4))
        self.use_spare = True

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.second(self.first(x_NCHW.flatten(1)).relu()).relu()
        if self.use_spare:
            x = x + self.spare(x)
        return self.head(x) * self.scale


def on_shared(
    comm: Comm,
    next_forward: bool,
    each: Callable[[Job, int], object],
    model: nn.Module | None = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], Job]:
    job = contracts.make(
        Overlap(PerLayer(0), next_forward=next_forward, **settings), model=model or Shared(), comm=comm
    )
    for step, (x_NCHW, y_N) in enumerate([*job.loader, *job.loader]):
        each(job, step)
        job.loss(job.model(x_NCHW), y_N).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return contracts.weights(job), job


def test_shared_weights_and_parameters_of_the_model_itself() -> None:
    def run(comm: Comm) -> list[dict[str, Tensor]]:
        return [on_shared(comm, hidden, lambda *_: None)[0] for hidden in (False, True)]

    for waits, hides in Threads(2).run(run):
        contracts.assert_same(waits, hides)


def test_frozen_parameters_stay() -> None:
    def run(comm: Comm) -> tuple[dict[str, Tensor], Tensor]:
        model = Shared()
        model.spare.requires_grad_(False)
        before = model.spare.weight.detach().clone()
        job = contracts.make(Overlap(PerLayer(0)), model=model, comm=comm)
        contracts.train(job, 3)
        return contracts.weights(job), before

    for found, before in Threads(2).run(run):
        assert torch.equal(found["spare.weight"], before)
        assert not torch.equal(found["first.weight"], Shared().first.weight)


def ending(model: nn.Module) -> torch.optim.Optimizer:
    """The spare block trains for half an epoch, as cifarnet's whitening bias does."""
    spare = {*model.spare.parameters()}
    rest = [p for p in model.parameters() if p not in spare]
    return torch.optim.SGD([{"params": [*spare], "until": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("buckets", [OneBucket(), PerLayer(0), Planned(warm=1, measure=1)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"unused": "skip"}, {"next_forward": False}, {"shard": True}], ids=str)
def test_parameters_that_the_schedule_freezes_stay_from_then_on(buckets: Policy, settings: dict[str, Any]) -> None:
    def run(comm: Comm, share: Technique) -> dict[str, Tensor]:
        ema = EMA(decay=0.5, warmup=False)
        job = contracts.make(share, Rate(Linear(epochs=4)), ema, model=Shared(), optimizer=ending, comm=comm)
        spare: list[Tensor] = []
        contracts.train(job, 12, each=lambda: spare.append(contracts.weights(job)["spare.weight"].clone()))
        assert not job.model.spare.weight.requires_grad
        assert torch.equal(spare[-1], spare[-4])
        assert not torch.equal(spare[-1], Shared().spare.weight)
        assert {*job.kept("ema").updates.values()} == {job.steps}
        return contracts.weights(job)

    waiting, hiding = (Threads(2).run(lambda c, s=s: run(c, s)) for s in (AllReduce(), Overlap(buckets, **settings)))
    for waits, hides in zip(waiting, hiding, strict=True):
        for name, x in waits.items():
            torch.testing.assert_close(hides[name], x, rtol=1e-5, atol=1e-6)


def leave_out(rank: int, both: bool) -> Callable[[Job, int], object]:
    """The spare block is used by nobody at steps 2 to 4; or by rank 0 alone."""

    def each(job: Job, step: int) -> None:
        job.model.use_spare = step not in (2, 3, 4) or (not both and rank == 0)

    return each


@pytest.mark.parametrize("both", [True, False])
def test_unused_parameters_are_skipped_where_no_rank_used_them(both: bool) -> None:
    def run(comm: Comm) -> list[dict[str, Tensor]]:
        each = leave_out(comm.rank, both)
        return [on_shared(comm, hidden, each, unused="skip")[0] for hidden in (False, True)]

    ranks = Threads(2).run(run)
    for waits, hides in ranks:
        contracts.assert_same(waits, hides)
    contracts.assert_same(ranks[0][0], ranks[1][0])


def test_unused_parameters_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"2 parameters got no gradient.*spare\.weight, spare\.bias.*unused"):
        Threads(2).run(lambda comm: on_shared(comm, True, leave_out(comm.rank, True)))


# ---- who reads parameters


def test_whoever_reads_parameters_sees_them_updated() -> None:
    def run(comm: Comm) -> list[bool]:
        plain = contracts.make(Overlap(PerLayer(0), next_forward=False), comm=comm)
        hidden = contracts.make(Overlap(PerLayer(0)), comm=comm)
        readers: list[Callable[[Job], dict[str, Tensor]]] = [
            lambda job: {k: v.clone() for k, v in job.model.state_dict().items()},
            lambda job: {"out": contracts.judged(job)},
            lambda job: {"momentum": next(iter(job.state_dict()["optimizer"]["state"].values()))["momentum_buffer"]},
            lambda job: (job.close(), {k: v.clone() for k, v in job.model.named_parameters()})[1],
        ]
        found = []
        for read in readers:
            for job in (plain, hidden):
                for x_NCHW, y_N in job.loader:
                    torch.manual_seed(1)
                    job.loss(job.model(x_NCHW), y_N).backward()
                    job.optimizer.step()
                    job.optimizer.zero_grad()
            a, b = read(plain), read(hidden)
            found.append(all(torch.equal(a[k], b[k]) for k in a))
        return found

    assert Threads(2).run(run) == [[True] * 4] * 2


def test_what_is_loaded_is_not_changed_by_a_pending_update() -> None:
    def run(comm: Comm) -> None:
        job = contracts.make(Overlap(PerLayer(0)), comm=comm)
        contracts.train(job, 2)
        good, state = contracts.weights(job), contracts.through_a_file(job.state_dict())
        good = {name: x.clone() for name, x in good.items()}
        x_NCHW, y_N = next(iter(job.loader))
        job.loss(job.model(x_NCHW), y_N).backward()
        job.optimizer.step()
        job.model.load_state_dict(good)
        job.load_state_dict(state)
        contracts.assert_same(contracts.weights(job), good)
        assert job.steps == 2

    Threads(2).run(run)


def test_the_late_update_takes_the_rates_of_its_own_step() -> None:
    def run(comm: Comm, next_forward: bool) -> dict[str, Tensor]:
        torch.manual_seed(5)
        job = contracts.make(Overlap(PerLayer(0), next_forward=next_forward), comm=comm)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
        contracts.train(job, STEPS, each=scheduler.step)
        return contracts.weights(job)

    waits, hides = (Threads(2).run(lambda comm, hidden=hidden: run(comm, hidden)) for hidden in (False, True))
    contracts.assert_same(waits[0], hides[0])


def test_a_resumed_run_keeps_its_plan() -> None:
    def run(comm: Comm) -> bool:
        job = contracts.make(Overlap(Planned(warm=0, measure=1)), comm=comm)
        contracts.train(job, STEPS)
        state = contracts.through_a_file(job.state_dict())
        other = contracts.make(Overlap(Planned(warm=0, measure=1)), comm=comm)
        other.load_state_dict(state)
        ours: Any = job.kept("overlap")
        theirs: Any = other.kept("overlap")
        return (ours.profiler is None is theirs.profiler) and ours.layout.plan == theirs.layout.plan

    assert Threads(2).run(run) == [True, True]


# ---- what is refused, in one line


def one_step(comm: Comm, between: Callable[[Job], object], model: nn.Module | None = None) -> None:
    job = contracts.make(Overlap(PerLayer(0)), model=model, comm=comm)
    for x_NCHW, y_N in job.loader:
        job.loss(job.model(x_NCHW), y_N).backward()
        between(job)
        job.optimizer.step()
        job.optimizer.zero_grad()


def test_clipping_behind_our_back_is_told() -> None:
    def clip(job: Job) -> None:
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)

    with pytest.raises(InputError, match=r"changed between backward and step.*technique Clip"):
        Threads(2).run(lambda comm: one_step(comm, clip))


@pytest.mark.parametrize(("size", "dtype", "scale"), [
    (2, torch.float32, 0.5), (4, torch.bfloat16, 0.25), (2, torch.float16, 1), (3, torch.float32, 1),
])  # fmt: skip
def test_gradients_are_divided_before_the_sum_where_that_rounds_nothing(
    size: int, dtype: torch.dtype, scale: float
) -> None:
    def run(comm: Comm) -> float:
        model = contracts.Net(norm=False).to(dtype)
        return float(contracts.make(Overlap(OneBucket()), comm=comm, model=model).kept("overlap").reduce.scale)

    assert set(Threads(size).run(run)) == {scale}


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_with_a_graph_is_copied_without_it(size: int) -> None:
    def run(comm: Comm) -> bool:
        job = contracts.make(Overlap(OneBucket()), comm=comm)
        x, y = job.loader.batches[0]
        job.loss(job.model(x), y).backward(create_graph=True)
        return any(view.requires_grad for view in job.kept("overlap").layout.buckets[0].views.values())

    assert not any(Threads(size).run(run))


def test_a_second_backward_is_told() -> None:
    def again(job: Job) -> None:
        x_NCHW, y_N = job.loader.batches[0]
        job.loss(job.model(x_NCHW), y_N).backward()

    with pytest.raises(InputError, match="accumulate=k"):
        Threads(2).run(lambda comm: one_step(comm, again))


class Bypassed(Shared):
    """Uses the weights of a block without calling it."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.second(self.first(x_NCHW.flatten(1)).relu()).relu()
        x = x + nn.functional.linear(x, self.spare.weight, self.spare.bias)
        return self.head(x) * self.scale


class Inner(nn.Module):
    """A block whose layer is called in evaluation only; in training its weights are read, as attention reads some."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layer = nn.Linear(192, 192)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight, self.layer.bias) if self.training else self.layer(x)


def test_a_layer_used_without_a_call_is_waited_for_with_its_block() -> None:
    def judge(job: Job, _: int) -> None:
        with job.evaluation() as judged, torch.no_grad():
            judged(torch.zeros(2, 192))

    def run(comm: Comm, next_forward: bool) -> dict[str, Tensor]:
        model = Shared()
        model.spare = Inner()  # type: ignore[assignment]
        return on_shared(comm, next_forward, judge, model)[0]

    for waits, hides in Threads(2).run(lambda comm: (run(comm, False), run(comm, True))):
        contracts.assert_same(waits, hides)


def test_units_are_layers_also_under_autocast_and_blocks_if_compiled() -> None:
    def units(*more: Technique) -> list[str]:
        return [name for name, _ in LayerIndex(contracts.make(*more).model).modules]

    model = contracts.make().model
    layers = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    assert units() == layers == units(Autocast("bf16"))
    assert units(Compile("eager")) == [name for name, block in blocks(model) if any(True for _ in block.parameters())]
    assert len(units()) > len(units(Compile("eager"))) > 1


def test_a_bypassed_block_is_told() -> None:
    with pytest.raises(InputError, match=r"spare\.(weight|bias) got a gradient before its last update.*bypassed"):
        Threads(2).run(lambda comm: one_step(comm, lambda job: None, Bypassed()))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Fixed(0), "bucket_bytes=0"),
        (lambda: Graded(first=0), "first=0"),
        (lambda: Graded(power=-1.0), "power=-1.0"),
        (lambda: Planned(measure=0), "measure=0"),
        (lambda: PerLayer(-1), "least_bytes=-1"),
        (lambda: Overlap(unused="ignore"), 'unused="ignore"'),  # type: ignore[arg-type]
    ],
)
def test_bad_settings(make: Callable[[], object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        make()


def stopped_and_resumed(comm: Comm, reducer: Reducer) -> list[dict[str, Tensor]]:
    def job_of() -> Job:
        return contracts.make(Overlap(PerLayer(0), reducer=reducer), Seeded(3), comm=comm)

    whole, first, second = job_of(), job_of(), job_of()
    contracts.train(whole, STEPS)
    contracts.train(first, STEPS - 3)
    states = comm.gather_objects(contracts.through_a_file(first.state_dict()))
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(contracts.through_a_file(states[0]))  # one rank's checkpoint, for all
    contracts.train(second, 3)
    return [contracts.weights(whole), contracts.weights(second)]


@pytest.mark.parametrize("where", ["threads", pytest.param("processes", marks=pytest.mark.process)])
@pytest.mark.parametrize("reducer", [Wire(), LowRank(rank=2, min_elements=100)], ids=lambda r: type(r).__name__)
def test_a_reducers_unsent_rest_is_in_the_checkpoint_for_every_rank(reducer: Reducer, where: str) -> None:
    for whole, resumed in on_ranks(where, 2, stopped_and_resumed, reducer):
        contracts.assert_same(whole, resumed)


# ---- gradients that come by another way


@BY_HAND
@pytest.mark.parametrize("used_in", [(0,), (1,), (0, 1)])
def test_a_block_left_out_by_some_accumulated_passes_keeps_its_gradient(used_in: tuple[int, ...]) -> None:
    def run(comm: Comm, buckets: Any) -> dict[str, Tensor]:
        model = Shared()
        job = contracts.make(model=model, comm=comm, accumulate=2)
        if buckets is None:
            plain = ByHand(job, OneBucket())
            job.before_step(plain.average)
        else:
            job.apply(Overlap(buckets, unused="skip"))
        for i, (x_NCHW, y_N) in enumerate([*job.loader, *job.loader]):
            model.use_spare = i % 2 in used_in
            (job.loss(job.model(x_NCHW), y_N) / 2).backward()
            if i % 2 == 1:
                job.optimizer.step()
                job.optimizer.zero_grad()
        return contracts.weights(job)

    by_hand_, found = (Threads(2).run(lambda comm, b=b: run(comm, b)) for b in (None, OneBucket()))
    contracts.assert_same(by_hand_[0], found[0])


def test_a_parameter_unfrozen_after_apply_is_told() -> None:
    def run(comm: Comm) -> None:
        model = Shared()
        model.spare.requires_grad_(False)
        rule = lambda m: torch.optim.SGD(m.parameters(), 0.1)  # noqa: E731
        job = contracts.make(Overlap(PerLayer(0)), optimizer=rule, model=model, comm=comm)
        model.spare.requires_grad_(True)
        contracts.train(job, 1)

    with pytest.raises(InputError, match="required none when Overlap was applied"):
        Threads(2).run(run)


def test_a_model_whose_forward_is_not_seen_keeps_its_first_groups(capsys: pytest.CaptureFixture[str]) -> None:
    def run(comm: Comm) -> bool:
        job = contracts.make(Overlap(Planned(warm=0, measure=1)), comm=comm)
        job.model.eval()
        contracts.train(job, STEPS)
        return job.kept("overlap").profiler is None

    assert Threads(2).run(run) == [True, True]
    assert capsys.readouterr().err.count("no whole step in training mode") == 1


def test_a_model_without_a_gradient_is_refused() -> None:
    def run(comm: Comm) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        Job(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), comm=comm).apply(Overlap())

    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        Threads(2).run(run)
