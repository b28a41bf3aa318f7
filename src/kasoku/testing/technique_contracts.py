"""The contracts of techniques."""

import copy
import inspect
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from kasoku.config import trust
from kasoku.config.toml import parse, table
from kasoku.core import Comm, Job, Technique, Threads
from kasoku.core.torch_internals import compiled_forms, gradient_hooks
from kasoku.device import Compile, Seeded
from kasoku.distributed import AllReduce
from kasoku.testing.contracts import Contracts, for_rows
from kasoku.testing.toy import ToyNet, assert_near, assert_same, evaluated, go_on, toy_job, train_toy, weights
from kasoku.testing.toy import toy_optimizer as rule

_FIXED_SEEDS = Seeded(seed=5)


@dataclass(frozen=True)
class Row:
    """A technique and its claims.

    Args:
        technique: a setting that does something.
        neutral: a setting that changes nothing, bit for bit; None: there is none.
        owns_rate: it sets the learning rate itself, so no scheduler beside it.
        tolerance: how near many ranks come to one rank on the same global batch.
        steps: updates that suffice to learn the toy problem.
    """

    technique: Technique
    neutral: Technique | None = None
    owns_rate: bool = False
    tolerance: float = 1e-6
    steps: int = 24

    @property
    def name(self) -> str:
        """The name of the class, in the names of tests."""
        return type(self.technique).__name__

    def beside(self, *others: Technique) -> list[Technique]:
        """The technique and the others, unless one of them is it, or is refused beside it."""
        return [self.technique, *(t for t in others if not self.technique.conflict(t))]


