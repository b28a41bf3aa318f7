"""Settings chosen by measuring: the batch size, and searches over whole trainings."""

from kasoku.tune.batch_size import tune_batch_size
from kasoku.tune.measurement import BatchSizeResult, Measurement, Needs, SizeSearch
from kasoku.tune.strategies import EpochTimeMinimize, GpuUsageMaximize, Strategy, Throughput, TimeToTarget

__all__ = [
    "BatchSizeResult", "EpochTimeMinimize", "GpuUsageMaximize", "Measurement", "Needs", "SizeSearch", "Strategy",
    "Throughput", "TimeToTarget", "tune_batch_size",
]  # fmt: skip
