"""What benchmarks share: options, the machine's yardstick (a bare ResNet-9), spreads, and the JSON line at the end."""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import records
from kasoku.report import environment

RUNS = Path("runs") / "records.jsonl"
_shared = {"record": False}  # options that every benchmark has


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed command line, with --record beside the benchmark's own options."""
    parser.add_argument("--record", action="store_true", help="append the figures to records/ (whole runs only)")
    arguments = parser.parse_args()
    _shared["record"] = arguments.record
    return arguments


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, maximum and number of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def finish(
    question: str,
    parameters: dict[str, object],
    figures: dict[str, object],
    claims: Mapping[str, str | Sequence[str]] | None = None,
) -> None:
    """Prints the ONE JSON line that ends a benchmark, and appends it to runs/records.jsonl.

    With --record it also appends a measurement of each of `claims`, which name keys of `figures` (`records.append`).
    """
    where = environment()
    machine = {"machine": where["machine"], "commit": where["commit"], "torch": torch.__version__}
    line = json.dumps({"benchmark": question, **figures, "parameters": parameters, **machine})
    RUNS.parent.mkdir(exist_ok=True)
    with RUNS.open("a") as stream:
        stream.write(line + "\n")
    print(line)
    if _shared["record"]:
        recorded = records.append(claims or {}, figures, sys.argv, records.machine_key())
        print(f"recorded {len(recorded)} measurements; `make records` writes RECORDS.md", file=sys.stderr)


def seconds_per_call(f: Callable[[], object], *, calls: int, warm: int = 1) -> list[float]:
    """Wall seconds of each of `calls` calls, after `warm` that do not count; waits for a GPU where there is one."""
    seconds = []
    for i in range(warm + calls):
        start = time.perf_counter()
        f()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= warm:
            seconds.append(time.perf_counter() - start)
    return seconds


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the layers make of x."""
        return x + self.layers(x)


def resnet9(num_classes: int = 10) -> nn.Module:
    """The ResNet-9 of DAWNBench's CIFAR-10 entries (6.6 M parameters): the yardstick of a machine."""

    def block(channels_in: int, channels: int, pool: bool = False) -> list[nn.Module]:
        layers = [
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        return [*layers, nn.MaxPool2d(2)] if pool else layers

    return nn.Sequential(
        *block(3, 64),
        *block(64, 128, pool=True),
        _Residual(*block(128, 128), *block(128, 128)),
        *block(128, 256, pool=True),
        *block(256, 512, pool=True),
        _Residual(*block(512, 512), *block(512, 512)),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, num_classes, bias=False),
    )


def resnet9_rate(*, batch: int = 128, steps: int = 20, warm: int = 5) -> float:
    """Images/s of the bare ResNet-9 in training: bf16 autocast, channels_last, SGD, malloc tuned; median over steps.

    Of a process of its own. The allocator gets the three settings the published 322 images/s were measured with.
    """
    libc = ctypes.CDLL(None)
    for setting, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 * 2**20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        libc.mallopt(setting, value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet9().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            out = model(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return batch / statistics.median(seconds_per_call(step, calls=steps, warm=warm))
