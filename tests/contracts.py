"""The rows of kasoku's own techniques for the contracts of kasoku.testing, and the toy problem for other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kasoku.core import Constant, Linear
from kasoku.data import Mix
from kasoku.device import Autocast, ChannelsLast, Compile, CpuKernels, LossScale, Seeded
from kasoku.distributed import AllReduce, Asynchronous, Graded, Overlap, Recalibrate, Replay, VirtualRanks
from kasoku.memory import SavedMemory
from kasoku.optim import EMA, Clip, Rate
from kasoku.report import Timed
from kasoku.testing import Row
from kasoku.testing.toy import ToyBatches as Batches
from kasoku.testing.toy import ToyNet as Net
from kasoku.testing.toy import assert_same, go_on, through_a_file, weights
from kasoku.testing.toy import evaluated as judged
from kasoku.testing.toy import toy_job as make
from kasoku.testing.toy import toy_optimizer as rule
from kasoku.testing.toy import train_toy as train
from kasoku.tracking import Track

__all__ = [
    "NO_ROW",
    "ROWS",
    "Batches",
    "Net",
    "assert_same",
    "go_on",
    "judged",
    "make",
    "one_thread",
    "rule",
    "through_a_file",
    "train",
    "weights",
]

ROWS = [
    Row(AllReduce(), neutral=AllReduce()),
    Row(Asynchronous(max_staleness=0), neutral=Asynchronous()),  # what does not wait: distributed/test_asynchronous.py
    Row(Autocast("bf16"), tolerance=2e-2),
    Row(ChannelsLast()),
    Row(Clip(norm=0.5), neutral=Clip(norm=float("inf"))),
    Row(Compile(backend="aot_eager"), neutral=Compile(backend="eager")),
    Row(CpuKernels()),
    Row(EMA(decay=0.8, every=2), neutral=EMA(decay=0.0, warmup=False)),
    Row(LossScale(start=2.0**140, every=3), neutral=LossScale(start=1024.0, every=2), steps=40),
    Row(Mix(0.1, 0.1), neutral=Mix(0.0, 0.0), tolerance=2e-2, steps=60),  # each rank mixes its own share of a batch
    Row(Overlap(Graded(first=1, power=1.5, least_bytes=1000)), neutral=Overlap()),
    Row(Rate(Linear(epochs=12, warmup=1)), neutral=Rate(Constant()), owns_rate=True),
    Row(Recalibrate(images=32)),
    Row(Replay(every=2), neutral=Replay(every=1)),
    Row(SavedMemory(factor=1, show=False), neutral=SavedMemory(factor=1, lossless=True, show=False)),
    Row(Seeded(seed=3), neutral=Seeded(seed=3)),
    Row(Timed(), neutral=Timed()),
    Row(Track("tensorboard"), neutral=Track("tensorboard")),
    Row(VirtualRanks(norm_batch=8, average=0.5), neutral=VirtualRanks()),
]
NO_ROW = {
    "Augment": "needs images, not tensors: tests/data/test_augment.py",
    "Decoding": "needs CUDA and image files: tests/data/test_nvjpeg.py",
    "Emulate": "needs a virtual clock: tests/distributed/test_virtual_clock.py",
    "Graphs": "needs CUDA or its stand-in: tests/device/test_graphs.py",
    "GrowBatch": "needs a loader of kasoku.data: tests/data/test_grow.py",
    "LowResolution": "needs a network that takes any size: tests/data/test_resolution.py",
    "Pretrained": "needs a file of weights: tests/models",
    "Shares": "needs a loader of kasoku.data and ranks: tests/data/test_shares.py",
    "SkipEasy": "needs a loader of kasoku.data: tests/data/test_skip_easy.py",
    "Transforms": "needs images, not tensors: tests/data/test_transforms.py",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
