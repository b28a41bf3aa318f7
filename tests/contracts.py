"""What every technique must hold, one row each: add yours to ROWS and run tests/test_contracts.py."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kasoku.core import Comm, Constant, Job, Linear, Technique
from kasoku.data import Mix
from kasoku.device import Autocast, ChannelsLast, Compile, LossScale, Seeded
from kasoku.distributed import AllReduce, Asynchronous, Graded, Overlap, Recalibrate, VirtualRanks
from kasoku.memory import SavedMemory
from kasoku.optim import EMA, Clip, Lookahead, Rate, sgd
from kasoku.report import Timed


@dataclass(frozen=True)
class Row:
    """One technique and what it claims.

    Args:
        technique: a setting that does something.
        neutral: a setting that must change nothing, bit for bit; None: it has none.
        owns_rate: it sets the learning rate itself, so no scheduler beside it.
        tolerance: how near many ranks come to one rank on the same global batch.
        compiles: it works together with Compile.
        steps: to learn the toy problem.
    """

    technique: Technique
    neutral: Technique | None = None
    owns_rate: bool = False
    tolerance: float = 1e-6
    compiles: bool = True
    steps: int = 24

    @property
    def name(self) -> str:
        return type(self.technique).__name__


ROWS = [
    Row(AllReduce(), neutral=AllReduce()),
    Row(Asynchronous(max_staleness=0), neutral=Asynchronous()),  # what does not wait: parallel/test_asynchronous.py
    Row(Autocast("bf16"), tolerance=2e-2),
    Row(ChannelsLast()),
    Row(Clip(norm=0.5), neutral=Clip(norm=float("inf"))),
    Row(Compile(backend="aot_eager"), neutral=Compile(backend="eager"), compiles=False),
    Row(EMA(decay=0.8, every=2), neutral=EMA(decay=0.0, warmup=False)),
    Row(Lookahead(every=2, decay=0.5), neutral=Lookahead(every=2, decay=0.0)),
    Row(LossScale(start=2.0**140, every=3), neutral=LossScale(start=1024.0, every=2), steps=40),
    Row(Mix(0.1, 0.1), neutral=Mix(0.0, 0.0), tolerance=2e-2, steps=60),  # each rank mixes its own share of a batch
    Row(Overlap(Graded(first=1, power=1.5, least_bytes=1000)), neutral=Overlap()),
    Row(Rate(Linear(epochs=12, warmup=1)), neutral=Rate(Constant()), owns_rate=True),
    Row(Recalibrate(images=32)),
    Row(SavedMemory(factor=1, show=False), neutral=SavedMemory(factor=1, lossless=True, show=False), compiles=False),
    Row(Seeded(seed=3), neutral=Seeded(seed=3)),
    Row(Timed(), neutral=Timed()),
    Row(VirtualRanks(norm_batch=8, average=0.5), neutral=VirtualRanks()),
]
NO_ROW = {
    "Augment": "needs images, not tensors: tests/data/test_augment.py",
    "Decoding": "needs CUDA and image files: tests/data/test_nvjpeg.py",
    "Emulate": "needs a virtual clock: tests/parallel/test_virtual_clock.py",
    "Graphs": "needs CUDA: tests/device/test_techniques.py",
    "GrowBatch": "needs a loader of kasoku.data: tests/data/test_grow.py",
    "LowResolution": "needs a network that takes any size: tests/data/test_resolution.py",
    "Pretrained": "needs a file of weights: tests/models",
    "Shares": "needs a loader of kasoku.data and ranks: tests/data/test_shares.py",
    "RandAugment": "needs images, not tensors: tests/data/test_randaugment.py",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """Convolution, norm, ReLU, dropout."""

    def __init__(self, channels_in: int, channels: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.dropout(self.norm(self.conv(x_NCHW)).relu())


class Net(nn.Module):
    """Two blocks and a head, for images of 3x8x8 and four classes."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stage = nn.Sequential(Block(3, 8, norm, dropout), Block(8, 8, norm, dropout))
            self.head = nn.Linear(8 * 16, 4)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.head(nn.functional.avg_pool2d(self.stage(x_NCHW), 2).flatten(1))


class Batches:
    """Four batches of a toy problem a class of which is a bright quarter of the image; knows where it stands."""

    def __init__(self, *, rank: int = 0, size: int = 1, batch: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches, self.position = [], 0
        for _ in range(4):
            y_N = torch.randint(4, (batch,), generator=generator)
            x_NCHW = torch.randn(batch, 3, 8, 8, generator=generator)
            for x_CHW, y in zip(x_NCHW, y_N.tolist(), strict=True):
                x_CHW[:, 4 * (y // 2) :, 4 * (y % 2) :][:, :4, :4] += 1.0
            self.batches.append((x_NCHW[rank::size], y_N[rank::size]))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.position, len(self)):
            self.position = i + 1
            yield self.batches[i]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def rule(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.1, momentum=0.9, weight_decay=1e-3)


def make(
    *techniques: Technique,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = rule,
    accumulate: int = 1,
    comm: Comm | None = None,
) -> Job:
    """A job on the toy problem; each rank takes its share of every batch."""
    loader = Batches(rank=comm.rank, size=comm.size) if comm else Batches()
    job = Job(model or Net(), optimizer, loader=loader, comm=comm, accumulate=accumulate)
    return job.apply(*techniques)


def train(job: Job, steps: int, *, each: Callable[[], object] = lambda: None) -> list[float]:
    """The plain loop for so many updates; calls each() after every update. Returns the losses."""
    losses: list[float] = []
    micro, end = 0, job.steps + steps
    while job.steps < end:
        for x_NCHW, y_N in job.loader:
            loss = job.loss(job.model(x_NCHW), y_N)
            (loss / job.accumulate).backward()
            losses.append(loss.item())
            micro += 1
            if micro == job.accumulate:
                micro = 0
                job.optimizer.step()
                job.optimizer.zero_grad()
                each()
                if job.steps == end:
                    break
    job.drain()
    return losses


def weights(job: Job) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in job.model.state_dict().items()}


def judged(job: Job) -> Tensor:
    """The outputs of the model as it is evaluated."""
    with job.evaluation() as model:
        return model(job.loader.plain.batches[0][0] if hasattr(job.loader, "plain") else job.loader.batches[0][0])


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal, bit for bit."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), f"{name} differs by {(x - b[name]).abs().max()}"


def through_a_file(state: Any) -> Any:
    """What comes back from disk."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
