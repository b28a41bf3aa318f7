"""Settings found by measuring: the minibatch, the rate, and searches over whole trainings."""

from kasoku.tune.batch_size import minibatch
from kasoku.tune.measurement import BatchSizeResult, Limits, Measurement
from kasoku.tune.strategies import EpochTimeMinimize, GpuUsageMaximize, Strategy, Throughput, TimeToTarget

__all__ = [
    "BatchSizeResult",
    "EpochTimeMinimize",
    "GpuUsageMaximize",
    "Limits",
    "Measurement",
    "Strategy",
    "Throughput",
    "TimeToTarget",
    "minibatch",
]
