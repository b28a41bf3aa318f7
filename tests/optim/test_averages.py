"""An average of the weights, and clipping."""

import pytest
import torch

from contracts import make, train, weights
from contracts import one_thread as one_thread
from kasoku.core import InputError, Technique
from kasoku.optim import EMA, Clip


def history(job, steps: int) -> list[dict[str, torch.Tensor]]:
    seen = []
    train(job, steps, each=lambda: seen.append(weights(job)))
    return seen


def judged_weights(job) -> dict[str, torch.Tensor]:
    with job.evaluation() as model:
        return {k: v.clone() for k, v in model.state_dict().items()}


def test_the_average_of_a_parameter_that_is_frozen_in_mid_run_goes_to_its_value():
    job = make(EMA(decay=0.5, warmup=False))
    train(job, 3)
    p = job.model.head.weight
    p.requires_grad_(False)
    p.grad = None
    train(job, 30)
    torch.testing.assert_close(judged_weights(job)["head.weight"], p.detach())
    assert {*job.kept("ema").updates.values()} == {job.steps}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("warmup", [False, True])
def test_ema_is_the_formula_and_leaves_training_alone(every: int, warmup: bool):
    plain, job = make(), make(EMA(decay=0.7, every=every, warmup=warmup))
    state = torch.get_rng_state()
    seen = history(plain, 6)
    torch.set_rng_state(state)
    for a, b in zip(seen, history(job, 6), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
    rounds = seen[every - 1 :: every]
    found = judged_weights(job)
    for name in ("head.weight", "stage.0.conv.weight", "stage.0.norm.running_var"):
        average = rounds[0][name].double()
        for n, values in enumerate(rounds[1:], start=2):
            decay = 0.7**every
            decay = min(decay, (1 + n) / (10 + n)) if warmup else decay
            average = decay * average + (1 - decay) * values[name].double()
        torch.testing.assert_close(found[name].double(), average, rtol=1e-6, atol=1e-7)
    after = weights(job)  # and the weights are back
    assert all(torch.equal(after[k], seen[-1][k]) for k in after)


class Swa(Technique, averages_weights=True):
    """Another average, of a user's own."""


def test_averages_refuse_each_other():
    with pytest.raises(InputError, match="techniques EMA and Swa cannot be combined"):
        make(EMA(), Swa())


def test_evaluation_before_the_first_round_is_of_the_weights_themselves():
    job = make(EMA(every=100))
    train(job, 2)
    found, now = judged_weights(job), weights(job)
    assert all(torch.equal(found[k], now[k]) for k in now)


def test_an_evaluation_that_fails_puts_the_weights_back():
    job = make(EMA(decay=0.9))
    train(job, 3)
    now = weights(job)

    def fail():
        with job.evaluation():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(v, now[k]) for k, v in weights(job).items())


def test_clip_bounds_the_common_norm():
    job = make(Clip(norm=0.01))
    found = []
    job.after_update(lambda params: found.append(torch.cat([p.grad.flatten() for p in params]).norm().item()))
    train(job, 3)
    assert job.needs_whole_gradients
    assert found == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: Clip(norm=0), "norm=0: above 0"),
        (lambda: EMA(decay=1.0), "decay=1.0: at least 0 and below 1"),
        (lambda: EMA(every=0), "every=0: at least 1"),
    ],
)
def test_a_setting_outside_its_range_is_one_line(wrong, line: str):
    with pytest.raises(InputError, match=line):
        wrong()
