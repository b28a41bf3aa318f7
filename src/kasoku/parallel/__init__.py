"""How ranks train together."""

from kasoku.parallel.barrier import AllReduce
from kasoku.parallel.recalibrate import Recalibrate
from kasoku.parallel.torchcomm import TorchComm
from kasoku.parallel.virtual import VirtualRanks

__all__ = ["AllReduce", "Recalibrate", "TorchComm", "VirtualRanks"]
