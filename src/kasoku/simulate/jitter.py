"""What waiting for the slowest costs: the expected maximum over ranks of what they take, as a factor.

Note: the law, and why this one. A step ends when the slowest rank has computed, and GPUs of one kind are not equally
fast: chips, their power limits and their cooling differ. So the time of a rank is that of the middle one times
exp(spread * z), z normal and its own for the whole run: a product of many small factors is log-normal, and slow GPUs
stay slow from step to step. The spread is measured: 336 V100 of Longhorn and 219 A100 of Lonestar6, each training a
ResNet-50; the ratio of the quartiles of the median iteration of each, as that of a log-normal law (ln(q75/q25)/1.349):
0.0226 and 0.0208. Source: Sinha et al. 2022 (arXiv 2208.11035) and Jain et al. 2024 (arXiv 2408.11919), their
published tables (hal-uw/blox-pal, aggregated_data, at da726cab). The law was fixed, with these figures, before any of
the published steps that it is scored on was simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

_CELLS = 4000


@dataclass(frozen=True)
class Jitter:
    """How ranks differ: a log-normal factor."""

    spread: float = 0.0

    def slowest(self, ranks: int) -> float:
        """The expected factor of the slowest of so many; 1 is the middle one."""
        return _slowest(self.spread, ranks)


@lru_cache(maxsize=4096)
def _slowest(spread: float, ranks: int) -> float:
    """The mean of a maximum: from where all are slower, the integral of the chance that some rank still computes."""
    if spread == 0:
        return 1.0
    low, high = math.exp(-9 * spread), math.exp(9 * spread)
    width = (high - low) / _CELLS
    waiting = 0.0
    for i in range(_CELLS):
        x = low + (i + 0.5) * width
        waiting += 1 - _below(x, spread) ** ranks
    return low + waiting * width


def _below(x: float, spread: float) -> float:
    """The share of ranks that take at most x."""
    return 0.5 * math.erfc(-math.log(x) / (spread * math.sqrt(2)))
