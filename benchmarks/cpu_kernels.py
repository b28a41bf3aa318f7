"""How much time do kasoku's C kernels save in a step on this CPU?

    python benchmarks/cpu_kernels.py [--rounds N] [--networks NAME ...]

Each of NETWORKS makes steps in bfloat16 with channels last, with `CpuKernels` and without it: interleaved, on the same
images, each side with its own weights. step_over_torch: the time of a step with it over that without it, by network;
median over rounds with least and most. ms: of the steps with it and without. worst: the largest of the ratios.
dw_over_torch: the same for the weight gradients of the first network's convolutions alone.
Why it matters: convolutions are most of a training on a CPU, and a third of them computes weight gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from common import finish, parse, spread
from kasoku.core import Job
from kasoku.device import CpuKernels, Device, choose, cpu_kernels
from kasoku.models import cifar_resnet18, cifarnet, resnet18, vgg16
from kasoku.optim import sgd

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # with the images of a step and their side
    "cifarnet": (partial(cifarnet, 10, 3), 500, 32),
    "cifarnet at 24": (partial(cifarnet, 10, 3), 500, 24),
    "cifar_resnet18": (partial(cifar_resnet18, 10), 128, 32),
    "resnet18": (partial(resnet18, 10), 64, 128),
    "vgg16": (partial(vgg16, 10), 16, 128),
}
CLAIMS = {
    "cpu_kernels/step_over_torch": ("worst", "step_over_torch", "ms"),
    "cpu_kernels/dw_over_torch": ("dw_over_torch", "dw_ms"),
}


def job_of(network: Callable[[], nn.Module], *, kernels: bool) -> Job:
    """A job as `kasoku train` would make it on this machine, with the C kernels or without."""
    chosen = choose(Device(kind="cpu", precision="bf16", kernels=kernels))
    torch.manual_seed(0)
    return Job(network(), partial(sgd, lr=0.01, momentum=0.9)).apply(*chosen.techniques)


def step_s(job: Job, x_NCHW: Tensor, y_N: Tensor) -> float:
    """The seconds of one step."""
    start = time.perf_counter()
    job.backward(job.loss(job.model(x_NCHW), y_N))
    job.optimizer.step()
    job.optimizer.zero_grad()
    return time.perf_counter() - start


def steps(network: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of a step on both sides, in turns, after one of each."""
    build, images, side = NETWORKS[network]
    x_NCHW = torch.randn(images, 3, side, side).to(memory_format=torch.channels_last)
    y_N = torch.randint(0, 10, (images,))
    jobs = {name: job_of(build, kernels=name == "ours") for name in ("torch", "ours")}
    seconds = {name: [step_s(job, x_NCHW, y_N) for _ in range(1)] for name, job in jobs.items()}
    for _ in range(rounds):
        for name, job in jobs.items():
            seconds[name].append(step_s(job, x_NCHW, y_N))
    return {name: each[1:] for name, each in seconds.items()}


def weight_gradients(rounds: int) -> dict[str, list[float]]:
    """The seconds of all weight gradients of cifarnet on both sides, in turns."""
    build, images, side = NETWORKS["cifarnet"]
    seen: list[tuple[nn.Conv2d, Tensor, Tensor]] = []

    def note(layer: nn.Conv2d, args: tuple[Tensor], out: Tensor) -> None:
        if layer.weight.requires_grad:
            maps = (x.detach().bfloat16().contiguous(memory_format=torch.channels_last) for x in (args[0], out))
            seen.append((layer, *maps))

    model = build()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(note)
    with torch.no_grad():
        model(torch.randn(images, 3, side, side))

    def by_torch(layer: nn.Conv2d, x_NCHW: Tensor, dy_NCHW: Tensor) -> None:
        weight = layer.weight.detach().bfloat16().contiguous(memory_format=torch.channels_last)
        window = (layer.stride, layer.padding, layer.dilation)
        mask = [False, True, False]
        torch.ops.aten.convolution_backward(dy_NCHW, x_NCHW, weight, None, *window, False, (0, 0), 1, mask)

    def ours(layer: nn.Conv2d, x_NCHW: Tensor, dy_NCHW: Tensor) -> None:
        cpu_kernels.weight_gradient(x_NCHW, dy_NCHW, layer)

    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    for _ in range(1 + rounds):
        for name, f in (("torch", by_torch), ("ours", ours)):
            start = time.perf_counter()
            for each in seen:
                f(*each)
            seconds[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in seconds.items()}


def main() -> None:
    """Measures all networks, and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each side")
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="some of them")
    arguments = parse(parser)
    if not cpu_kernels.pays(torch.get_num_threads()):
        raise SystemExit(f"{CpuKernels.__name__} does nothing on this processor: no AVX-512 bf16, or AMX")
    ratios, ms = {}, {}
    for network in arguments.networks:
        seconds = steps(network, arguments.rounds)
        ratios[network] = spread([a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)])
        ms[network] = {name: round(1e3 * statistics.median(each), 1) for name, each in seconds.items()}
        print(f"{network}: {ratios[network]['median']:.3f} of torch's step, {ms[network]} ms")
    gradients = weight_gradients(arguments.rounds)
    figures = {
        "worst": max(ratios.values(), key=lambda ratio: ratio["median"]),
        "step_over_torch": {name: round(ratio["median"], 4) for name, ratio in ratios.items()},
        "ms": ms,
        "dw_over_torch": spread([a / b for a, b in zip(gradients["ours"], gradients["torch"], strict=True)]),
        "dw_ms": {name: round(1e3 * statistics.median(each), 1) for name, each in gradients.items()},
    }
    parameters = {"rounds": arguments.rounds, "networks": arguments.networks}
    whole = arguments.networks == [*NETWORKS]
    finish("a step with C kernels over torch's", parameters, figures, CLAIMS if whole else {})


if __name__ == "__main__":
    main()
