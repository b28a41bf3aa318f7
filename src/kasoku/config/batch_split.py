"""How a batch is split: over ranks, over the parts that a rank takes one after the other, and into BatchNorm groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSplit:
    """A split of a batch; a group is the images that share BatchNorm statistics.

    Args:
        batch: images of all ranks.
        ranks: their number.
        parts: the parts of a rank's share.
        norm_batch: images of a group; 0: each part is a group of its own.
    """

    batch: int
    ranks: int
    parts: int
    norm_batch: int

    @property
    def images_at_once(self) -> int:
        """The images of a part, which pass through the network together."""
        return self.batch // (self.ranks * self.parts)

    @property
    def images_per_norm(self) -> int:
        """The images of a group."""
        return self.norm_batch or self.images_at_once

    @property
    def groups(self) -> int:
        """The groups of a batch."""
        return self.batch // self.images_per_norm

    @property
    def is_even(self) -> bool:
        """Whether all ranks get equal parts, made of whole groups; or groups that span the same number of ranks."""
        at_once, group = self.images_at_once, self.images_per_norm
        if self.batch % (self.ranks * self.parts):
            return False
        return at_once % group == 0 or (group % at_once == 0 and self.ranks % (group // at_once) == 0)
