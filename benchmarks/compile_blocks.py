"""What does a training step take with blocks compiled by inductor, compared with eager blocks?

Command: python benchmarks/compile_blocks.py
Result: records/.

Each network takes steps of both sides in turn, on equal batches, in the precision that `kasoku train` chooses. The
first steps, which compile, do not count; their seconds stand beside the figure.

Why: inductor fuses element-wise layers into one pass over memory, but its convolutions are those of eager blocks, and
its other kernels may be slower than theirs on a CPU. `device.compile` is off by default unless this shows a gain.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from common import finish, parse, spread
from kasoku.core import Job
from kasoku.device import Compile, Device, choose
from kasoku.models import alexnet, cifar_resnet18, cifar_vgg16_bn, cifarnet, cnn11, resnet50
from kasoku.optim import sgd

# name: network, side and number of its images
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "digits": (lambda: cifarnet(10, 1, widths=(32, 64)), 8, 64),
    "cifarnet": (cifarnet, 32, 128),
    "resnet18": (cifar_resnet18, 32, 32),
    "vgg16": (cifar_vgg16_bn, 32, 32),
    "cnn11": (lambda: cnn11(10), 224, 8),
    "alexnet": (lambda: alexnet(10), 224, 16),
    "resnet50": (lambda: resnet50(10), 224, 4),
}
RECORDED = ("digits",)  # networks with a first line in records/; add those that a whole run has measured
CLAIMS = {f"compile/{name}/over_eager": (f"{name}_over_eager", f"{name}_compile_s") for name in RECORDED}


def step_of(build: Callable[[], nn.Module], side: int, images: int, *more: Compile) -> Callable[[], None]:
    """A training step of a new network."""
    chosen = choose(Device())
    torch.manual_seed(0)
    model = build().to(chosen.device)
    x = torch.randn(images, next(model.parameters()).shape[1], side, side, device=chosen.device)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(10, (images,), device=chosen.device)
    job = Job(model, lambda m: sgd(m, lr=1e-3), loader=[(x, y)]).apply(*chosen.techniques, *more)

    def step() -> None:
        job.backward(job.loss(job.model(x), y))
        job.optimizer.step()
        job.optimizer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="steps of each side")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    arguments = parse(parser)
    figures: dict[str, object] = {}
    for name in arguments.networks:
        torch.compiler.reset()
        eager, compiled = step_of(*NETWORKS[name]), step_of(*NETWORKS[name], Compile())
        seconds(eager)
        figures[f"{name}_compile_s"] = round(seconds(compiled), 2)
        for step in (eager, compiled):
            seconds(step)
        pairs = [(seconds(eager), seconds(compiled)) for _ in range(arguments.pairs)]
        figures[f"{name}_over_eager"] = spread([b / a for a, b in pairs])
        figures[f"{name}_eager_ms"] = 1e3 * statistics.median(a for a, _ in pairs)
        print(f"{name}: {figures[f'{name}_over_eager']}, {figures[f'{name}_eager_ms']:.4g} ms eager", flush=True)
    claims = {claim: keys for claim, keys in CLAIMS.items() if keys[0] in figures}
    finish("compile_blocks", {"pairs": arguments.pairs}, figures, claims)


if __name__ == "__main__":
    main()
