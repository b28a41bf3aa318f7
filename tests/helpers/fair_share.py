"""Max-min fair flows over links, flow by flow: what the simulator's busiest link is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kasoku.simulate import Cluster

Floats = npt.NDArray[np.float64]


def rates(links: npt.NDArray[np.int64], capacity: Floats) -> Floats:
    """The max-min fair rate of each flow in bytes/s; infinite where it crosses no link. `links`: rows, padded by -1."""
    left = capacity.copy()
    rate = np.full(len(links), np.inf)
    open_ = (links >= 0).any(axis=1)
    while open_.any():
        crossed = links[open_]
        count = np.bincount(crossed[crossed >= 0], minlength=len(capacity))
        share = np.where(count > 0, left / np.maximum(count, 1), np.inf)
        least = share.min()
        full = share <= least * (1 + 1e-12)
        stopped = open_ & (full[links] & (links >= 0)).any(axis=1)
        rate[stopped] = least
        taken = links[stopped]
        left -= least * np.bincount(taken[taken >= 0], minlength=len(capacity))
        np.maximum(left, 0.0, out=left)
        open_ &= ~stopped
    return rate


def seconds(cluster: Cluster, flows: Sequence[tuple[int, int, float]]) -> float:
    """Seconds until the last of (from, to, bytes) has ended."""
    routes = [cluster.route(start, stop) for start, stop, _ in flows]
    rate_of = {(kind, number): rate for route in routes for kind, number, rate in route}
    index = {link: i for i, link in enumerate(rate_of)}
    crossed = [[index[kind, number] for kind, number, _ in route] for route in routes]
    return routed_s(crossed, [size for *_, size in flows], np.array(list(rate_of.values())))


def routed_s(routes: Sequence[Sequence[int]], sizes: Sequence[float], capacity: Floats) -> float:
    """Seconds until the last flow has ended; a flow that ends leaves its share to the remaining ones."""
    links = np.full((len(routes), max(map(len, routes), default=0)), -1, dtype=np.int64)
    for i, route in enumerate(routes):
        links[i, : len(route)] = route
    now, left = 0.0, np.asarray(sizes, dtype=np.float64)
    negligible = 1e-9 * max(sizes, default=0.0)
    while len(left):
        rate = rates(links, capacity)
        span = float((left / rate).min())
        now += span
        left = left - rate * span
        going = left > negligible
        left, links = left[going], links[going]
    return now
