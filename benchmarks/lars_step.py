"""What does a step of LARS cost over torch's fused SGD, and over LARS as it is usually written?

Command: python benchmarks/lars_step.py [--training [--batch N] [--side N]]
Result: records/.

On ResNet-50's 161 tensors (channels_last, as in training), all sides on the same weights and gradients, one step of
each in turn. Naive is the published loop over layers that reads each layer's norms to the host.

Why: fused SGD reads w, g, v and writes w, v, five passes over memory; LARS must know two norms before, which is two
passes more (1.4 x) unless the layer stays in the cache between the norms and the update. [000] claims 1 for its
batched LARS on GPUs (Fig. 7). On CUDA the time is the device's own with the host ahead of it, as in training; the
host's stands beside it. Launches are counted on Triton's path, in its interpreter where there is no GPU, for one and
two networks.

--training: images/s of whole training steps (forward, backward, update) with each rule, as Fig. 7 has them for one GPU.
The smaller the batch, the more of a step is the update: [000] has 40 images a GPU. ours_over_sgd and naive_over_sgd are
medians of the ratios of images/s of steps in turn.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common import finish, parse, seconds_per_call, spread
from kasoku.models import resnet50
from kasoku.optim import LARS, lars

LR, DECAY, MOMENTUM = 1e-3, 5e-5, 0.9  # small, so that a thousand steps leave the weights finite
COPIES, WARM = 10, 3
CLAIMS = {
    "lars/over_fused_sgd": ("ours_over_fused_sgd", "ms", "bound_ratio_without_cache", "launches_161", "launches_322"),
    "lars/naive_over_ours": "naive_over_ours",
}
AHEAD_CYCLES = 20_000_000  # about 10 ms
ours = sys.modules["kasoku.optim.lars.lars"]  # the module; kasoku.optim.lars is the function


class Naive(torch.optim.Optimizer):
    """The loop over layers, as published implementations have it."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"eta": 1e-3, "eps": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                decay, trust, g = group["weight_decay"], 1.0, p.grad
                if group["layerwise"]:
                    w_norm, g_norm = torch.norm(p), torch.norm(g)
                    if w_norm > 0 and g_norm > 0:
                        trust = (group["eta"] * w_norm / (g_norm + decay * w_norm + group["eps"])).item()
                g = g.add(p, alpha=decay) if decay else g
                if "v" not in self.state[p]:
                    self.state[p]["v"] = torch.zeros_like(p)
                v = self.state[p]["v"].mul_(MOMENTUM).add_(g, alpha=LR * trust)
                p.add_(v, alpha=-1)


