"""Every technique through the same contracts; the rows are in contracts.py."""

import copy
import inspect
import pkgutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import pytest
import tomli_w
import torch
from torch import nn

import kasoku
from contracts import NO_ROW, ROWS, Net, Row, assert_same, judged, make, rule, through_a_file, train, weights
from contracts import one_thread as one_thread
from kasoku.config.toml import parse, table
from kasoku.core import Comm, Technique, Threads
from kasoku.device import Compile, Seeded
from kasoku.distributed import AllReduce

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
neutral_rows = pytest.mark.parametrize("row", [r for r in ROWS if r.neutral], ids=lambda row: row.name)
fixed_seeds = Seeded(seed=5)


def beside(row: Row, *others: Technique) -> list[Technique]:
    """The row's technique and the others, unless one of them is it, or is refused beside it."""
    return [row.technique, *(t for t in others if not row.technique.conflict(t))]


def test_every_technique_has_a_row():
    names = set()
    for room in pkgutil.iter_modules(kasoku.__path__, "kasoku."):
        module = import_module(room.name)
        if room.ispkg and room.name != "kasoku.core":
            found = [getattr(module, n) for n in getattr(module, "__all__", [])]
            names |= {t.__name__ for t in found if inspect.isclass(t) and issubclass(t, Technique)}
    assert names - {row.name for row in ROWS} - set(NO_ROW) == set()


@neutral_rows
@pytest.mark.parametrize("accumulate", [1, 2])
def test_neutral_setting_is_identity_bit_for_bit(row: Row, accumulate: int):
    jobs = []
    for techniques in [(), (row.neutral,)]:
        job = make(*techniques, model=Net(dropout=0), accumulate=accumulate)
        train(job, 6)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))
    assert torch.equal(judged(jobs[0]), judged(jobs[1]))


def things_that_show(job) -> dict[str, object]:
    """All that a technique may touch on the plain objects."""
    modules = [(name, sorted(k for k in vars(m) if not k.startswith("_parameters"))) for name, m in named(job.model)]
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for n, m in named(job.model)]
    params = [
        (n, id(p), p.stride(), p.dtype, p.requires_grad, len(getattr(p, "_post_accumulate_grad_hooks", None) or {}))
        for n, p in job.model.named_parameters()
    ]
    optimizer = job._make_optimizer
    return {
        "modules": modules,
        "hooks": hooks,
        "params": params,
        "forward": [m.forward.__func__ for _, m in named(job.model)],
        "loss": job.loss,
        "loader": job.loader,
        "step hooks": (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)),
        "hyper": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "recompile limit": torch._dynamo.config.recompile_limit,
    }


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


@every_row
def test_close_restores_the_objects(row: Row):
    model = Net()
    job = make(model=model, optimizer=rule(model))
    before = things_that_show(job)
    job.apply(*beside(row, fixed_seeds))
    train(job, 3)
    job.close()
    after = things_that_show(job)
    for what, value in before.items():
        assert after[what] == value, what
    for x, y in job.loader:  # and training goes on without it, with state and layout that fit
        job.loss(model(x), y).backward()
        job.optimizer.step()
        break
    for p in model.parameters():
        assert p.grad.stride() == p.stride()
        assert all(s.stride() == p.stride() for s in job.optimizer.state[p].values() if torch.is_tensor(s))


@every_row
@pytest.mark.parametrize("accumulate", [1, 2])
def test_stopped_and_resumed_is_never_stopped_bit_for_bit(row: Row, accumulate: int):
    whole = make(*beside(row, fixed_seeds), accumulate=accumulate)
    train(whole, 7)
    first = make(*beside(row, fixed_seeds), accumulate=accumulate)
    train(first, 3)  # in mid-epoch
    saved = through_a_file({"model": first.model.state_dict(), "job": first.state_dict()})
    torch.manual_seed(99)
    second = make(*beside(row, fixed_seeds), model=Net(seed=9), accumulate=accumulate)
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["job"])
    train(second, 4)
    assert_same(weights(whole), weights(second))
    assert torch.equal(judged(whole), judged(second))
    assert whole.hyper() == second.hyper()


