"""How ranks train together."""

from kasoku.distributed.async_sgd.asynchronous import Asynchronous
from kasoku.distributed.batchnorm.precise_bn import Recalibrate
from kasoku.distributed.batchnorm.virtual_ranks import VirtualRanks
from kasoku.distributed.ddp.all_reduce import AllReduce
from kasoku.distributed.ddp.bucket_plan import Fixed, Graded, OneBucket, PerLayer, Planned, Policy
from kasoku.distributed.ddp.compression import Hierarchical, LowRank, Mean, Reducer, Wire
from kasoku.distributed.ddp.overlap import Overlap
from kasoku.distributed.replay import Replay
from kasoku.distributed.torch_comm import TorchComm

__all__ = [
    "AllReduce", "Asynchronous", "Fixed", "Graded", "Hierarchical", "LowRank", "Mean", "OneBucket", "Overlap",
    "PerLayer", "Planned", "Policy", "Recalibrate", "Reducer", "Replay", "TorchComm", "VirtualRanks", "Wire",
]  # fmt: skip
