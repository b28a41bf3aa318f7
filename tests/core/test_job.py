"""The moments of a job, and the twin step on a part of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contracts import Net, assert_same, judged, make, rule, through_a_file, train, weights
from contracts import one_thread as one_thread
from helpers.ranks import on_processes
from kasoku.core import Comm, InputError, Job, Linear, Solo, Stage, Technique, Threads
from kasoku.data import digits, loader
from kasoku.distributed import AllReduce, Overlap
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.optim import EMA, Rate, adamw, muon, sgd

RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd fused": lambda m: sgd(m, lr=0.05, nesterov=True, weight_decay=1e-3),
    "sgd foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "sgd loop": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=False),
    "adamw": lambda m: adamw(m, lr=1e-3),
    "muon": lambda m: muon(m, lr=0.05),
}


@dataclass(frozen=True)
class Parts(Technique):
    """Updates the model in parts as gradients arrive, or after the step: what overlap and in-step updates do."""

    stage: ClassVar[Stage] = Stage.COMM

    late: bool = False

    def apply(self, job: Job) -> None:
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        hyper = []

        def ready(p):
            if not self.late:
                job.update([p])
                p.grad = None

        def take():
            hyper[:] = job.hyper()
            for p in job.model.parameters():
                if p.grad is not None:
                    taken.append((p, p.grad))
                    p.grad = None

        def give():
            for p, grad in taken:
                p.grad = grad
                job.update([p], hyper)
                p.grad = None
            taken.clear()

        job.gradient_ready(ready)
        if self.late:
            job.before_step(take)
            job.around_loader(lambda batches: (batch for batch in batches if give() is None))
            job.on_drain(give)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_an_update_in_parts_is_the_plain_step_bit_for_bit(name: str, late: bool, accumulate: int):
    jobs = []
    for techniques in [(), (Parts(late=late),)]:
        job = make(*techniques, model=Net(dropout=0), optimizer=RULES[name], accumulate=accumulate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1 / (1 + step))
        train(job, 5, each=scheduler.step)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))


@pytest.mark.parametrize("late", [False, True])
def test_rates_and_averages_do_not_care_who_updates(late: bool):
    jobs = []
    for parts in ([], [Parts(late=late)]):
        job = make(*parts, EMA(decay=0.8, every=2), Rate(Linear(epochs=2, warmup=0.5)), model=Net(dropout=0))
        train(job, 7)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))
    assert torch.equal(judged(jobs[0]), judged(jobs[1]))


class Stateful(torch.optim.SGD):
    """A rule with a count of its own, beside state[p]."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class InGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(("kind", "what"), [(Stateful, "self.count"), (InGroup, "param_groups['seen']")])
def test_a_rule_with_state_outside_its_parameters_is_refused(kind: type, what: str):
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0].setdefault("seen", 0)
    job = Job(model, optimizer)
    p = model.head.bias
    p.grad = torch.ones_like(p)
    with pytest.raises(InputError, match="outside state") as error:
        job.update([p])
    assert what in str(error.value)


def test_each_moment_comes_once_and_in_order():
    log: list[str] = []

    @dataclass(frozen=True)
    class Early(Technique):
        stage: ClassVar[Stage] = Stage.STEP

        def apply(self, job):
            name = type(self).__name__
            job.before_step(lambda: log.append(f"before {name}"))
            job.after_update(lambda params: log.append(f"updated {len(params)}"))
            job.after_step(lambda: log.append(f"after {job.steps}"))

    @dataclass(frozen=True)
    class Late(Early):
        stage: ClassVar[Stage] = Stage.COMM

        def apply(self, job):
            job.gradient_ready(lambda p: log.append("gradient"))
            job.before_step(lambda: log.append("before Late"))

    job = make(Late(), Early(), accumulate=2)
    train(job, 1)
    count = len(list(job.model.parameters()))
    assert log == ["gradient"] * count + ["before Late", "before Early", f"updated {count}", "after 1"]


def test_progress_counts_epochs_by_updates_made():
    job = make(accumulate=2)  # four batches an epoch, so two updates
    assert job.progress == 0
    train(job, 3)
    assert job.progress == 1.5


def test_a_declaration_in_a_techniques_head_is_one_of_its_class():
    class Mine(Technique, stage=Stage.MODEL, needs_whole_gradients=True):
        pass

    assert Mine.stage is Stage.MODEL
    assert Mine.needs_whole_gradients
    assert not Technique.needs_whole_gradients


@pytest.mark.parametrize("wrong", [{"need_whole_gradients": True}, {"stage": 4}, {"refuses": "captures_graph"}])
def test_a_declaration_that_nobody_reads_is_refused(wrong):
    with pytest.raises(TypeError, match=r"Mine: .*no declaration of Technique, or one of another type"):
        type("Mine", (Technique,), {}, **wrong)


def test_what_cannot_be_combined_is_refused_in_a_sentence():
    @dataclass(frozen=True)
    class A(Technique):
        averages_weights: ClassVar[bool] = True

        def apply(self, job):
            pass

    @dataclass(frozen=True)
    class B(A):
        refuses: ClassVar[Mapping[str, str]] = {"averages_weights": "B needs the last weights; leave A out"}

    @dataclass(frozen=True)
    class First(A):
        stage: ClassVar[Stage] = Stage.MODEL

    reason = "B needs the last weights; leave A out"
    with pytest.raises(InputError, match=f"techniques A and B cannot be combined: {reason}"):
        make(A(), B())
    with pytest.raises(InputError, match="technique A is given twice"):
        make(A(), A())
    with pytest.raises(InputError, match="First comes before A: give both to one call"):
        make(A()).apply(First())


