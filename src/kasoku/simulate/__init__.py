"""Clusters that nobody has on a desk: what a training step takes on them, before anything is rented."""

from kasoku.simulate.allreduce import ALGORITHMS
from kasoku.simulate.cluster import Cluster, load
from kasoku.simulate.compute import Network, network, profile_of, profiled, remarks
from kasoku.simulate.jitter import Jitter
from kasoku.simulate.step import WITHOUT, Sharing, Simulator, Step, timeline

__all__ = [
    "ALGORITHMS",
    "WITHOUT",
    "Cluster",
    "Jitter",
    "Network",
    "Sharing",
    "Simulator",
    "Step",
    "load",
    "network",
    "profile_of",
    "profiled",
    "remarks",
    "timeline",
]
