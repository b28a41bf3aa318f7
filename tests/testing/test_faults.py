"""Each contract of kasoku.testing finds the fault that it is there for."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from random import getrandbits
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kasoku.core import Job, Stage, Technique
from kasoku.data import Dataset, Items, digits
from kasoku.distributed import Reducer
from kasoku.distributed.ddp.compression import Reduce
from kasoku.testing import (
    Contracts,
    ReducerContracts,
    ReducerRow,
    Row,
    SourceContracts,
    SourceRow,
    TechniqueContracts,
    contracts,
    technique_contracts,
)


def scale(job: Job, factor: Callable[[], Any]) -> None:
    for p in job.model.parameters():
        if p.grad is not None:
            p.grad *= factor()


def counts(job: Job) -> None:
    """And keeps no state of it."""
    calls = count(1)
    job.before_step(lambda: scale(job, lambda: next(calls)))


def fresh_random(job: Job) -> None:
    job.before_step(
        lambda: scale(job, lambda: torch.rand((), generator=torch.Generator().manual_seed(getrandbits(32))))
    )


def leaves_an_attribute(job: Job) -> None:
    job.model.mine = 1


def holds_the_model(job: Job) -> None:
    forward = job.model.forward
    job.patch(job.model, "forward", lambda x: forward(x))


def broken_by_compile(job: Job) -> None:
    compiled = any("forward" in vars(block) for block in job.model.modules())
    job.before_step(lambda: scale(job, lambda: 0 if compiled else 1))


FAULTS: dict[str, Callable[[Job], object]] = {
    "": lambda job: None,
    "counts": counts,
    "rank": lambda job: job.before_step(lambda: scale(job, lambda: 1 + job.comm.rank)),
    "random": fresh_random,
    "stops": lambda job: job.before_step(lambda: scale(job, lambda: 0)),
    "leaves": leaves_an_attribute,
    "rate": lambda job: job.before_step(lambda: job.optimizer.param_groups[0].update(lr=0.5)),
    "class": lambda job: job.before_step(
        lambda: scale(job, lambda: 0 if type(job.optimizer) is torch.optim.SGD else 1)
    ),
    "holds": holds_the_model,
    "compile": broken_by_compile,
}


@dataclass(frozen=True)
class Faulty(Technique):
    """Has a fault"""

    stage: ClassVar[Stage] = Stage.STEP
    fault: str = ""
    setting: Any = 0

    def apply(self, job: Job) -> None:
        FAULTS[self.fault](job)


TECHNIQUES = [
    ("test_neutral_setting_is_identity_bit_for_bit", "counts", {"accumulate": 1}),
    ("test_close_restores_the_objects", "leaves", {}),
    ("test_stopped_and_resumed_is_never_stopped_bit_for_bit", "counts", {"accumulate": 1}),
    ("test_a_scheduler_stepped_every_step_sets_the_rate", "rate", {}),
    ("test_an_optimizer_subclass_that_calls_super_step", "class", {}),
    ("test_two_ranks_are_one_rank_on_the_global_batch", "rank", {}),
    ("test_two_ranks_with_dropout_are_the_same_bits_every_time", "random", {}),
    ("test_learns_the_toy_problem", "stops", {}),
    ("test_survives_blockwise_compile", "compile", {}),
    ("test_a_deep_copy_of_the_model_runs_its_own_weights", "holds", {}),
    ("test_the_docstring_says_what_it_saves_and_costs", "", {}),
]


@pytest.mark.parametrize(("contract", "fault", "more"), TECHNIQUES, ids=[row[0] for row in TECHNIQUES])
def test_a_fault_of_a_technique_is_found(contract, fault, more):
    row = Row(Faulty(fault), neutral=Faulty(fault))
    with pytest.raises(AssertionError):
        getattr(TechniqueContracts(), contract)(row, **more)


def test_a_setting_that_no_recipe_can_hold_is_found():
    with pytest.raises(TypeError, match="TOML"):
        TechniqueContracts().test_recipe_round_trip(Row(Faulty(setting=object())))


class Photos:
    """Six grey images; `fault` says what is wrong with them."""

    opened = 0

    def __init__(self, fault: str) -> None:
        self.fault, self.reads, self.targets = fault, 0, [0, 1, 0, 1, 0, 1]
        Photos.opened += 1
        self.number = Photos.opened

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        value = {"reads": self.reads, "opens": self.number}.get(self.fault, index)
        return np.full((8, 8, 3), value, np.uint8), self.targets[index]


def photos(fault: str = "") -> Dataset:
    splits = Items(Photos(fault)), Items(Photos(fault))
    return Dataset("own", ("a", "b"), *splits, 3, (8, 8), (0.5,) * 3, (0.2,) * 3)


def swapped() -> Dataset:
    dataset = digits()
    return replace(dataset, image_size=(8, 9))


SOURCES = [
    ("test_every_image_has_a_label_of_a_named_class", lambda: replace(photos(), classes=("a",))),
    ("test_every_image_has_a_label_of_a_named_class", lambda: replace(photos(), classes=("a", "a"))),
    ("test_images_have_the_size_and_channels_that_it_says", lambda: replace(photos(), std=(0.2,))),
    ("test_images_have_the_size_and_channels_that_it_says", swapped),
    ("test_an_index_reads_the_same_image_each_time_in_any_thread", lambda: photos("reads")),
    ("test_opened_again_it_is_equal", lambda: photos("opens")),
    ("test_an_epoch_has_every_image_once_in_an_order_of_the_seed", lambda: photos("reads")),
]


@pytest.mark.parametrize(("contract", "make"), SOURCES)
def test_a_fault_of_a_source_is_found(contract, make):
    with pytest.raises(AssertionError):
        getattr(SourceContracts(), contract)(SourceRow("faulty", make))


@dataclass(frozen=True)
class FaultyReducer(Reducer):
    fault: str = ""

    def bind(self, comm):
        return FaultyReduce(comm, self.fault)


class FaultyReduce(Reduce):
    """The mean, plus what the fault adds."""

    def __init__(self, comm, fault):
        super().__init__(comm)
        self.fault, self.calls = fault, 0

    def __call__(self, key, x):
        self.calls += 1
        work = self.comm.all_reduce(x, op="sum" if self.fault == "sum" else "mean")
        work.wait()
        x += {"rank": 1e-9 * self.comm.rank, "calls": 1e-3 * self.calls}.get(self.fault, 0.0)
        return work


REDUCERS = [
    ("test_all_ranks_get_the_same_bits_near_the_mean", "rank"),
    ("test_all_ranks_get_the_same_bits_near_the_mean", "sum"),
    ("test_stopped_and_resumed_is_never_stopped_bit_for_bit", "calls"),
    ("test_cleared_state_is_a_fresh_start", "calls"),
]


@pytest.mark.parametrize(("contract", "fault"), REDUCERS)
def test_a_fault_of_a_reducer_is_found(contract, fault):
    with pytest.raises(AssertionError):
        getattr(ReducerContracts(), contract)(ReducerRow(FaultyReducer(fault), tolerance=0.1))


def test_every_contract_has_a_fault():
    tried = {name for name, *_ in (*TECHNIQUES, *SOURCES, *REDUCERS)}
    contracts = {name for kind in Contracts.__subclasses__() for name in vars(kind) if name.startswith("test_")}
    assert contracts == tried | {"test_recipe_round_trip"}


def test_pytest_explains_the_asserts_of_the_contracts():
    assert "Rewrit" in type(technique_contracts.__loader__).__name__


def test_without_pytest_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ImportError, match=r'kasoku\.testing needs pytest: pip install "pytest>=8"'):
        runpy.run_path(contracts.__file__)
