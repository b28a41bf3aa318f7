"""How long a training will take, from a few steps on a copy of its job."""

import math

from kasoku.config.ranks import TEST_PASSES
from kasoku.config.updates import evaluations, updates_in_epoch
from kasoku.training.run_state import Training
from kasoku.tune import BatchSizeResult, tune_batch_size
from kasoku.tune.measurement import Limits, Measure, Needs, SizeSearch
from kasoku.tune.memory_forecast import extrapolate

_BUDGET_S = 2.0
_FORWARD = 1 / 3  # of the computing of a step


class _TwoSizes:
    """Times a small batch and one of four times its size."""

    needs = Needs(brief=True)

    def search(self, measure: Measure, limits: Limits) -> BatchSizeResult:
        tries = SizeSearch(measure, limits)
        for batch in sorted({limits.first, min(4 * limits.first, limits.last)}):
            tries.take(batch)
        return tries.result(tries.good[0].batch, "the smallest")


def estimated_s(training: Training) -> float:
    """The seconds of training and evaluations, if the target does not end them; nothing in the job changes.

    The time of a step is taken as the line through those of two small batches. Collective; drains.
    """
    recipe, data, ranks = training.recipe, training.dataset, training.job.comm.size
    result = tune_batch_size(training.job, _TwoSizes(), budget_s=_BUDGET_S, least=2 * ranks, most=recipe.batch)
    costs = sorted((sample.batch, sample.step_s) for sample in result.samples if not sample.failed)
    costs = costs if len(costs) > 1 else [(0, 0.0), *costs]
    fixed_s = max(0.0, extrapolate(costs, 0))
    image_s = (extrapolate(costs, recipe.batch) - fixed_s) / recipe.batch
    seconds = evaluations(recipe) * len(data.test) * TEST_PASSES[recipe.evaluate.views] * _FORWARD * image_s
    for epoch in range(math.ceil(recipe.epochs)):
        pixels = math.prod(technique.pixel_share(epoch, data.image_size[0]) for technique in recipe.techniques)
        whole_s = updates_in_epoch(recipe, len(data.train), epoch) * fixed_s + len(data.train) * image_s * pixels
        seconds += min(1.0, recipe.epochs - epoch) * whole_s
    return seconds
