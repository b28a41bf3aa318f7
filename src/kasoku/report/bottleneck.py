"""Finds the bottlenecks of a training from the times of its steps, each with a figure and a remedy."""

import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from kasoku.core import Job
from kasoku.core.clock import Stopwatch, Wall
from kasoku.core.hardware import cores
from kasoku.distributed.environment import place

# a bottleneck is reported from this share of a step on
_MIN_SHARE = 0.1
_MIN_UPDATE = 0.25
_MIN_FIXED = 0.3  # the part that does not depend on the batch
_MIN_LAUNCH = {"cuda": 0.75, "cpu": 0.4}  # a GPU computes while the host launches: a bound only near 1
_MIN_STARVED = 0.15
_SMALL_BATCH = 32  # images
_TRIES = 10  # of a call whose time is measured
_COMPUTE = ("forward", "backward", "update")
_NO_LAUNCH = (nn.Identity, nn.Flatten, nn.Dropout)

Step = Mapping[str, float]  # seconds by row


@dataclass(frozen=True)
class StepFacts:
    """The facts about a step that its times do not show.

    Args:
        device: "cpu", "cuda" or "mps".
        batch: images of one forward on one rank.
        parts: forwards of a step.
        layers: modules that the host calls one by one in a forward; 0 if a CUDA graph or compiled code calls them.
        layer_s: seconds of forward and backward of a layer with almost no work (`layer_s`).
        parameters: the number of parameters of the model.
        threads: compute threads of one rank.
        cores: cores of this host that the process may use.
        processes: ranks that share these cores.
        starved: the share of time in which the main thread was ready to run but had no core.
        ranks: the numbers of the ranks; None: from 0 on.
    """

    device: str
    batch: int
    layers: int
    layer_s: float
    parameters: int
    parts: int = 1
    threads: int = 1
    cores: int = 1
    processes: int = 1
    starved: float = 0.0
    ranks: Sequence[int] | None = None


@dataclass(frozen=True)
class StepBottleneck:
    """A bottleneck: its name, its share of a step (0 to 1), the figure in words, and the remedy."""

    cause: str
    share: float
    line: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.line}; {self.remedy}"


def find_bottlenecks(
    steps: Sequence[Step], facts: StepFacts, *, transfer_s: float | None = None, last_in: Sequence[float] = ()
) -> list[StepBottleneck]:
    """The bottlenecks of a training, the costliest first; "compute-bound" if there is no other. Empty without a step.

    `steps`: the mean step of each rank in rank order: seconds by row of the ledger. `transfer_s`: communication that no
    rank can hide: each step's minimum wait over ranks, as a mean over steps; None: the minimum over ranks of their mean
    waits. `last_in`: the share of the last steps in which each rank waited least, so that the others waited for it.
    """
    if not steps or not all(steps):
        return []
    whole_s = max(1e-9, statistics.median(sum(step.values()) for step in steps))
    usual = {row: statistics.median(step[row] for step in steps) for row in steps[0]}
    if transfer_s is None:
        transfer_s = min(step["exposed"] for step in steps)
    candidates = [
        *_of_all_ranks(usual, whole_s, facts, transfer_s),
        _straggler(steps, whole_s, last_in, facts.ranks or range(len(steps))),
        _calls(usual, whole_s, facts),
        _cores(usual, whole_s, facts),
    ]
    causes = sorted((cause for cause in candidates if cause), key=lambda cause: -cause.share)
    return causes or [_computing(usual, whole_s)]


def _cause(
    name: str, lost_s: float, whole_s: float, line: str, remedy: str, *, least: float = _MIN_SHARE
) -> StepBottleneck | None:
    """The bottleneck that costs `lost_s` of a step; None below the share `least`."""
    if lost_s < least * whole_s:
        return None
    return StepBottleneck(name, round(min(1.0, lost_s / whole_s), 4), line, remedy)


