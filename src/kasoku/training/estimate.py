"""How long a training will take, from a few steps on a copy of its job."""

import math

from kasoku.config.ranks import TEST_PASSES
from kasoku.config.updates import evaluations, pixel_share, updates_in_epoch
from kasoku.training.run_state import Training
from kasoku.tune import BatchSizeResult, Needs, SizeSearch, tune_batch_size
from kasoku.tune.measurement import BRIEF
from kasoku.tune.memory_forecast import extrapolate

_BUDGET_S = 4.0
_FORWARD = 1 / 3  # of the computing of a step


class _TwoSizes:
    """Times the smallest batch, and one of four times its size, or twice where that would take long."""

    needs = Needs(brief=True)

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        small, least = tries.measure(tries.least), tries.least
        factor = 4 if 4 * BRIEF * small.step_s < 2 * _BUDGET_S else 2
        larger = [tries.measure(batch) for batch in {min(factor * least, tries.most)} - {least}]
        return BatchSizeResult(small.batch, (small, *larger), "the smallest", tries.clock.now())


def estimated_s(training: Training) -> float:
    """The seconds of training and evaluations, if the target does not end them; nothing in the job changes.

    The time of a step lies on the line through those of an eighth and of half a batch. Collective; drains.
    """
    recipe, data, ranks = training.recipe, training.dataset, training.job.comm.size
    least = min(recipe.batch, max(2 * ranks, recipe.batch // 8))
    result = tune_batch_size(training.job, _TwoSizes(), budget_s=_BUDGET_S, least=least, most=recipe.batch)
    costs = sorted((sample.batch, sample.step_s) for sample in result.samples if not sample.failed)
    costs = costs if len(costs) > 1 else [(0, 0.0), *costs]
    fixed_s = max(0.0, extrapolate(costs, 0))
    image_s = (extrapolate(costs, recipe.batch) - fixed_s) / recipe.batch
    seconds = evaluations(recipe) * len(data.test) * TEST_PASSES[recipe.evaluate.views] * _FORWARD * image_s
    for epoch in range(math.ceil(recipe.epochs)):
        pixels = pixel_share(recipe, epoch, data.image_size[0])
        whole_s = updates_in_epoch(recipe, len(data.train), epoch) * fixed_s + len(data.train) * image_s * pixels
        seconds += min(1.0, recipe.epochs - epoch) * whole_s
    return seconds