def network(copies: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList(resnet50() for _ in range(copies)).to(device, memory_format=torch.channels_last)
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return model


def sides(model: nn.Module, device: str) -> dict[str, Callable[[], object]]:
    """One step of each rule; they share the weights."""
    rule = lars(model, LR, momentum=MOMENTUM, weight_decay=DECAY)
    groups = [{k: group[k] for k in ("params", "weight_decay", "layerwise")} for group in rule.param_groups]
    decays = [{k: group[k] for k in ("params", "weight_decay")} for group in groups]
    fused = torch.optim.SGD(decays, lr=LR, momentum=MOMENTUM, fused=True)
    steps = {"fused_sgd": fused.step, "ours": rule.step, "naive": Naive(groups).step}
    if device == "cuda":
        foreach = LARS(groups, LR, momentum=MOMENTUM, weight_decay=DECAY)
        steps["foreach"] = lambda: on_path("foreach", foreach.step)
    return steps


def on_path(path: str, step: Callable[[], object]) -> None:
    own = ours._path
    ours._path = lambda device: path
    try:
        step()
    finally:
        ours._path = own


@dataclass(frozen=True)
class Counted:
    """A kernel whose launches are counted."""

    kernel: Any
    count: Counter[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel for a grid, which is launched next."""
        self.count["launches"] += 1
        return self.kernel[grid]


def launches(copies: int, device: str) -> int | None:
    """Kernels that a step of so many networks starts on Triton's path; None where triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.runtime.interpreter import InterpretedFunction

    from kasoku.optim.lars import triton as lars_triton

    model, count = network(copies, device), Counter()
    own = {name: getattr(lars_triton, name) for name in ("_squares", "_trusts", "_move")}
    for name, kernel in own.items():
        runs = kernel if device == "cuda" else InterpretedFunction(kernel.fn)
        setattr(lars_triton, name, Counted(runs, count))
    try:
        on_path("triton", lars(model, LR).step)
    finally:
        for name, kernel in own.items():
            setattr(lars_triton, name, kernel)
    return count.total()


def timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of a step, and seconds until its call returned."""
    if device == "cpu":
        (second,) = seconds_per_call(step, calls=1, warm=0)
        return second, second
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)  # the host hands over the whole step meanwhile, unless it waits for a value
    begin.record()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000, host


def bound(model: nn.Module) -> dict[str, object]:
    """What the passes over memory take at the speed of a copy: with, and without, a cache from norm to update."""
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    layers = sum(p.numel() * p.element_size() for p in model.parameters() if p.ndim > 1)
    source = torch.randn(everything // 4, device=next(model.parameters()).device)
    target = torch.empty_like(source)
    copy_s = statistics.median(seconds_per_call(lambda: target.copy_(source), calls=COPIES))
    rate = 2 * everything / copy_s
    return {
        "copy_gb_per_s": round(rate / 1e9, 1),
        "bound_ms": round(1000 * 5 * everything / rate, 2),
        "bound_without_cache_ms": round(1000 * (5 * everything + 2 * layers) / rate, 2),
        "bound_ratio_without_cache": round((5 * everything + 2 * layers) / (5 * everything), 3),
    }


def compare_training(batch: int, side: int, rounds: int, device: str) -> None:
    """Times training steps with each rule, in turns, and prints the line."""
    model = network(1, device)
    rules = sides(model, device)
    x_NCHW = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    y_N = torch.randint(1000, (batch,), device=device)

    def step(rule: Callable[[], object]) -> None:
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            out = model[0](x_NCHW)
        nn.functional.cross_entropy(out.float(), y_N).backward()
        rule()
        for p in model.parameters():
            p.grad = None

    rates: dict[str, list[float]] = {name: [] for name in rules}
    for i in range(rounds + WARM):
        for name, rule in rules.items():
            (second,) = seconds_per_call(lambda rule=rule: step(rule), calls=1, warm=0)
            if i >= WARM:
                rates[name].append(batch / second)
    over = {
        name: [a / b for a, b in zip(rates[name], rates["fused_sgd"], strict=True)]
        for name in rates
        if name != "fused_sgd"
    }
    figures: dict[str, object] = {
        **{f"{name}_over_sgd": round(statistics.median(ratios), 3) for name, ratios in over.items()},
        **{f"{name}_over_sgd_spread": spread([round(ratio, 3) for ratio in ratios]) for name, ratios in over.items()},
        "images_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "bars": [[i + 1, statistics.median(rates[name])] for i, name in enumerate(("fused_sgd", "naive", "ours"))],
    }
    parameters: dict[str, object] = {"batch": batch, "side": side, "rounds": rounds, "device": device}
    finish("lars_training", {**parameters, "threads": torch.get_num_threads()}, figures)


def compare_steps(rounds: int, device: str) -> None:
    """Times the update alone with each rule, in turns, and prints the line."""
    model = network(1, device)
    steps = sides(model, device)
    seconds, hosts = ({side: [] for side in steps} for _ in range(2))
    for i in range(rounds + WARM):
        for side, step in steps.items():
            second, host = timed(step, device)
            if i >= WARM:
                seconds[side].append(second)
                hosts[side].append(host)
    over = [a / b for a, b in zip(seconds["ours"], seconds["fused_sgd"], strict=True)]
    naive = [a / b for a, b in zip(seconds["naive"], seconds["ours"], strict=True)]
    figures: dict[str, object] = {
        "ours_over_fused_sgd": round(statistics.median(over), 3),
        "ours_over_fused_sgd_spread": spread([round(r, 3) for r in over]),
        "naive_over_ours": round(statistics.median(naive), 3),
        "naive_over_ours_spread": spread([round(r, 3) for r in naive]),
        "ms": {side: spread([round(1000 * s, 3) for s in some]) for side, some in seconds.items()},
        "host_ms": {side: round(1000 * statistics.median(some), 3) for side, some in hosts.items()},
        **bound(model),
        "path": ours._path(torch.device(device)),
        "launches_161": launches(1, device),
        "launches_322": launches(2, device),
    }
    parameters = {"tensors": len(list(model.parameters())), "rounds": rounds, "device": device}
    finish("lars_step", {**parameters, "threads": torch.get_num_threads(), "lr": LR}, figures, CLAIMS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each side that count")
    parser.add_argument("--training", action="store_true", help="whole training steps")
    parser.add_argument("--batch", type=int, default=40, help="with --training: images (default: %(default)s)")
    parser.add_argument("--side", type=int, default=224, help="with --training: pixels (default: %(default)s)")
    arguments = parse(parser)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.training:
        compare_training(arguments.batch, arguments.side, arguments.rounds, device)
    else:
        compare_steps(arguments.rounds, device)


if __name__ == "__main__":
    main()