@dataclass(frozen=True)
class Document:
    techniques: tuple[Technique, ...] = ()


@every_row
def test_recipe_round_trip(row: Row):
    document = Document(tuple(beside(row, fixed_seeds)))
    assert parse(Document, tomllib.loads(tomli_w.dumps(table(document)))) == document


@pytest.mark.parametrize("row", [r for r in ROWS if not r.owns_rate], ids=lambda row: row.name)
def test_a_scheduler_stepped_every_step_sets_the_rate(row: Row):
    def rates(*techniques: Technique):
        job = make(*techniques, model=Net(dropout=0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1 / (1 + step))
        seen = []
        train(job, 5, each=lambda: (scheduler.step(), seen.append(job.hyper()[0]["lr"])))
        return job, seen

    plain, wanted = rates()
    _, seen = rates(row.technique)
    assert seen == wanted
    if row.neutral:
        assert_same(weights(plain), weights(rates(row.neutral)[0]))


class Counted(torch.optim.SGD):
    """A rule of the user's own that does something around super().step()."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


@every_row
def test_an_optimizer_subclass_that_calls_super_step(row: Row):
    both = []
    for kind in (torch.optim.SGD, Counted):
        job = make(*beside(row, fixed_seeds), optimizer=lambda m, kind=kind: kind(m.parameters(), lr=0.1, momentum=0.9))
        train(job, 5)
        assert job.steps == 5
        both.append(job)
    assert_same(weights(both[0]), weights(both[1]))
    assert both[0].hyper() == both[1].hyper()


def on_two_ranks(techniques: Sequence[Technique], **net: object) -> list[dict[str, torch.Tensor]]:
    def rank(comm: Comm):
        job = make(*techniques, model=Net(seed=comm.rank, **net), comm=comm)
        train(job, 5)
        return weights(job)

    return Threads(2).run(rank)


@every_row
def test_two_ranks_are_one_rank_on_the_global_batch(row: Row):
    net = {"norm": False, "dropout": 0.0}  # BatchNorm's statistics and dropout's draws belong to a rank
    alone = make(row.technique, model=Net(**net))
    train(alone, 5)
    ranks = on_two_ranks(beside(row, AllReduce()), **net)
    assert_same(*ranks)
    for name, x in weights(alone).items():
        torch.testing.assert_close(ranks[0][name], x, rtol=row.tolerance, atol=row.tolerance)


@every_row
def test_two_ranks_with_dropout_are_the_same_bits_every_time(row: Row):
    runs = [on_two_ranks(beside(row, AllReduce(), fixed_seeds), dropout=0.3) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


@every_row
def test_learns_the_toy_problem(row: Row):
    job = make(*beside(row, fixed_seeds))
    losses = train(job, row.steps)
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    labels = torch.cat([y for _, y in make().loader])
    with job.evaluation() as model:
        guesses = torch.cat([model(x).argmax(1) for x, _ in make().loader])
    assert (guesses == labels).float().mean() > 0.8


@pytest.mark.parametrize("row", [r for r in ROWS if r.compiles], ids=lambda row: row.name)
def test_survives_blockwise_compile(row: Row):
    both = []
    for more in ([], [Compile(backend="aot_eager")]):
        job = make(row.technique, *more, model=Net(dropout=0))
        train(job, 3)
        both.append(weights(job))
    assert both[0].keys() == both[1].keys()
    for name, x in both[0].items():
        torch.testing.assert_close(both[1][name], x, rtol=max(1e-5, row.tolerance), atol=max(1e-5, row.tolerance))


@every_row
def test_a_deep_copy_of_the_model_runs_its_own_weights(row: Row):
    job = make(row.technique, model=Net(dropout=0))
    train(job, 1)
    twin = copy.deepcopy(job.model).eval()
    x = job.loader.plain.batches[0][0] if hasattr(job.loader, "plain") else job.loader.batches[0][0]
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert not twin(x).any()
        assert job.model.eval()(x).any()


@every_row
def test_the_docstring_says_what_it_saves_and_costs(row: Row):
    doc = inspect.getdoc(type(row.technique))
    assert doc.partition("\n")[0].endswith(".")
    assert "Saves: " in doc
    assert "Costs: " in doc
