"""Which techniques a recipe trains with on a number of ranks, and whether its ranks step asynchronously."""

from __future__ import annotations

from kasoku.config.recipe import Recipe
from kasoku.core import InputError, Technique
from kasoku.distributed import AllReduce, Overlap, VirtualRanks

UNSURE = 0.3  # the fraction of a test batch that `evaluate.views = "crops"` tests on shifted crops too
TEST_PASSES = {"plain": 1.0, "mirror": 2.0, "crops": 2 + 4 * UNSURE}  # forwards of a test image, by evaluate.views


def techniques_for(recipe: Recipe, ranks: int) -> list[Technique]:
    """The recipe's techniques in the form that this number of ranks trains with.

    Raises:
        InputError: for settings that asynchronous ranks cannot have.
    """
    techniques = [technique.for_ranks(ranks) for technique in recipe.techniques]
    refusals = {
        f"norm_batch={recipe.norm_batch}: ranks that do not wait share no statistics": recipe.norm_batch,
        f"norm_average={recipe.norm_average:g}: needs the statistics of all ranks": recipe.norm_average,
        f"accumulate={recipe.accumulate}: each rank takes its share at once": recipe.parts(ranks) > 1,
        "GrowBatch: all ranks change the batch after the same step": any(t.changes_batch for t in recipe.techniques),
    }
    for line, present in refusals.items():
        if present and is_asynchronous(recipe, ranks):
            raise InputError(f"kasoku.distributed.Asynchronous beside {line}; leave it out")
    return techniques


def derived_techniques(recipe: Recipe, ranks: int, *, uneven: bool = False) -> list[Technique]:
    """The techniques that real or virtual ranks need: BatchNorm over groups of images, and an exchange of gradients.

    Args:
        recipe: what is trained.
        ranks: their number.
        uneven: whether they take unequal shares of a batch.
    """
    if is_asynchronous(recipe, ranks):
        return []
    # Without groups the running statistics are each rank's own, as where another technique runs BatchNorm itself.
    replaced = any("replaces_batchnorm" in t.refuses for t in techniques_for(recipe, ranks))
    own = ranks == 1 or recipe.device.graphs or replaced or uneven
    norm_batch = recipe.norm_batch if own else recipe.images_per_norm(ranks)
    derived: list[Technique] = []
    if norm_batch or recipe.norm_average or uneven:
        derived.append(VirtualRanks(norm_batch, recipe.norm_average))
    if not any(technique.exchanges_gradients for technique in recipe.techniques):
        # on one rank too, so that several ranks can resume from there
        derived.append(AllReduce() if recipe.device.graphs else Overlap())
    return derived


def is_asynchronous(recipe: Recipe, ranks: int) -> bool:
    """Whether the ranks step without waiting for each other."""
    return ranks > 1 and any(technique.is_asynchronous for technique in recipe.techniques)
