"""Every pair of techniques: they train together and each does its work, or they are refused in one sentence.

The whole matrix is slow. The fast run keeps the techniques alone, the pairs of IMPORTANT, and the stacks.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

from contracts import one_thread as one_thread
from contracts import weights
from helpers.matrix import (
    COMBINING,
    PAIRS,
    STACKS,
    STEPS,
    STOP,
    Setup,
    equals_one_rank,
    judged,
    outcome,
    together,
    train,
)
from helpers.witnesses import BY_NAME, MEMBERS, Member, files, shipped
from kasoku.core import Comm, InputError, Job, Technique, Threads
from kasoku.device import cpu_kernels
from kasoku.distributed import Overlap, VirtualRanks
from kasoku.memory import SavedMemory
from kasoku.optim import Clip

IMPORTANT = {
    ("Overlap", "VirtualRanks"),
    ("Overlap", "SavedMemory"),
    ("Clip", "Overlap"),
    ("GrowBatch", "VirtualRanks"),
    ("EMA", "Overlap"),
    ("Augment", "Mix"),
    ("Overlap", "Rate"),
}
KNOWN = json.loads(COMBINING.read_text())
OTHERS = {(row.pop("one"), row.pop("other")): row for row in KNOWN["others"]}
# What a technique asks of a job, and does not get.
SILENT = {
    ("EMA", "after_update"),
    ("EMA", "around_evaluation"),
    ("LossScale", "patch"),
    ("LossScale", "decide_step"),
    ("Asynchronous", "after_step"),
}


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """The folder of the files that techniques read."""
    return files(tmp_path_factory.mktemp("matrix"))


def names(pair: tuple[Member, Member]) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def test_every_technique_is_in_the_matrix():
    assert shipped() == set(BY_NAME)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[pytest.mark.smoke] * (names(pair) in IMPORTANT), id="-".join(names(pair)))
        for pair in PAIRS
    ],
)
def test_a_pair_combines_or_says_why_not(pair, where):
    if "CpuKernels" in names(pair) and cpu_kernels.library() is None:
        pytest.skip("no AVX-512 bf16 here, or no C compiler")
    result = outcome(pair, where)
    assert result.row() == OTHERS.get(names(pair), {"kind": "combine"}), "run make combining"


def test_what_is_known_of_the_pairs_is_of_these_techniques():
    refused = {names(p): line for p in PAIRS if (line := p[0].technique.conflict(p[1].technique))}
    assert {pair: row["line"] for pair, row in OTHERS.items() if row["kind"] == "refuse"} == refused
    assert KNOWN["pairs"] == len(PAIRS)
    assert set(OTHERS) <= {names(pair) for pair in PAIRS}
    assert {names(pair) for pair in PAIRS} >= IMPORTANT


def test_a_refusal_says_why_and_what_to_do_instead():
    for one, other in PAIRS:
        if line := one.technique.conflict(other.technique):
            assert re.fullmatch(r"techniques \w+ and \w+ cannot be combined: [^;\n]{20,}; [^;\n]{10,}", line), line
            assert other.technique.conflict(one.technique).partition(": ")[2] == line.partition(": ")[2]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_technique_alone_holds_its_promises(member, where):
    assert outcome([member], where).kind == "combine"


@pytest.mark.parametrize(
    "member", [m for m in MEMBERS if m.name not in {"Overlap", *(name for name, _ in SILENT)}], ids=lambda m: m.name
)
def test_a_witness_sees_that_its_technique_did_nothing(member, where):
    if member.name == "CpuKernels" and cpu_kernels.library() is None:
        pytest.skip("no AVX-512 bf16 here, or no C compiler")

    def rank(comm):
        record = Setup((), where).record(comm, seed=0)
        train(record, STEPS)
        record.trained = record.evaluated = record.start
        return member.witness(record)

    assert all(Threads(2).run(rank))


@pytest.mark.parametrize(("name", "moment"), sorted(SILENT))
def test_a_technique_that_is_applied_and_silenced_is_found(name, moment, where, monkeypatch):
    member = BY_NAME[name]
    own = type(member.technique).apply

    def apply(self: Technique, job: Job) -> None:
        with mock.patch.object(job, moment):
            own(self, job)

    monkeypatch.setattr(type(member.technique), "apply", apply)
    assert all(found_by(member, where))


def test_updates_that_are_exchanged_at_sync_points_alone_are_found(where):
    member = BY_NAME["Asynchronous"]
    assert all(found_by(replace(member, technique=replace(member.technique, every=100)), where))
    assert not any(found_by(member, where))


def found_by(member: Member, where: Path) -> list[str]:
    """What its witness finds undone, on each rank."""

    def rank(comm: Comm) -> str:
        record = Setup((member,), where).record(comm, seed=comm.rank)
        try:
            train(record, STOP)  # drains: a sync point more
            train(record, STEPS - STOP)
        except InputError as refusal:  # a loss that is not scaled
            return str(refusal)
        record.trained = weights(record.job)
        with record.job.evaluation():
            record.evaluated = weights(record.job)
        return member.witness(record)

    return Threads(2).run(rank)


SPANNING = VirtualRanks(norm_batch=16, average=0.5)  # a rank takes 8 images of a batch


@pytest.mark.parametrize("beside", [(), (Overlap(),), (SavedMemory(factor=1.1),), (Clip(norm=0.05),)])
def test_groups_that_span_ranks_train_to_the_weights_of_one_rank(beside: tuple[Technique, ...], where):
    members = [replace(BY_NAME[type(t).__name__], technique=t) for t in (SPANNING, *beside)]
    equals_one_rank(Setup(tuple(members), where))


@pytest.mark.parametrize("name", STACKS)
def test_a_whole_stack_trains_together(name, where):
    members = [member.name for member in STACKS[name].members]
    result = together(replace(STACKS[name], where=where))
    assert {"members": members, **result.row()} == KNOWN["stacks"][name], "run make combining"


def deaf(job: Job) -> None:
    """No technique hears that the weights changed."""
    job.patch(job, "run_after_update", lambda params: None)


def forgetful(job: Job) -> None:
    """Scales the loss by the number of its calls, of which no checkpoint has a trace."""
    calls, loss = count(1), job.loss
    job.patch(job, "loss", lambda out, y_N: loss(out, y_N) * next(calls))


def partial_to_ranks(job: Job) -> None:
    loss = job.loss
    job.patch(job, "loss", lambda out, y_N: loss(out, y_N) * job.comm.size)


def untidy(job: Job) -> None:
    job.model.mine = 1


FAULTS = {
    "deaf": (deaf, "quietly less: EMA"),
    "forgetful": (forgetful, "not equal"),
    "ranks": (partial_to_ranks, "not close"),
    "untidy": (untidy, "close.. leaves modules"),
    "": (lambda job: None, ""),
}


@dataclass(frozen=True)
class Planted(Technique):
    """A technique with a fault."""

    fault: str = ""

    def apply(self, job: Job) -> None:
        FAULTS[self.fault][0](job)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pair_with_a_fault_is_found(fault, where):
    pair = BY_NAME["EMA"], Member(Planted(fault), "", lambda record: "")
    if fault:
        with pytest.raises(AssertionError, match=FAULTS[fault][1]):
            outcome(pair, where)
    else:
        assert outcome(pair, where).kind == "combine"


def test_a_technique_that_says_that_it_does_less_is_named(where):
    quiet = Member(Planted(), "", lambda record: "half of its work")
    lines = ["kasoku: Overlap: something", "kasoku: Planted: only half of it beside EMA"]
    assert judged(["Planted: half of its work"], lines).line == "Planted: only half of it beside EMA"
    with pytest.raises(AssertionError, match="quietly less: Planted: half of its work"):
        outcome([quiet], where)
