"""The verdict names what holds a training up, by the rows of all ranks; planted causes are in tests/test_causes.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.shown import FACTS, step
from kasoku.core import Job
from kasoku.device import Compile
from kasoku.report import StepFacts, facts_of
from kasoku.report.bottleneck import find_bottlenecks, layer_s


def causes(*steps: dict[str, float], facts: StepFacts = FACTS) -> list[str]:
    return [cause.cause for cause in find_bottlenecks(steps, facts)]


def test_a_step_that_computes_is_compute_bound_and_nothing_else():
    assert causes(step()) == ["compute-bound"]


def test_without_a_step_there_is_no_verdict():
    assert causes() == []
    assert causes({}) == []


@pytest.mark.parametrize(
    ("cause", "steps", "facts"),
    [
        ("input-bound", [step(input=30)], FACTS),
        ("input-bound", [step(copy=30)], FACTS),
        ("update-bound", [step(update=30)], FACTS),
        ("small batch", [step(forward=0.3, backward=0.5, update=0.4, input=0.05, other=0)], replace(FACTS, batch=2)),
        ("launch-bound", [step(forward=0.3, backward=0.4, update=0.1, input=0, other=0)], FACTS),
        ("oversubscribed", [step()], replace(FACTS, threads=16)),
        ("oversubscribed", [step()], replace(FACTS, processes=4)),
        ("CPU-starved", [step()], replace(FACTS, starved=0.4)),
        ("communication-bound", [step(exposed=30), step(exposed=28)], FACTS),
        ("straggler", [step(exposed=30), step(backward=42, exposed=0.1)], FACTS),
    ],
)
def test_a_cause_is_named_alone(cause: str, steps: list[dict[str, float]], facts: StepFacts):
    assert causes(*steps, facts=facts) == [cause]


def test_the_remedy_of_lacking_cores_names_a_setting():
    (found,) = find_bottlenecks([step()], replace(FACTS, starved=0.4))
    assert found.remedy.endswith("or try --set device.threads=1")


def test_ranks_that_are_late_in_turns_are_no_slow_link():
    late = [step(exposed=14), step(exposed=15)]
    assert causes(*late) == ["communication-bound"]
    found = find_bottlenecks(late, FACTS, transfer_s=0.0005)  # of each step one rank hardly waits
    assert [cause.cause for cause in found] == ["compute-bound"]


def test_layers_are_called_once_a_part():
    few = step(forward=6, backward=6, update=0.1)
    assert causes(few) == ["compute-bound"]
    (cause,) = find_bottlenecks([few], replace(FACTS, parts=16))
    assert cause.cause == "launch-bound"
    assert "calling 10 layers 16 times" in cause.line
    (cause,) = find_bottlenecks([few], replace(FACTS, parts=16, batch=2))
    assert cause.remedy.startswith("raise norm_batch")


def test_a_loop_that_does_other_things_is_named():
    (cause,) = find_bottlenecks([step(other=20)], FACTS)
    assert cause.cause == "loop-bound"


def test_a_straggler_is_told_apart_from_slow_links_by_what_it_does_itself():
    steps = [step(exposed=25), step(exposed=24), step(backward=36, exposed=0.5), step(exposed=25)]
    (cause,) = find_bottlenecks(steps, FACTS)
    assert cause.cause == "straggler"
    assert "rank 2 takes 24 ms longer" in cause.line
    assert "backward (24 ms)" in cause.line
    assert cause.line.endswith("they wait 25 ms of each step")
    (cause,) = find_bottlenecks(steps, FACTS, last_in=[0.02, 0.01, 0.97, 0])
    assert cause.line.endswith("they wait 25 ms of each step, and it was the last in 97% of the latest")


def test_the_costliest_cause_comes_first_and_shares_are_of_a_step():
    found = find_bottlenecks([step(input=20, update=40)], FACTS)
    assert [cause.cause for cause in found] == ["update-bound", "input-bound"]
    assert [cause.share for cause in found] == sorted((cause.share for cause in found), reverse=True)
    assert found[1].share == pytest.approx(20 / 78.2, abs=1e-3)


def test_what_would_lift_a_slow_input_is_said_with_its_figure():
    (cause,) = find_bottlenecks([step(input=20)], FACTS)
    assert "50% of a step (20 ms of 39.7 ms)" in cause.line
    assert "2.0 times as fast" in cause.line
    assert "kasoku pack" in cause.remedy


def test_threads_are_counted_over_the_ranks_of_a_host():
    (cause,) = find_bottlenecks([step()], replace(FACTS, threads=2, cores=8, processes=8))
    assert "16 threads (8 ranks) compute on 8 cores" in cause.line
    assert cause.remedy.startswith("device.threads = 1,")


def test_facts_count_what_computes_and_leave_the_random_state_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(4, 2, bias=False))
    state = torch.get_rng_state()
    job = Job(model, lambda m: torch.optim.SGD(m.parameters(), 0.1), accumulate=5)
    facts = facts_of(job, 8, threads=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert (facts.device, facts.layers, facts.parameters, facts.threads) == ("cpu", 3, 3 * 4 * 9 + 4 + 8, 3)
    assert facts.parts == 5
    assert facts_of(job.apply(Compile(backend="eager")), 8).layers == 0  # nobody calls them one by one
    assert 1e-7 < layer_s(torch.device("cpu")) < 0.1
