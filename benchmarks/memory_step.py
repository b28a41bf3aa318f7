"""One question of benchmarks/memory.py and memory_ranks.py, in a process of its own: the last line is its JSON answer.

    LD_PRELOAD=malloc_live.so python benchmarks/memory_step.py '{"ask": "peak", "network": "vgg16", "batch": 16}'

ask: "peak" (bytes at most over a step, beside the interpreter and its libraries), "plan" (the largest batch that is
foreseen within `limit` bytes at `time` more), "pairs" (the peak and, if it is within `limit`, seconds of steps that
take turns with those of plain PyTorch at its own batch `plain`: `pairs` of them, or as many as end within `seconds` of
the process, and one at least).
way: "plain", "saved" (with `settings`), "checkpoint", "budget" (torch's activation_memory_budget).
Where RANK is set, it is one of several ranks: all have Overlap, a step of plain Overlap is timed after another one, and
the largest peak of all ranks decides.
"""

import ctypes
import gc
import json
import os
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cluster import connected
from kasoku import models
from kasoku.core import Job, Solo
from kasoku.device import Autocast, ChannelsLast
from kasoku.distributed import Graded, Overlap
from kasoku.memory import SavedMemory
from kasoku.memory.network import InspectedNetwork
from kasoku.memory.ops import Numerics
from kasoku.memory.saved_memory import BUDGET_SHARE, Planner
from kasoku.optim import sgd

CLASSES = 1000
VGG_STAGES = (5, 10, 17, 24, 31)  # where a stage of VGG-16 ends, with its pool
BACKEND = "aot_eager_decomp_partition"
BEGAN = time.perf_counter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMM = connected() if "RANK" in os.environ else Solo()


class Bytes:
    """Live bytes at the allocator: of malloc (malloc_live.c), or of CUDA."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        if DEVICE.type == "cpu":
            self.libc.kasoku_live_bytes.restype = self.libc.kasoku_peak_bytes.restype = ctypes.c_long

    def live(self) -> int:
        """Given out now."""
        gc.collect()
        return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else self.libc.kasoku_live_bytes()

    def peak(self) -> int:
        """Given out at most since `reset`."""
        return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else self.libc.kasoku_peak_bytes()

    def reset(self) -> None:
        """Counts the peak from here on."""
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self.libc.kasoku_reset_peak()


def made(asked: dict, way: str) -> Job:
    """A training of the network, in a way."""
    torch.manual_seed(0)
    model = getattr(models, asked["network"])(CLASSES).to(DEVICE)
    job = Job(model, lambda m: sgd(m, 0.001), comm=COMM)
    techniques = [ChannelsLast(), *([Autocast("bf16")] if asked.get("half") else [])]
    if way == "saved":
        techniques.append(SavedMemory(**asked["settings"], show=False))
    if COMM.size > 1:  # Graded: the buckets that Planned begins with; it has as many bytes
        techniques.append(Overlap() if way == "saved" else Overlap(Graded()))
    job.apply(*techniques)
    if way == "checkpoint":
        rerun(model)
    if way == "budget":
        torch._functorch.config.activation_memory_budget = asked["budget"]
        job.model.forward = torch.compile(model.forward, backend=BACKEND)
    return job


def rerun(model: nn.Module) -> None:
    """torch.utils.checkpoint around every block of a ResNet, every stage of a VGG."""
    if hasattr(model, "features"):
        ends = [0, *VGG_STAGES]
        layers = [*model.features]
        model.features = nn.Sequential(*(nn.Sequential(*layers[a:b]) for a, b in pairwise(ends)))
        blocks = [*model.features]
    else:
        blocks = [block for name, stage in model.named_children() if name.startswith("layer") for block in stage]
    for block in blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)


def images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, side, side, device=DEVICE).contiguous(memory_format=torch.channels_last)
    return x, torch.randint(CLASSES, (batch,), device=DEVICE)


def step(job: Job, x: Tensor, y: Tensor) -> float:
    """Seconds of one step."""
    begin = time.perf_counter()
    job.loss(job.model(x), y).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def load_libraries(way: str) -> None:
    """What torch imports at a first step, and the compiler where it is asked for, is not the network's."""
    job = Job(nn.Linear(2, 2).to(DEVICE), lambda m: sgd(m, 0.1), comm=COMM).apply(Overlap(Graded()))
    if way == "budget":
        job.model.forward = torch.compile(job.model.forward, backend=BACKEND)
    step(job, torch.ones(1, 2, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE))
    job.close()


