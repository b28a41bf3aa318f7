"""Ranks that hold different recipes, code, data or models do not start; all name the difference."""

import pytest
import torch

from helpers.ranks import on_processes
from kasoku.core import Comm, InputError, Solo, Threads
from kasoku.distributed.consensus import assert_same_on_all_ranks, model_facts, version_facts

RECIPE = {"batch": 128, "rate": {"base": 0.1, "nesterov": True}, "techniques": [{"use": "Mixup"}, {"use": "Clip"}]}


def _agreed(comm: Comm, facts: list[dict[str, object]]) -> str:
    try:
        assert_same_on_all_ranks(comm, facts[comm.rank])
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("there", "line"),
    [
        ({"recipe": {**RECIPE, "batch": 64}}, "another recipe: batch = 64 there, 128 on rank 0"),
        ({"recipe": {**RECIPE, "batch": 128.0}}, "another recipe: batch = 128.0 there, 128 on rank 0"),
        ({"recipe": {**RECIPE, "x": "y"}}, "another recipe: x = y there, nothing on rank 0"),
        (
            {"recipe": {**RECIPE, "rate": {"base": 0.1, "nesterov": False}}},
            "another recipe: rate.nesterov = false there, true on rank 0",
        ),
        (
            {"recipe": {**RECIPE, "techniques": [{"use": "Mixup"}, {"use": "Trim"}]}},
            "another recipe: techniques.1.use = Trim there, Clip on rank 0",
        ),
        (
            {"recipe": {**RECIPE, "techniques": [{"use": "Mixup"}]}},
            "another recipe: techniques.1 = nothing there, 1 entries on rank 0",
        ),
        ({"data": "beef"}, "another data: beef there, cafe on rank 0"),
        ({"data": None}, "another data: nothing there, cafe on rank 0"),
        ({"more": "1"}, "another more: 1 there, nothing on rank 0"),
        ({"model": {"a": "1"}}, "another model: b = nothing there, 2 on rank 0"),
        ({"model": {"a": "1", "b": "3"}}, "another model: b = 3 there, 2 on rank 0"),
        ({"model": {"b": "2", "a": "1"}}, "another model: b comes where a comes on rank 0"),
        (
            {"model": {"a": "9", "b": "2"}, "data": "beef"},
            "another data: beef there, cafe on rank 0 (also another model)",
        ),
    ],
)
def test_what_differs_is_named_on_all_ranks(there: dict[str, object], line: str) -> None:
    facts = {"recipe": RECIPE, "data": "cafe", "model": {"a": "1", "b": "2"}}
    other = {name: fact for name, fact in {**facts, **there}.items() if fact is not None}
    said = Threads(3).run(lambda comm: _agreed(comm, [facts, other, facts]))
    assert said == [f"rank 1 has {line}: start all ranks with the same"] * 3
    said = Threads(7).run(lambda comm: _agreed(comm, [facts, *[other] * 5, facts]))
    assert said == [f"ranks 1, 2, 3 and 2 more have {line}: start all ranks with the same"] * 7


def test_differences_of_several_kinds_are_each_reported() -> None:
    facts: list[dict[str, object]] = [{"data": text} for text in ("a", "b", "a", "c")]
    said = Threads(4).run(lambda comm: _agreed(comm, facts))
    wanted = "rank 1 has another data: b there, a on rank 0; rank 3 has another data: c there, a on rank 0"
    assert said == [f"{wanted}: start all ranks with the same"] * 4


def _same_facts(comm: Comm) -> None:
    torch.manual_seed(comm.rank)
    assert_same_on_all_ranks(comm, {"recipe": RECIPE, **version_facts(), "model": model_facts(torch.nn.Linear(3, 2))})


def test_ranks_that_hold_the_same_begin() -> None:
    assert Threads(2).run(_same_facts) == [None, None]
    assert_same_on_all_ranks(Solo(), {})


@pytest.mark.process
def test_processes_that_hold_the_same_begin() -> None:
    assert on_processes(2, _same_facts) == [None, None]


def test_facts_tell_shape_type_and_frozen() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert model_facts(model) == {"weight": "float32 (2, 3)", "bias": "float32 (2,) frozen"}
    assert version_facts()["torch"] == torch.__version__
    assert len(version_facts()["source"]) == 16
