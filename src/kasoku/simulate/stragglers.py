"""Stragglers: the expected time of the slowest of many ranks, over the time of the median rank.

Note: the law. A step ends when the slowest rank has computed, and GPUs of one kind differ in speed: their chips, power
limits and cooling differ. So a rank takes the median time times exp(spread * z), where z is normal and constant for the
whole run: a product of many small factors is log-normal, and slow GPUs stay slow from step to step. The spread was
measured on 336 V100 of Longhorn and 219 A100 of Lonestar6, each training a ResNet-50, from the quartiles of their
median iterations as those of a log-normal law (ln(q75/q25)/1.349): 0.0226 and 0.0208. Source: Sinha et al. 2022 (arXiv
2208.11035) and Jain et al. 2024 (arXiv 2408.11919), their published tables (hal-uw/blox-pal, aggregated_data, at
da726cab). The law and its figures were fixed before the published steps that test it were simulated.
"""

import math
from functools import lru_cache

_CELLS = 4000


@lru_cache(maxsize=4096)
def slowest(spread: float, ranks: int) -> float:
    """The expected factor of the slowest of `ranks`; the median rank has 1.

    Maths: the mean of a maximum is the integral of the probability that some rank still computes.
    """
    if spread == 0:
        return 1.0
    low, high = math.exp(-9 * spread), math.exp(9 * spread)
    width = (high - low) / _CELLS
    centres = (low + (i + 0.5) * width for i in range(_CELLS))
    below = (0.5 * math.erfc(-math.log(x) / (spread * math.sqrt(2))) for x in centres)  # the ranks with at most x
    return low + width * sum(1 - fraction**ranks for fraction in below)