def most(value: float) -> float:
    """The largest value of all ranks, which wait for each other."""
    x = torch.tensor(value, dtype=torch.float64)
    COMM.all_reduce(x, op="max").wait()
    return float(x)


def planner_of(job: Job) -> Planner:
    hooks = job.model._forward_pre_hooks.values()
    return next(h.__self__ for h in hooks if isinstance(getattr(h, "__self__", None), Planner))


def peak(asked: dict) -> dict[str, object]:
    """Of a step after a small one, so that the optimizer's state is there."""
    load_libraries(asked.get("way", "plain"))
    counted = Bytes()
    base = counted.live()
    job = made(asked, asked.get("way", "plain"))
    told, *_ = peak_of(job, asked, counted, base)
    return told


def peak_of(job: Job, asked: dict, counted: Bytes, base: int) -> tuple[dict[str, object], Tensor, Tensor]:
    """The answer, and the images."""
    if asked.get("way") != "budget":
        step(job, *images(2, asked["side"]))
    x, y = images(asked["batch"], asked["side"])
    if asked.get("way") == "budget":
        step(job, x, y)  # to compile
    gc.collect()
    counted.reset()
    told: dict[str, object] = {"step_s": step(job, x, y), "peak": counted.peak() - base, "libraries": base}
    job.drain()
    if asked.get("way") == "saved":
        planner = planner_of(job)
        told |= {"foreseen": planner.plan.peak, "time_foreseen": planner.network.longer(planner.plan)}
        told |= per_image(planner)
    return told, x, y


def per_image(planner: Planner) -> dict[str, object]:
    network, plan = planner.network, planner.plan
    before = sum(unit.plain for unit in network.units) / network.batch
    after = (plan.kept - network.outside.head_kept) / network.batch
    return {"activation_bytes_per_image": {"before": round(before), "after": round(after)}}


def plan(asked: dict) -> dict[str, object]:
    """The largest batch that is foreseen to fit; that of plain PyTorch is the least."""
    job = made(asked, "saved")
    job.model.train()
    planner = planner_of(job)
    settings = planner.settings
    how = Numerics(exact=settings.lossless)

    def fits(batch: int) -> bool:
        x = torch.zeros(batch, 3, asked["side"], asked["side"], device=DEVICE)
        x = x.contiguous(memory_format=torch.channels_last)
        network = InspectedNetwork(job, planner.running, x, how=how, gradients_freed=True, linears=planner.linears)
        found = network.within(asked["limit"] * BUDGET_SHARE)
        return found is not None and network.longer(found) <= asked["time"]

    low, high = asked["batch"], 8 * asked["batch"]
    if not fits(low):
        return {"batch": low, "fits": False}
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"batch": low, "fits": True}


def pairs(asked: dict) -> dict[str, object]:
    """The peak of a way, then steps in turn with plain PyTorch, each at its batch."""
    load_libraries(asked["way"])
    counted = Bytes()
    base = counted.live()
    other = made(asked, asked["way"])
    told, *theirs = peak_of(other, asked, counted, base)
    if most(told["peak"]) > asked["limit"]:
        return told
    if asked["way"] == "saved":  # the plan of a batch holds for smaller ones
        few = images(asked["plain"], asked["side"])
        counted.reset()
        step(other, *few)
        other.drain()
        told["peak_at_plain"] = counted.peak() - base - sum(tensor.nbytes for tensor in theirs)
        del few
    plain = made(asked, "plain")
    turns = {"plain": (plain, *images(asked["plain"], asked["side"])), "other": (other, *theirs)}
    step(*turns["plain"])
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    longest = 0.0
    for number in range(asked["pairs"]):
        begin = time.perf_counter()
        if number and most(begin - BEGAN + longest) > asked["seconds"]:
            break
        for name in [*turns][:: 1 if number % 2 else -1]:
            if COMM.size > 1 and name == "plain":  # the update of one step is hidden behind the next one
                most(step(*turns[name]))
            seconds[name].append(step(*turns[name]) / len(turns[name][1]))
            turns[name][0].drain()
            most(0.0)
        longest = max(longest, time.perf_counter() - begin)
    return told | {"seconds_per_image": seconds}


if __name__ == "__main__":
    QUESTION = json.loads(sys.argv[1])
    print(json.dumps({"peak": peak, "plan": plan, "pairs": pairs}[QUESTION["ask"]](QUESTION)), flush=True)
