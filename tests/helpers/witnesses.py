"""A row for each technique: a setting for the small problem of the matrix, its promises, and its witness.

A witness is a function of the record of a rank's training. It returns what its technique left undone, or "" where the
technique did its work. So a technique that another one silences is found, even if all weights are fine.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from functorch.compile import make_boxed_func
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch.nn import functional

import kasoku
from helpers.graphs import captured_on_cpu
from kasoku.core import Job, Linear, StepDecay, Technique, backward_updates
from kasoku.data import Augment, Dataset, Decoding, GrowBatch, LowResolution, Mix, Shares, SkipEasy, Transforms
from kasoku.data.datasets.base import Memory
from kasoku.data.decode import nvjpeg
from kasoku.device import Autocast, ChannelsLast, Compile, CpuKernels, Graphs, LossScale, Seeded, cpu_kernels
from kasoku.distributed import AllReduce, Asynchronous, Overlap, PerLayer, Recalibrate, Replay, VirtualRanks
from kasoku.memory import SavedMemory
from kasoku.models import Pretrained
from kasoku.optim import EMA, Clip, Rate
from kasoku.report import Timed
from kasoku.tracking import Track

SIDE, CLASSES, IMAGES, BATCH = 16, 4, 64, 16
SHARES = (12, 4)
LIMIT = 0.05  # of Clip: less than the norm of every gradient here
OVERFLOW, RETREAT = 2.0**140, 2.0**20  # LossScale starts beyond float32: the first step overflows, no other does


# ---- the problem


class Block(nn.Module):
    """Convolution, BatchNorm, ReLU, dropout."""

    def __init__(self, channels_in: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, 8, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.dropout(self.relu(self.norm(self.conv(x_NCHW))))


class Net(nn.Module):
    """Two blocks and a head, for images of any size."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = Block(3, norm, dropout)
            self.second = Block(8, norm, dropout)
            self.head = nn.Linear(8 * 4, CLASSES)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool2d(self.second(self.first(x_NCHW)), 2).flatten(1))


