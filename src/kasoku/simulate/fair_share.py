"""Links that flows share: what each flow gets, and how long a set of them takes.

Note: max-min fair. All flows that are under way are given more and more alike until a link is full; its flows keep what
they have, the others go on. So no link ever carries more than its rate, and no flow could be given more without
taking from one that has no more than it. That is what fair queueing and congestion control come to over a
millisecond; a single packet's fate is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kasoku.core import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Flows:
    """Transfers that go on at once.

    Args:
        routes: of each flow the links that it crosses (indices).
        sizes: its bytes.
    """

    def __init__(self, routes: Sequence[Sequence[int]], sizes: Sequence[float]) -> None:
        longest = max((len(route) for route in routes), default=0)
        self.links: Ints = np.full((len(routes), max(1, longest)), -1, dtype=np.int64)
        for i, route in enumerate(routes):
            self.links[i, : len(route)] = route
        self.sizes: Floats = np.asarray(sizes, dtype=np.float64)


def rates(links: Ints, capacity: Floats) -> Floats:
    """The max-min fair rate of each flow in bytes/s; infinite where it crosses no link. `links`: rows, padded by -1."""
    if np.isnan(capacity).any():  # no link would ever be full
        raise InputError("a link's rate is no number: GB/s above 0 are wanted")
    left = capacity.copy()
    rate = np.full(len(links), np.inf)
    open_ = (links >= 0).any(axis=1)
    while open_.any():
        crossed = links[open_]
        count = np.bincount(crossed[crossed >= 0], minlength=len(capacity))
        share = np.full(len(capacity), np.inf)
        np.divide(left, count, out=share, where=count > 0)
        least = share.min()
        full = share <= least * (1 + 1e-12)
        stopped = open_ & (full[links] & (links >= 0)).any(axis=1)
        rate[stopped] = least
        taken = links[stopped]
        left -= least * np.bincount(taken[taken >= 0], minlength=len(capacity))
        np.maximum(left, 0.0, out=left)
        open_ &= ~stopped
    return rate


def seconds(flows: Flows, capacity: Floats) -> float:
    """Until the last of the flows has arrived; what one leaves free the others take."""
    now, sizes, links = 0.0, flows.sizes.copy(), flows.links
    while len(sizes):
        rate = rates(links, capacity)
        span = float((sizes / rate).min())
        now += span
        sizes = sizes - rate * span
        going = sizes > 1e-9 * flows.sizes.max()
        sizes, links = sizes[going], links[going]
    return now
