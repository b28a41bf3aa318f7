"""How a number of ranks trains a recipe: which part of the batch each rank takes, and with which techniques."""

import tomllib
from collections.abc import Sequence

import torch

from kasoku.config.recipe import Recipe, dumps
from kasoku.core import Comm, InputError, Technique, say
from kasoku.data import Shares, by_speed
from kasoku.distributed import Overlap, VirtualRanks
from kasoku.distributed.consensus import assert_same_on_all_ranks, version_facts

UNSURE = 0.3  # the fraction of a test batch that `evaluate.views = "crops"` tests on more than one view
TEST_PASSES = {"plain": 1.0, "mirror": 2.0, "crops": 1 + 5 * UNSURE}  # forwards of a test image, by evaluate.views


def check_same(recipe: Recipe, comm: Comm) -> None:
    """Raises InputError on all ranks where they have read different recipes, or run different versions. Collective."""
    if comm.size > 1:  # one rank alone need not read the package's source
        assert_same_on_all_ranks(comm, {"recipe": tomllib.loads(dumps(recipe)), **version_facts()})


def check_share(recipe: Recipe, ranks: int) -> None:
    """Raises InputError where the ranks cannot share the recipe's batch."""
    if not can_share(recipe, ranks):
        parts = f" x {recipe.parts(ranks)} parts" if recipe.parts(ranks) > 1 else ""
        groups = f", in groups of norm_batch={recipe.norm_batch}" if recipe.norm_batch else ""
        advice = f"{most_ranks(recipe, ranks)} could, or choose another batch"
        raise InputError(f"batch={recipe.batch}: {ranks} ranks{parts} cannot share it evenly{groups}; {advice}")


def most_ranks(recipe: Recipe, limit: int) -> int:
    """The largest number of ranks up to `limit` that can share the recipe's batch."""
    return max((n for n in range(2, limit + 1) if can_share(recipe, n)), default=1)


def gpus_for(recipe: Recipe, members: int = 1) -> int:
    """The ranks that train on this machine by default: as many of its GPUs as can be used; 1 without GPUs.

    Ranks share the batch; those of an ensemble share its `members`, and the ranks of a member its batch.
    """
    if recipe.device.kind not in ("auto", "cuda"):
        return 1
    available = torch.cuda.device_count()
    used = available if members >= available else members * most_ranks(recipe, available // members)
    if used < available:
        each = f"{members} members of " if members > 1 else ""
        say(f"{used} of {available} GPUs used: {each}batch={recipe.batch} cannot be shared by more")
    return used


def ranks_of_member(members: int, ranks: int) -> int:
    """The number of ranks that train a member of an ensemble together. Raises InputError if members had unequally many.

    Where there are fewer ranks than members, a rank trains several of them.
    """
    if ranks > members and ranks % members:
        fewer = ranks // members * members
        advice = f"start {fewer} or {fewer + members} ranks, or train {ranks} members"
        raise InputError(f"{members} members on {ranks} ranks: each takes the same number of ranks; {advice}")
    return max(1, ranks // members)


def can_share(recipe: Recipe, ranks: int) -> bool:
    """Whether the ranks get equal shares of the recipe's batch, in its parts and BatchNorm groups."""
    if ranks == 1 or recipe.auto_batch:
        return True
    if recipe.batch % (ranks * recipe.parts(ranks)):
        return False
    at_once, group = recipe.images_at_once(ranks), recipe.images_per_norm(ranks)
    # A part has whole groups; or groups span the same number of ranks.
    return at_once % group == 0 or (group % at_once == 0 and ranks % (group // at_once) == 0)


def part_of(recipe: Recipe, ranks: int) -> int:
    """The images of a part that keep together when other ranks take it: a backward pass, or a BatchNorm group."""
    return max(recipe.images_at_once(ranks), recipe.norm_batch)


def spread(recipe: Recipe, part: int, ranks: int) -> Shares:
    """The batch in whole parts, as evenly as can be. Raises InputError where there are more ranks than parts."""
    least, more = divmod(recipe.batch // part, ranks)
    if not least:
        raise InputError(f"batch={recipe.batch} has {more} parts of {part} images, too few for {ranks} ranks")
    return Shares(tuple(part * (least + (rank < more)) for rank in range(ranks)), part)


def shares_of(recipe: Recipe, speeds: Sequence[float]) -> tuple[int, ...]:
    """The images of a batch that each rank takes; empty for equal shares.

    They follow the ranks' speeds (images a second) if the slowest is more than a tenth slower than the fastest, in
    multiples of `unit_of_shares`; they are equal if the batch has too few of these.
    """
    ranks = len(speeds)
    unit = unit_of_shares(recipe, ranks) if ranks > 1 else 0
    if not unit or recipe.batch % unit or recipe.batch // unit < ranks:
        return ()
    shares = by_speed(recipe.batch, speeds, unit=unit)
    return shares if len(set(shares)) > 1 else ()


def unit_of_shares(recipe: Recipe, ranks: int) -> int:
    """The images that a rank's share is a multiple of: a BatchNorm group, or one image, in each of its parts."""
    return (recipe.norm_batch or 1) * recipe.parts(ranks)


def derived_techniques(recipe: Recipe, ranks: int, *, uneven: bool = False) -> list[Technique]:
    """The techniques that real or virtual ranks need: BatchNorm over groups of images, and an exchange of gradients.

    `uneven`: the ranks take unequal shares of a batch.
    """
    # Without groups the running statistics are each rank's own.
    alone = is_asynchronous(recipe, ranks) and not any(t.averages_gradients for t in recipe.techniques)
    own = ranks == 1 or recipe.device.graphs or uneven or alone
    norm_batch = recipe.norm_batch if own else recipe.images_per_norm(ranks)
    derived: list[Technique] = []
    if norm_batch or recipe.norm_average or (uneven and not recipe.device.graphs):  # Graphs average them itself
        derived.append(VirtualRanks(norm_batch, recipe.norm_average))
    if not any(technique.exchanges_gradients for technique in recipe.techniques):
        # on one rank too, so that several ranks can resume from there
        derived.append(Overlap())
    return derived


def is_asynchronous(recipe: Recipe, ranks: int) -> bool:
    """Whether the ranks step without waiting for each other."""
    return ranks > 1 and any(technique.is_asynchronous for technique in recipe.techniques)
