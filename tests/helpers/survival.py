"""What tests of dead ranks share: a model whose updates are known, files as signals, and how long a death may take."""

import time
from pathlib import Path

import torch
from torch import Tensor, nn

N = 4099
PROMISE_S, LIMIT_S = 10.0, 60.0


class Counting(nn.Module):
    """Its gradient is what it is given: so updates are known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(5))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1.0
        return (self.w * x).sum() + (self.v * x[:5]).sum()


def wait_for(file: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < until, file.name
        time.sleep(0.01)