class _CallsSuper(torch.optim.SGD):
    """An optimizer of the user's own, whose step calls super().step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """All that a technique may leave behind: attributes, hooks, layouts, hyperparameters."""

    def attributes(thing: object) -> dict[str, object]:
        return {name: len(x) if isinstance(x, dict) else None for name, x in vars(thing).items()}

    parameters = model.named_parameters()
    return {
        "modules": {name: (attributes(m), getattr(m.forward, "__func__", None)) for name, m in model.named_modules()},
        "parameters": [(n, id(p), p.stride(), p.dtype, p.requires_grad, gradient_hooks(p)) for n, p in parameters],
        "optimizer": {name: n for name, n in attributes(optimizer).items() if name.endswith("hooks")},
        "recompile limit": compiled_forms(),
        "hyper": [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups],
    }


def _trained(steps: int, *techniques: Technique, **settings: Any) -> Job:
    job = toy_job(*techniques, **settings)
    train_toy(job, steps)
    return job


def _on_two_ranks(techniques: Sequence[Technique], **net: Any) -> list[dict[str, Tensor]]:
    def rank(comm: Comm) -> dict[str, Tensor]:
        return weights(_trained(5, *techniques, model=ToyNet(seed=comm.rank, **net), comm=comm))

    return Threads(2).run(rank)


class TechniqueContracts(Contracts):
    """What every technique holds. `rows`: a Row for each technique."""

    @for_rows(lambda row: row.neutral)
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_neutral_setting_is_identity_bit_for_bit(self, row: Row, accumulate: int) -> None:
        setting = [row.neutral] if row.neutral else []
        plain, neutral = (_trained(6, *t, model=ToyNet(dropout=0), accumulate=accumulate) for t in ((), setting))
        assert_same(weights(plain), weights(neutral))
        assert torch.equal(evaluated(plain), evaluated(neutral))

    def test_close_restores_the_objects(self, row: Row) -> None:
        model = ToyNet()
        optimizer = rule(model)
        job = toy_job(model=model, optimizer=optimizer)
        loss, loader, before = job.loss, job.loader, traces(model, optimizer)
        job.apply(*row.beside(_FIXED_SEEDS))
        train_toy(job, 3)
        job.close()
        assert job.loss == loss
        assert job.loader is loader
        for name, found in traces(model, optimizer).items():
            assert found == before[name], name
        x_NCHW, y_N = next(iter(job.loader))  # training goes on without it, with state and layout that fit
        job.backward(job.loss(model(x_NCHW), y_N))
        optimizer.step()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
            assert all(s.stride() == p.stride() for s in optimizer.state[p].values() if torch.is_tensor(s))

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_stopped_and_resumed_is_never_stopped_bit_for_bit(self, row: Row, accumulate: int) -> None:
        whole, first = (_trained(n, *row.beside(_FIXED_SEEDS), accumulate=accumulate) for n in (7, 3))  # 3: mid-epoch
        torch.manual_seed(99)
        second = toy_job(*row.beside(_FIXED_SEEDS), model=ToyNet(seed=9), accumulate=accumulate)
        go_on(first, second)
        train_toy(second, 4)
        assert_same(weights(whole), weights(second))
        assert torch.equal(evaluated(whole), evaluated(second))
        assert whole.hyper() == second.hyper()

    def test_recipe_round_trip(self, row: Row) -> None:
        trust.allow([type(row.technique).__module__])
        written = tomli_w.dumps({"techniques": table(row.beside(_FIXED_SEEDS))})

        def recipe(techniques: tuple[Technique, ...]) -> list[Technique]:
            return list(techniques)

        assert parse(recipe, tomllib.loads(written)) == row.beside(_FIXED_SEEDS)

    @for_rows(lambda row: not row.owns_rate)
    def test_a_scheduler_stepped_every_step_sets_the_rate(self, row: Row) -> None:
        def rates(*techniques: Technique) -> tuple[dict[str, Tensor], list[float]]:
            job, seen = toy_job(*techniques, model=ToyNet(dropout=0)), []
            scheduler = LambdaLR(job.optimizer, lambda step: 1 / (1 + step))

            def step() -> None:
                scheduler.step()
                seen.append(job.hyper()[0]["lr"])

            train_toy(job, 5, each=step)
            return weights(job), seen

        plain, wanted = rates()
        assert rates(row.technique)[1] == wanted
        if row.neutral:
            assert_same(plain, rates(row.neutral)[0])

    def test_an_optimizer_subclass_that_calls_super_step(self, row: Row) -> None:
        jobs = []
        for kind in (torch.optim.SGD, _CallsSuper):
            model = ToyNet()
            own = kind(model.parameters(), lr=0.1, momentum=0.9)
            jobs.append(_trained(5, *row.beside(_FIXED_SEEDS), model=model, optimizer=own))
            assert jobs[-1].steps == 5
        assert_same(*map(weights, jobs))
        assert jobs[0].hyper() == jobs[1].hyper()

    def test_two_ranks_are_one_rank_on_the_global_batch(self, row: Row) -> None:
        net: Any = {"norm": False, "dropout": 0.0}  # BatchNorm's statistics and dropout's draws belong to a rank
        alone = _trained(5, row.technique, model=ToyNet(**net))
        ranks = _on_two_ranks(row.beside(AllReduce()), **net)
        assert_same(*ranks)
        assert_near(weights(alone), ranks[0], row.tolerance)

    def test_two_ranks_with_dropout_are_the_same_bits_every_time(self, row: Row) -> None:
        runs = [_on_two_ranks(row.beside(AllReduce(), _FIXED_SEEDS), dropout=0.3) for _ in range(2)]
        for a, b in zip(*runs, strict=True):
            assert_same(a, b)

    def test_learns_the_toy_problem(self, row: Row) -> None:
        job = toy_job(*row.beside(_FIXED_SEEDS))
        losses = train_toy(job, row.steps)
        assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
        batches = list(toy_job().loader)
        with job.evaluation() as model:
            hits = [model(x_NCHW).argmax(1) == y_N for x_NCHW, y_N in batches]
        assert torch.cat(hits).float().mean() > 0.8

    @for_rows(lambda row: not row.technique.conflict(Compile))
    def test_survives_blockwise_compile(self, row: Row) -> None:
        block = Compile(backend="aot_eager")
        plain, compiled = (_trained(3, row.technique, *more, model=ToyNet(dropout=0)) for more in ((), (block,)))
        assert_near(weights(plain), weights(compiled), max(1e-5, row.tolerance))

    def test_a_deep_copy_of_the_model_runs_its_own_weights(self, row: Row) -> None:
        job = _trained(1, row.technique, model=ToyNet(dropout=0))
        twin, (x_NCHW, _) = copy.deepcopy(job.model).eval(), job.plain_loader.batches[0]
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
            assert not twin(x_NCHW).any()
            assert job.model.eval()(x_NCHW).any()

    def test_the_docstring_says_what_it_saves_and_costs(self, row: Row) -> None:
        doc = inspect.getdoc(type(row.technique)) or ""
        assert doc.partition("\n")[0].endswith(".")
        assert "Saves: " in doc
        assert "Costs: " in doc
