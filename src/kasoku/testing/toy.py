"""A toy problem on which techniques are tried: a network with dropout and BatchNorm, four batches, the plain loop."""

import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from kasoku.core import Comm, Job, Technique
from kasoku.optim import sgd


class ToyBlock(nn.Module):
    """Convolution, norm, ReLU, dropout."""

    def __init__(self, channels_in: int, channels: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.norm(self.conv(x_NCHW)).relu()))


class ToyNet(nn.Module):
    """Two blocks and a head, for images of 3x8x8 and four classes."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stage = nn.Sequential(ToyBlock(3, 8, norm, dropout), ToyBlock(8, 8, norm, dropout))
            self.head = nn.Linear(8 * 16, 4)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return cast(Tensor, self.head(nn.functional.avg_pool2d(self.stage(x_NCHW), 2).flatten(1)))


class ToyBatches:
    """Four batches, of which each rank has its share. The class of an image is the quarter of it that is bright."""

    def __init__(self, *, rank: int = 0, size: int = 1, batch: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.position = 0
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


def toy_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return sgd(model, lr=0.1, momentum=0.9, weight_decay=1e-3)


def toy_job(
    *techniques: Technique,
    model: nn.Module | None = None,
    optimizer: Any = toy_optimizer,
    accumulate: int = 1,
    comm: Comm | None = None,
) -> Job:
    """A job on the toy problem with these techniques."""
    loader = ToyBatches(rank=comm.rank, size=comm.size) if comm else ToyBatches()
    return Job(model or ToyNet(), optimizer, loader=loader, comm=comm, accumulate=accumulate).apply(*techniques)


def train_toy(job: Job, steps: int, *, each: Callable[[], object] = lambda: None) -> list[float]:
    """The plain loop for so many updates; calls each() after every update, drains, and returns the losses."""
    losses: list[float] = []
    micro, end = 0, job.steps + steps
    while job.steps < end:
        for x_NCHW, y_N in job.loader:
            loss = job.loss(job.model(x_NCHW), y_N)
            (loss / job.accumulate).backward()  # type: ignore[no-untyped-call]
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
    """A copy of the model's parameters and buffers."""
    return {name: x.detach().clone() for name, x in job.model.state_dict().items()}


def evaluated(job: Job) -> Tensor:
    """The outputs of the model, as it is evaluated, for the first batch."""
    with job.evaluation() as model:
        logits_NK: Tensor = model(job.plain_loader.batches[0][0])
        return logits_NK


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal, bit for bit."""
    assert_near(a, b, 0.0)


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    """Equal up to a tolerance, relative for large numbers and absolute for small ones."""
    torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def through_a_file(state: Any) -> Any:
    """The state, saved by torch.save and read back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(first: Job, second: Job) -> None:
    """Gives the second job the weights and the state of the first one, through a file."""
    saved = through_a_file({"model": first.model.state_dict(), "job": first.state_dict()})
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["job"])