def _of_all_ranks(usual: Step, whole_s: float, facts: StepFacts, transfer_s: float) -> Iterator[StepBottleneck | None]:
    """The causes that hold up every rank alike; `transfer_s`: the least wait of any rank."""
    transforms_s = usual["transforms"]
    images_s = usual["input"] + usual["copy"] + transforms_s
    copying = f", {_ms(usual['copy'])} of it for copies to the device" if usual["copy"] > 0.1 * images_s else ""
    copying += f", {_ms(transforms_s)} of it in Transforms" if transforms_s > 0.1 * images_s else ""
    gain = whole_s / max(whole_s - images_s, 1e-9)
    much = f"without it {gain:.1f} times as fast" if gain < 100 else "without it many times as fast"
    line = f"{_of(images_s, whole_s)} waits for its images{copying}; {much}"
    remedy = "pack the images once (kasoku pack), keep them in memory, or give decoding more cores"
    remedy = "use Augment and Mix in place of Transforms" if transforms_s > 0.5 * images_s else remedy
    yield _cause("input-bound", images_s, whole_s, line, remedy)

    line = f"{_of(transfer_s, whole_s)} waits for gradients in transfer, on every rank"
    remedy = "use kasoku.distributed.Overlap, fewer bytes (reducer Wire or LowRank), a larger batch, or a faster link"
    yield _cause("communication-bound", transfer_s, whole_s, line, remedy)

    if facts.batch >= _SMALL_BATCH:
        each = f"{usual['update'] / max(1, facts.parameters) * 1e9:.1f} ns a parameter"
        line = f"{_of(usual['update'], whole_s)} is the optimizer's update of {facts.parameters:,} parameters, {each}"
        remedy = "use a fused rule (kasoku.optim.sgd, adamw, lars), a cheaper one, or a larger batch with fewer updates"
        yield _cause("update-bound", usual["update"], whole_s, line, remedy, least=_MIN_UPDATE)

    line = f"{_of(usual['other'], whole_s)} is the loop itself, between the steps and the batches"
    remedy = "see kasoku profile's trace.json; read losses and write logs less often"
    yield _cause("loop-bound", usual["other"], whole_s, line, remedy)


def _straggler(
    steps: Sequence[Step], whole_s: float, last_in: Sequence[float], ranks: Sequence[int]
) -> StepBottleneck | None:
    """The rank with the most work of its own; its waits for other ranks do not count."""
    if len(steps) < 2:
        return None
    own = [{row: s for row, s in step.items() if row != "exposed"} for step in steps]
    own_s = [sum(step.values()) for step in own]
    last = own_s.index(max(own_s))
    others = own[:last] + own[last + 1 :]
    lag_s = own_s[last] - statistics.median(sum(step.values()) for step in others)
    lags = {row: s - statistics.median(step[row] for step in others) for row, s in own[last].items()}
    row = max(lags, key=lambda row: lags[row])
    waits_s = statistics.median(step["exposed"] for rank, step in enumerate(steps) if rank != last)
    line = f"rank {ranks[last]} takes {_ms(lag_s)} longer than the other ranks by its own work, most of it in {row}"
    line += f" ({_ms(lags[row])}); they wait {_ms(waits_s)} of each step"
    line += f", and it was the last in {last_in[last]:.0%} of the latest" if last_in else ""
    remedy = f"check rank {ranks[last]}'s host for other processes, its clock rate and its disk; or leave it out"
    return _cause("straggler", lag_s, whole_s, line, remedy)


def _calls(usual: Step, whole_s: float, facts: StepFacts) -> StepBottleneck | None:
    """The time of layer calls does not depend on the batch; nor does the update, which counts with a small batch."""
    whole_s *= 1 - facts.starved  # layer_s was measured with a core
    calling_s = facts.parts * facts.layers * facts.layer_s
    if facts.batch >= _SMALL_BATCH:
        lost_s = min(whole_s, calling_s)
        parts = f" {facts.parts} times" if facts.parts > 1 else ""
        line = f"{_of(lost_s, whole_s)} goes into calling {facts.layers} layers{parts}, whatever they compute"
        cuda = "device.graphs = true, device.compile = true, or a larger batch"
        remedy = cuda if facts.device == "cuda" else "a larger batch, or a network of fewer, wider layers"
        return _cause("launch-bound", lost_s, whole_s, line, remedy, least=_MIN_LAUNCH.get(facts.device, 0.75))
    fixed_s = min(whole_s, calling_s + usual["update"] * (1 - facts.starved))
    enough = max(_SMALL_BATCH, round(9 * fixed_s * facts.batch / max(whole_s - fixed_s, 0.01 * whole_s)))
    parts = f", {facts.parts} times a step" if facts.parts > 1 else ""
    line = f"{_of(fixed_s, whole_s)} does not depend on the batch of {facts.batch}{parts} (calling layers, updating)"
    raised = "norm_batch, or lower accumulate" if facts.parts > 1 else "batch"
    remedy = f"raise {raised}: at about {enough:,} images a forward it is a tenth; kasoku tune finds the best"
    return _cause("small batch", fixed_s, whole_s, line, remedy, least=_MIN_FIXED)