def pixels_NHWC(count: int) -> tuple[Tensor, Tensor]:
    """Images, and their classes: the quarter that is bright."""
    random = np.random.default_rng(1)
    labels = random.integers(0, CLASSES, count)
    images = random.integers(0, 160, (count, SIDE, SIDE, 3), np.uint8)
    half = SIDE // 2
    for image, label in zip(images, labels, strict=True):
        image[half * (label // 2) :, half * (label % 2) :][:half, :half] += 90
    return torch.from_numpy(images), torch.from_numpy(labels)


def in_memory() -> Dataset:
    train, test = Memory(*pixels_NHWC(IMAGES)), Memory(*pixels_NHWC(8))
    names = tuple(f"quarter{k}" for k in range(CLASSES))
    return Dataset("quarters", names, train, test, 3, (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)


# ---- what a training left behind


@dataclass
class Record:
    """What one rank saw, for the witnesses."""

    job: Job
    before: dict[str, object]  # the traces of model and optimizer before the job
    start: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    first: Tensor | None = None  # the first batch as the loader gave it
    counts: list[int] = field(default_factory=list)  # images of each batch
    shapes: list[torch.Size] = field(default_factory=list)  # of x as the loop got it
    mixed: list[bool] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # of torch's random state in each forward
    half: set[bool] = field(default_factory=set)  # autocast in each forward
    rehearsed: set[int] = field(default_factory=set)  # steps with forwards that are not the loop's
    rates: list[tuple[float, float]] = field(default_factory=list)  # progress, rate after each step
    accumulate: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients as the optimizer gets them
    kept_bytes: list[int] = field(default_factory=list)  # between each forward but the first, and its backward
    gradient_bytes: list[int] = field(default_factory=list)  # before each step
    late: list[bool] = field(default_factory=list)  # updates of Overlap that wait for the next forward
    collectives: list[int] = field(default_factory=list)  # of the gradients, in each step
    compiled: list[int] = field(default_factory=list)  # calls of compiled code in each forward
    replayed: list[bool] = field(default_factory=list)  # whether each forward was a graph's
    trained: dict[str, Tensor] = field(default_factory=dict)  # weights after the last step
    evaluated: dict[str, Tensor] = field(default_factory=dict)  # those of job.evaluation()
    outputs: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def learning(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.job.model.named_parameters() if p.requires_grad}


CALLS: Counter[Any] = Counter()  # of compiled code by thread, since ranks are threads; of "nvjpeg"


@register_backend
def counted(module: Any, inputs: Any) -> Any:
    """A backend of torch.compile that counts how often its code runs forward."""

    def compiled(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            CALLS[threading.get_ident()] += 1
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiled, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))(
        module, inputs
    )


def by_pillow(files: Iterable[Tensor]) -> list[Tensor]:
    """What nvJPEG does, done by Pillow."""
    found = []
    for file in files:
        CALLS["nvjpeg"] += 1
        pixels_HWC = np.asarray(Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB"))
        found.append(torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).contiguous())
    return found


@contextlib.contextmanager
def kept_for_backward(model: nn.Module, found: list[int]) -> Iterator[None]:
    """Adds up the bytes that autograd keeps, each memory once, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield
    found.append(sum(seen.values()))


def plain_bytes(shape: torch.Size, *, half: bool) -> int:
    """What autograd alone keeps for a batch of this shape."""
    model, found = Net(), list[int]()
    with kept_for_backward(model, found), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model(torch.zeros(shape))
    return found[0]


# ---- witnesses: what a technique left undone, or ""


def acted(done: object, otherwise: str) -> str:
    return "" if done else otherwise


def varied(record: Record, **without: Any) -> str:
    plain = record.job.plain_loader
    twin = plain.sandbox()  # the same images in the same order
    twin.configure(shares=plain.shares, batch=BATCH, parts=1, **without)
    twin.seek(0, 0)
    with contextlib.closing(iter(twin)) as batches:
        same = torch.equal(next(batches)[0], record.first)
    return acted(not same, "the images are those without it")


def jittered(x_CHW: Tensor) -> Tensor:
    """As a transform of torchvision, it draws from torch's global generator."""
    return (x_CHW * torch.rand(1)).to(torch.uint8)


def all_reduce(record: Record) -> str:
    wanted = len(record.learning) + any(isinstance(t, Graphs) for t in record.job.applied)  # running statistics
    return acted(set(record.collectives) == {wanted}, f"{record.collectives} collectives, not {wanted}")


def asynchronous(record: Record) -> str:
    engine = record.job.kept("asynchronous")
    workers, groups = len(engine.weights.workers), len(engine.weights.groups)
    wanted = workers * workers * groups * record.job.steps  # from each to each, also between sync points
    updates = sum(engine.staleness.values())
    return acted(updates == wanted, f"{updates} updates were exchanged, not {wanted}")


def autocast(record: Record) -> str:
    return acted(record.half == {True}, "a forward without autocast")


def channels_last(record: Record) -> str:
    wide = [p for p in record.job.model.parameters() if p.ndim == 4]
    fits = all(p.is_contiguous(memory_format=torch.channels_last) for p in wide)
    state = [x for p in wide for x in record.job.state_of(p).values() if torch.is_tensor(x) and x.ndim == 4]
    return acted(
        fits and all(x.is_contiguous(memory_format=torch.channels_last) for x in state), "another layout in memory"
    )


def by_c(record: Record) -> str:
    own = [type(m).__name__ for m in record.job.model.modules() if type(m) is nn.Conv2d and "forward" not in vars(m)]
    return acted(not own or cpu_kernels.library() is None, f"torch's kernels for {', '.join(own)}")


def clip(record: Record) -> str:
    bound = all(norm <= LIMIT * 1.001 for norm in record.norms)
    return acted(bound and max(record.norms) >= LIMIT * 0.999, f"norms of {record.norms}, the limit is {LIMIT}")


def ema(record: Record) -> str:
    same = [name for name in record.learning if torch.equal(record.trained[name], record.evaluated[name])]
    counts = record.job.kept("ema").updates
    missed = [name for name in record.learning if counts.get(name, 0) < record.job.steps - 1]  # LossScale skips one
    return acted(not same and not missed, f"evaluated with the trained {same}, averages lack updates of {missed}")


def compiled(record: Record) -> str:
    blocks = 3
    return acted(min(record.compiled) >= blocks, f"calls of compiled code in each forward: {record.compiled}")


def decoded(record: Record) -> str:
    chosen = record.job.plain_loader.pipeline.decoder == "nvjpeg"
    return acted(chosen and CALLS["nvjpeg"], "nothing was decoded by nvJPEG")


def graphs(record: Record) -> str:
    shapes, plain = len(set(record.shapes)), record.replayed.count(False)
    return acted(plain < shapes, f"{plain} batches of {shapes} shapes were not replayed")  # the first of a new shape


def grow_batch(record: Record) -> str:
    return acted(set(record.accumulate) == {1, 2}, f"the batch was {set(record.accumulate)} times as large")


def loss_scale(record: Record) -> str:
    scale, fine = record.job.kept("loss_scale").scale, all(x.isfinite().all() for x in record.trained.values())
    return acted(fine and scale == OVERFLOW / RETREAT, f"the scale is {scale}, weights are finite: {fine}")


def low_resolution(record: Record) -> str:
    sides = [shape[2] for shape in record.shapes]
    return acted(set(sides[:4]) == {SIDE // 2} and set(sides[4:]) == {SIDE}, f"images of {sides} pixels")


def skip_easy(record: Record) -> str:
    pipeline = record.job.plain_loader.pipeline
    return acted(pipeline.images_taken == IMAGES // 2, f"{pipeline.images_taken} of {IMAGES} images in an epoch")


def overlap(record: Record) -> str:
    engine = record.job.kept("overlap")
    chunks = len(engine.layout.plan.order)
    sent = acted(set(record.collectives) == {chunks}, f"{record.collectives} collectives for {chunks} chunks")
    left_out = any(isinstance(t, LossScale) for t in record.job.applied)  # one step, whose gradients overflow
    return sent or acted(record.late.count(False) <= left_out, "updates did not wait for the next forward")


def pretrained(record: Record) -> str:
    frozen = {f"first.{name}": x for name, x in Net(seed=7).first.state_dict().items()}
    same = all(torch.equal(record.trained[name], x) for name, x in frozen.items())
    return acted(same, "the first block is not the one of the file")


def rate(record: Record) -> str:
    wanted = [0.1 * RATE.schedule(progress) for progress, _ in record.rates]
    return acted([found for _, found in record.rates] == wanted, f"rates {record.rates}")


def recalibrate(record: Record) -> str:
    same = torch.equal(record.trained["second.norm.running_mean"], record.evaluated["second.norm.running_mean"])
    return acted(not same, "evaluated with the running statistics of the training")


def replay(record: Record) -> str:
    wanted = {*range(0, record.job.steps, 2)}
    return acted(record.rehearsed == wanted, f"forwards beside those of the loop in steps {record.rehearsed}")


def saved_memory(record: Record) -> str:
    half = True in record.half
    later = zip(record.kept_bytes, record.shapes[1:], strict=True)  # in the first forward it inspects the network
    more = [(n, plain) for n, shape in later if n >= (plain := plain_bytes(shape, half=half))]
    grads, most = sum(p.nbytes for p in record.learning.values()), max(record.gradient_bytes)
    kept = acted(not more, f"it and autograd keep {more} bytes")
    return kept or acted(most < 0.85 * grads, f"{most} bytes of gradients are kept after backward")


def seeded(record: Record) -> str:
    alike = len(set(record.seeds)) < len(record.seeds)
    return acted(not alike, "torch's random state was not seeded for each batch")


def shares(record: Record) -> str:
    mine = SHARES[record.job.comm.rank]
    return acted(set(record.counts) == {mine}, f"batches of {record.counts} images, not {mine}")


def timed(record: Record) -> str:
    steps: Any = record.job.trace.follower
    counted = getattr(steps, "count", 0) == record.job.steps
    return acted(counted and steps.loop_s["forward"] > 0, "no times of the steps")


def track(record: Record) -> str:
    active = [tracker.active for tracker in record.job.trackers]
    return acted(active == [record.job.comm.rank == 0], f"trackers: {active}")


def virtual_ranks(record: Record) -> str:
    groups = {vars(m)["steer"].images for m in record.job.model.modules() if "steer" in vars(m)}
    moved = record.trained["second.norm.running_mean"].any()
    return acted(groups == {VIRTUAL.norm_batch} and moved, f"groups of {groups} images")  # exactly so: equals_one_rank


# ---- the rows


RATE = Rate(Linear(epochs=6, warmup=1))
VIRTUAL = VirtualRanks(norm_batch=4, average=0.5)
BUCKETS = PerLayer(least_bytes=0)
PHOTOS = "photos"  # the folder of them that `files` makes


@dataclass(frozen=True)
class Member:
    """A technique among others.

    Args:
        technique: a setting that does something to the small problem.
        sign: what a training with it shows, on the page of pairs.
        witness: returns what it left undone, from the record of a rank.
        tolerance: how near N ranks come to one rank on the global batch; None: it promises nothing of the kind.
        repeats: a resumed training has the bits of one that never stopped.
        not_run: why it cannot be run here.
        stand_in: a context in which it runs without the device that it needs.
        on_cpu: what stands in for that device.
    """

    technique: Technique
    sign: str
    witness: Callable[[Record], str]
    tolerance: float | None = 1e-10
    repeats: bool = True
    not_run: str = ""
    stand_in: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    on_cpu: str = ""

    @property
    def name(self) -> str:
        return type(self.technique).__name__


@contextlib.contextmanager
def pillow_for_nvjpeg() -> Iterator[None]:
    with mock.patch.object(nvjpeg, "check"), mock.patch.object(nvjpeg, "decoding", return_value=by_pillow):
        yield


MEMBERS = [
    Member(AllReduce(), "a collective for each gradient", all_reduce),
    Member(Asynchronous(buckets=BUCKETS), "updates that were exchanged", asynchronous, tolerance=None, repeats=False),
    Member(
        Augment(flip="random", translate=2),
        "other images than the loader gives without it",
        lambda record: varied(record, augment=Augment()),
    ),
    Member(Autocast("bf16"), "autocast in every forward", autocast, tolerance=2e-2),
    Member(ChannelsLast(), "convolution weights and momentum in NHWC order", channels_last),
    Member(Clip(norm=LIMIT), "gradients of exactly the largest norm", clip),
    Member(Compile("counted"), "every block's compiled code in every forward", compiled),
    Member(
        CpuKernels(),
        "a forward of its own in every convolution",
        by_c,
        stand_in=partial(mock.patch.object, cpu_kernels, "pays", lambda threads: True),
    ),
    Member(
        Decoding("nvjpeg"),
        "images from the decoder that stands in for nvJPEG",
        decoded,
        stand_in=pillow_for_nvjpeg,
        on_cpu="Pillow in the place of nvJPEG",
    ),
    Member(EMA(decay=0.8, warmup=False), "an evaluation with other weights, which count every update", ema),
    Member(
        Graphs(),
        "a replay for every batch but the first of a new shape",
        graphs,
        stand_in=captured_on_cpu,
        on_cpu="a recorder that replays a step's operators",
    ),
    Member(GrowBatch(StepDecay(milestones=(1.0,), gamma=2.0)), "twice the batch in the second epoch", grow_batch),
    Member(
        LossScale(start=OVERFLOW, factor=RETREAT), "a lower scale after an overflow, which leaves no trace", loss_scale
    ),
    Member(LowResolution(SIDE // 2, until=1.0), "small images in the first epoch alone", low_resolution),
    Member(Mix(), "a partner for every label", lambda r: acted(all(r.mixed), "labels without partners"), None),
    Member(Overlap(BUCKETS), "a collective for each chunk; updates that wait for the next forward", overlap),
    Member(Pretrained("of a file", freeze=1), "a first block as in the file", pretrained),
    Member(RATE, "the schedule's rate after every step", rate),
    Member(Recalibrate(images=32), "other running statistics in the evaluation", recalibrate),
    Member(Replay(every=2), "a second forward in every second step, none in the others", replay),
    Member(
        SavedMemory(factor=1.4),
        "fewer bytes kept than by autograd, gradients freed in backward",
        saved_memory,
        stand_in=partial(
            mock.patch.object, backward_updates, "LIMIT", 2**10
        ),  # all gradients here have less than 32 MiB
    ),
    Member(Seeded(seed=3), "another random state in every step", seeded),
    Member(Shares(SHARES), "unequal batches on the ranks", shares),
    Member(SkipEasy(0.5, start=1.0, until=9.0), "half of the images in the second epoch", skip_easy),
    Member(Timed(), "the times of every step", timed),
    Member(Track("tensorboard"), "a tracker in `job.trackers`, which rank 0 opens", track),
    Member(
        Transforms((jittered,)),
        "other images than the loader gives without it",
        lambda record: varied(record, vary=None),
    ),
    Member(VIRTUAL, "groups of exactly `norm_batch` images, equal statistics on the ranks", virtual_ranks),
]
BY_NAME = {member.name: member for member in MEMBERS}


def shipped() -> set[str]:
    """The names of all techniques that kasoku's packages export."""
    names = set()
    for room in pkgutil.iter_modules(kasoku.__path__, "kasoku."):
        module = import_module(room.name)
        if room.ispkg and room.name != "kasoku.core":
            found = [getattr(module, n) for n in getattr(module, "__all__", [])]
            names |= {t.__name__ for t in found if inspect.isclass(t) and issubclass(t, Technique)}
    return names


def files(where: Path) -> Path:
    """Writes what techniques read: a folder of photos, and weights."""
    for norm in (True, False):
        weights_of = Net(norm=norm, seed=7).state_dict()
        save_file({name: x.contiguous() for name, x in weights_of.items()}, where / f"norm={norm}.safetensors")
    images, labels = pixels_NHWC(IMAGES + 8)
    for split, start, stop in (("train", 0, IMAGES), ("val", IMAGES, IMAGES + 8)):
        for i in range(start, stop):
            place = where / PHOTOS / split / f"quarter{labels[i]}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[i].numpy()).save(place / f"{i}.jpg", quality=95)
    return where
