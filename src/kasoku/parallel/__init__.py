"""How ranks train together."""

from kasoku.parallel.asynchronous import Asynchronous
from kasoku.parallel.barrier import AllReduce
from kasoku.parallel.buckets import Fixed, Graded, Layer, OneGroup, Planned, Policy
from kasoku.parallel.overlap import Overlap
from kasoku.parallel.recalibrate import Recalibrate
from kasoku.parallel.reduce import Hierarchical, LowRank, Mean, Reducer, Wire
from kasoku.parallel.shards import Remedies
from kasoku.parallel.torchcomm import TorchComm
from kasoku.parallel.virtual import VirtualRanks

__all__ = [
    "AllReduce",
    "Asynchronous",
    "Fixed",
    "Graded",
    "Hierarchical",
    "Layer",
    "LowRank",
    "Mean",
    "OneGroup",
    "Overlap",
    "Planned",
    "Policy",
    "Recalibrate",
    "Reducer",
    "Remedies",
    "TorchComm",
    "VirtualRanks",
    "Wire",
]