def _cores(usual: Step, whole_s: float, facts: StepFacts) -> StepBottleneck | None:
    """More threads than cores, or cores that other processes take."""
    threads = facts.threads * facts.processes
    if threads <= facts.cores:
        line = f"{facts.starved:.0%} of the time the main thread was ready and had no core"
        remedy = "end other processes on this machine, give the training more cores, or try --set device.threads=1"
        return _cause("CPU-starved", facts.starved * whole_s, whole_s, line, remedy, least=_MIN_STARVED)
    if facts.device != "cpu":
        return None
    # an upper bound: threads also wait for each other
    lost_s = sum(usual[row] for row in _COMPUTE) * (1 - facts.cores / threads)
    ranks = f" ({facts.processes} ranks)" if facts.processes > 1 else ""
    line = f"{threads} threads{ranks} compute on {facts.cores} cores, and wait for each other"
    remedy = f"device.threads = {max(1, facts.cores // facts.processes)}, or 0 for an automatic choice"
    return _cause("oversubscribed", lost_s, whole_s, line, remedy)


def _computing(usual: Step, whole_s: float) -> StepBottleneck:
    busy_s = usual["forward"] + usual["backward"]
    line = f"{_of(busy_s, whole_s)} is forward and backward, and nothing else holds it up"
    remedy = "a lower precision, smaller images at first (LowResolution), or more devices"
    return StepBottleneck("compute-bound", round(min(1.0, busy_s / whole_s), 4), line, remedy)


def _of(part_s: float, whole_s: float) -> str:
    return f"{min(1.0, part_s / whole_s):.0%} of a step ({_ms(part_s)} of {_ms(whole_s)})"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def facts_of(job: Job, batch: int, *, threads: int = 0, starved: float = 0.0) -> StepFacts:
    """The facts of a job with its techniques applied; measures `layer_s`, a few milliseconds.

    `batch`: images of one forward on one rank; `threads`: of one rank, 0: torch's; `starved`: `Ledger.starved()`.
    """
    model = job.model
    first = next(model.parameters(), torch.zeros(0))
    one_call = any(t.compiles_model or t.captures_graph for t in job.applied)
    one_call = one_call or any(hasattr(m, "_orig_mod") for m in model.modules())  # of torch.compile
    leaves = [m for m in model.modules() if not list(m.children()) and not isinstance(m, _NO_LAUNCH)]
    return StepFacts(
        device=first.device.type,
        batch=batch,
        layers=0 if one_call else len(leaves),
        layer_s=layer_s(first.device),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parts=job.accumulate,
        threads=threads or torch.get_num_threads(),
        cores=cores(),
        processes=place().ranks_on_its_cores if job.comm.size > 1 else 1,
        starved=round(min(0.95, starved), 4),
    )


@cache  # each live verdict asks for it
def layer_s(device: torch.device) -> float:
    """Seconds of forward and backward of a layer with almost no work: the cost of its call.

    Eight channels of 4x4 pixels, on one thread (several would wait for each other).
    """
    on_gpu = device.type == "cuda"
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(4):
            if on_gpu:  # no convolutions, whose kernels would be searched first
                layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
            else:
                layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    network = nn.Sequential(*layers).to(device)
    x = torch.zeros((2, 8) if on_gpu else (2, 8, 4, 4), device=device)
    with ExitStack() as stack, torch.enable_grad():
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        return fastest_s(lambda: network(x).sum().backward(), device) / len(network)


def fastest_s(f: Callable[[], object], device: torch.device) -> float:
    """The least seconds of a few calls, since other processes lengthen some of them."""
    watch = Stopwatch(Wall(), device)
    return min(timeit.repeat(lambda: (f(), watch.synchronize()), watch.synchronize, number=1, repeat=_TRIES))