def test_a_closure_is_refused_and_none_is_none():
    job = make()
    job.optimizer.step(None)
    with pytest.raises(InputError, match="closure"):
        job.optimizer.step(lambda: 0.0)


def test_hooks_run_again_after_a_step_that_raised():
    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise MemoryError
            return super().step(closure)

    seen = []
    job = make(optimizer=lambda model: Fails(model.parameters(), 0.1))
    job.before_step(lambda: seen.append(job.steps))
    x_NCHW, y_N = next(iter(job.loader))
    job.backward(job.loss(job.model(x_NCHW), y_N))
    with pytest.raises(MemoryError):
        job.optimizer.step()
    job.optimizer.fails = False
    job.backward(job.loss(job.model(x_NCHW), y_N))
    job.optimizer.step()
    assert seen == [0, 0]
    assert job.steps == 1


def test_the_optimizer_is_made_after_model_techniques():
    @dataclass(frozen=True)
    class Grow(Technique):
        stage: ClassVar[Stage] = Stage.MODEL

        def apply(self, job):
            job.model.more = nn.Linear(2, 2)

    job = make(Grow())
    assert sum(len(g["params"]) for g in job.optimizer.param_groups) == len(list(job.model.parameters()))


def test_evaluation_is_in_eval_mode_and_puts_every_mode_back():
    job = make()
    job.model.stage[0].norm.eval()
    before = [m.training for m in job.model.modules()]

    def evaluate():
        with job.evaluation() as model:
            assert not any(m.training for m in model.modules())
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert [m.training for m in job.model.modules()] == before


def test_a_checkpoint_of_other_techniques_is_refused():
    job = make(EMA())
    train(job, 1)
    state = through_a_file(job.state_dict())
    with pytest.raises(InputError, match=r"keeps \['ema'\], this job keeps \[\]"):
        make().load_state_dict(state)


def test_state_from_another_layout_is_laid_out_as_the_weights_are():
    from kasoku.device import ChannelsLast

    job = make(optimizer=rule)
    train(job, 2)
    state = through_a_file(job.state_dict())
    other = make(ChannelsLast())
    other.load_state_dict(state)
    p = other.model.stage[1].conv.weight
    assert p.is_contiguous(memory_format=torch.channels_last)
    assert other.optimizer.state[p]["momentum_buffer"].stride() == p.stride()
    kept = job.optimizer.state[job.model.stage[1].conv.weight]["momentum_buffer"]
    assert torch.equal(other.optimizer.state[p]["momentum_buffer"], kept)


def job_in_a_group(comm: Comm) -> str:
    net = nn.Linear(2, 2)
    Job(net, torch.optim.SGD(net.parameters(), lr=0.1), comm=Solo())
    assert Job(net, torch.optim.SGD(net.parameters(), lr=0.1), comm=comm).comm.size == 2
    with pytest.raises(InputError) as refused:
        Job(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return str(refused.value)


@pytest.mark.process
@pytest.mark.smoke
def test_a_job_without_a_comm_in_a_process_group_is_refused():
    for line in on_processes(2, job_in_a_group):
        assert line.startswith("Job without comm in a process group of 2 ranks: give comm=kasoku.distributed.TorchComm")
        assert "comm=kasoku.core.Solo()" in line


def test_a_loader_of_one_rank_is_refused_in_a_job_of_several():
    def job(comm: Comm) -> None:
        Job(nn.Linear(1, 1), sgd, loader=loader(digits(), "train", 64, comm=comm), comm=comm)
        with pytest.raises(InputError, match="loader without comm beside a Job of 2 ranks: give both the same comm"):
            Job(nn.Linear(1, 1), sgd, loader=loader(digits(), "train", 64), comm=comm)

    Threads(2).run(job)


def test_ranks_that_train_apart_are_warned_of_once():
    with pytest.warns(UserWarning, match=r"averages the gradients of the 2 ranks.*Overlap\(\)") as warned:
        Threads(2).run(lambda comm: train(make(comm=comm), 2))
    assert len(warned) == 2


def test_a_model_that_ddp_wraps_is_refused_where_gradients_are_averaged():
    job: Any = SimpleNamespace(model=object.__new__(DistributedDataParallel))
    with pytest.raises(InputError, match="take the place of DistributedDataParallel: give Job the plain model"):
        start_equal(job, Solo())


def test_a_class_in_place_of_a_technique_is_refused():
    with pytest.raises(InputError, match=r"EMA is a class: give EMA\(\.\.\.\)"):
        make().apply(EMA)


def test_accumulate_below_one_is_refused():
    with pytest.raises(InputError, match="accumulate=0: at least 1"):
        make(accumulate=0)


def test_the_state_of_another_optimizer_is_refused_by_name():
    state = Job(Net(), lambda m: adamw(m, lr=1e-3)).state_dict()
    with pytest.raises(InputError, match="another optimizer"):
        Job(Net(), lambda m: sgd(m, lr=0.1)).load_state_dict(state)


def test_hooks_run_again_after_one_of_them_raised():
    job = Job(Net(), lambda m: sgd(m, lr=0.1))
    calls = []

    def fails_once() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ValueError("once")

    job.before_step(fails_once)
    with pytest.raises(ValueError, match="once"):
        job.optimizer.step()
    job.optimizer.step()
    job.optimizer.step()
    assert calls == [0, 1, 2]
    assert job.steps == 2


def test_techniques_that_conflict_leave_the_job_as_it_was():
    job = Job(Net(), lambda m: sgd(m, lr=0.1))
    with pytest.raises(InputError, match="cannot be combined"):
        job.apply(AllReduce(), Overlap())
    assert job.applied == []
