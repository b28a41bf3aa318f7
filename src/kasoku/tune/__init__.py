"""Settings found by measuring: the minibatch, the rate, and searches over whole trainings."""

from kasoku.tune.minibatch import minibatch
from kasoku.tune.sample import Found, Limits, Sample
from kasoku.tune.strategies import EpochTimeMinimize, GpuUsageMaximize, Strategy, Throughput, TimeToTarget

__all__ = [
    "EpochTimeMinimize",
    "Found",
    "GpuUsageMaximize",
    "Limits",
    "Sample",
    "Strategy",
    "Throughput",
    "TimeToTarget",
    "minibatch",
]
