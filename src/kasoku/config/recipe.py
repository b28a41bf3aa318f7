"""A recipe: what to train, to which accuracy. Read from strict TOML, written back resolved beside every result.

Its `points` are settings that are known at some batches, and interpolated between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
import torch
from torch import nn
from torch.optim import Optimizer

from kasoku.config import libraries
from kasoku.config.shipped import RECIPES, locate
from kasoku.config.toml import Factory, override, parameters_of, parse, read, resolve, table
from kasoku.core import Checked, Constant, InputError, Range, Schedule, Technique, summary
from kasoku.core.errors import nearest
from kasoku.core.schedule import epoch_of
from kasoku.data import Dataset
from kasoku.device import Device

T = TypeVar("T")
_MOST_EPOCHS = 100_000  # a preview loops over them
_IN_MEMORY = {f"kasoku.data.{name}" for name in ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100")}
_READ: list[tuple[Factory, Dataset]] = []  # by read_early
_TOO_LARGE = ("allocate memory", "Storage size calculation overflowed")  # of torch's errors
CHANGEABLE = ("epochs", "schedule.", "evaluate.", "save.", "tune.", "device.", "faults.", "data.root")  # if resumed
AUTO = "auto"  # in the place of a batch: tuned before training
_AUTO_ORIGIN = "auto: tuning begins here"  # of the batch that a recipe then has


@dataclass(frozen=True)
class Evaluate(Checked):
    """The recipe's [evaluate] table: when and how the accuracy is measured, besides at the end.

    Args:
        every: epochs between evaluations, above 0.
        start: no evaluation before this epoch but the one at the end; any number.
        target: the top-1 accuracy to reach, a fraction from 0 to 1 (0.94 for 94 %); 0: none.
        stop: end the training once the target is reached.
        views: "plain": the image alone; "mirror": its mirror image too; "crops": both and shifted crops, where unsure.
        batch: images at once, 0 or more; 0: as in training, and in `eval` and `predict` at most 256 a rank.
        stale: show also the accuracy without Recalibrate, which tells what stale BatchNorm averages cost.
    """

    every: Annotated[float, Range("epochs between evaluations", above=0, below=math.inf)] = 1.0
    start: float = 0.0
    target: Annotated[float, Range("a fraction, 0.94 for 94 %", at_least=0, at_most=1)] = 0.0
    stop: bool = True
    views: Literal["plain", "mirror", "crops"] = "plain"
    batch: Annotated[int, Range("0 takes as many as training does", at_least=0)] = 0
    stale: bool = False


@dataclass(frozen=True)
class Save(Checked):
    """The recipe's [save] table: checkpoints, and where the results go.

    Args:
        every_s: seconds between two checkpoints, 0 or more; 0: not by time.
        every_steps: steps between two checkpoints, 0 or more; 0: not by steps.
        keep: the number of checkpoints that are kept, at least 1.
        upload: the address of a folder, such as s3://bucket/runs; at the end the results go into a folder below it with
            the name of the run folder; empty: none. A password in an address here is in their recipe.toml too.
    """

    every_s: Annotated[float, Range("0 for none by time", at_least=0)] = 300.0
    every_steps: Annotated[int, Range("0 for none by steps", at_least=0)] = 0
    keep: Annotated[int, Range("checkpoints", at_least=1)] = 2
    upload: str = ""


@dataclass(frozen=True)
class Faults(Checked):
    """The recipe's [faults] table: what happens when ranks are lost.

    Args:
        elastic: the ranks that are left go on in place, from a copy of the state in memory. False: all end with code 4.
        dead_s: seconds without a heartbeat, at least 3, after which a rank is dead.
    """

    elastic: bool = True
    dead_s: Annotated[float, Range("three heartbeats", at_least=3, below=math.inf)] = 6.0


@dataclass(frozen=True)
class Tune(Checked):
    """The recipe's [tune] table: how `kasoku tune`, and `kasoku train` with batch = "auto", choose the batch.

    Args:
        strategy: `use` names a strategy with its arguments, such as kasoku.tune.Throughput, or one of your own;
            TimeToTarget if it is left out.
        budget: seconds of tuning, above 0; then the best batch so far is taken.
    """

    strategy: Factory | None = None
    budget: Annotated[float, Range("seconds", above=0, below=math.inf)] = 60.0


@dataclass(frozen=True)
class Recipe(Checked):
    """The whole document. It has no world size: `batch` is global, and each device's share is derived.

    If the document says batch = "auto", `batch` is where tuning begins: `kasoku train` tunes before it trains, and its
    run folder has the recipe at the chosen size.

    Args:
        model: the network: `use` names a function of num_classes, in_channels and image_size, of which it may lack any.
        data: the data source.
        optimizer: `use` names a function model -> optimizer.
        epochs: passes over the training images, above 0 and at most 100,000; a fraction ends in mid-epoch.
        batch: images of one update, over all devices together, at least 1; or "auto", with a reference_batch or points.
        loss: `use` names a function (outputs, labels) -> loss.
        schedule: the factor on the optimizer's rates, by progress in epochs.
        techniques: what else changes the training; sorted by stage. List LowResolution before Mix.
        accumulate: the parts of its share that a device takes one after the other, 0 or more, a divisor of batch; 0: a
            virtual rank at a time, or all at once.
        norm_batch: images that share BatchNorm statistics, 0 or more, a divisor of batch; 0: what a device takes at
            once.
        norm_average: epochs, 0 or more, that BatchNorm's running statistics remember; 0: each module's own momentum.
        last_batch: an epoch's incomplete batch is left out ("drop"), or filled up with other images ("fill").
        reference_batch: the batch that the optimizer's rates are for; they follow `batch` by `scaling`; 0 or more; 0:
            this one.
        scaling: rates grow in proportion to batch / reference_batch, to its root, or to its root with a warm-up that
            grows in proportion (LEGW).
        origin: where settings that depend on the batch come from; kasoku writes it.
        seed: the seed of all random numbers, 0 or more and below 2^63.
        evaluate: when and how the accuracy is measured.
        device: the device, precision and threads.
        save: checkpoints, and where the results go.
        tune: how the batch is chosen.
        faults: what happens when ranks are lost.
    """

    model: Factory
    data: Factory
    optimizer: Factory
    epochs: Annotated[float, Range(above=0, at_most=_MOST_EPOCHS)]
    batch: Annotated[int, Range("images", at_least=1)]
    loss: Factory = field(default_factory=lambda: Factory("kasoku.optim.cross_entropy"))
    schedule: Schedule = field(default_factory=Constant)
    techniques: tuple[Technique, ...] = ()
    accumulate: int = 0
    norm_batch: int = 0
    norm_average: Annotated[float, Range("0 for each module's own momentum", at_least=0, below=math.inf)] = 0.0
    last_batch: Literal["drop", "fill"] = "drop"
    reference_batch: Annotated[int, Range("0 for this batch", at_least=0)] = 0
    scaling: Literal["linear", "sqrt", "legw"] = "linear"
    origin: str = ""  # read by `auto_batch`
    seed: Annotated[int, Range(at_least=0, below=2**63)] = 0
    evaluate: Evaluate = Evaluate()
    device: Device = field(default_factory=Device)
    save: Save = Save()
    tune: Tune = Tune()
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate < 0 or (self.accumulate and self.batch % self.accumulate):
            raise InputError(f"accumulate={self.accumulate}: a divisor of batch={self.batch}, from 1 on")
        if self.norm_batch < 0 or (self.norm_batch and self.batch % self.norm_batch):
            raise InputError(f"norm_batch={self.norm_batch}: a divisor of batch={self.batch}, or 0")
        once = self.batch // max(1, self.accumulate)
        if self.accumulate and once < self.norm_batch:
            got = f"with accumulate={self.accumulate} a part of the batch has {once} images"
            advice = f"a group cannot span parts: accumulate at most {self.batch // self.norm_batch}"
            raise InputError(f"norm_batch={self.norm_batch}: {got}, and {advice}")
        _ = self.scaled_schedule  # raises where it cannot be that long

    @property
    def auto_batch(self) -> bool:
        """Whether the document says batch = "auto"."""
        return self.origin == _AUTO_ORIGIN

    @property
    def batch_scale(self) -> float:
        """The batch in reference batches."""
        return self.batch / self.reference_batch if self.reference_batch else 1.0

    @property
    def rate_scale(self) -> float:
        """The factor of the optimizer's rates.

        Ref: linear: [004]; Goyal et al. 2017. sqrt: Krizhevsky 2014 (arXiv 1404.5997). legw: sqrt, and the warm-up's
        epochs grow linearly: You et al. 2019 (arXiv 1901.08256).
        """
        return self.batch_scale if self.scaling == "linear" else math.sqrt(self.batch_scale)

    @property
    def scaled_schedule(self) -> Schedule:
        """The schedule over `epochs`, unless it has its own; `scaling = "legw"` stretches its warm-up."""
        warmup, epochs = self.schedule.warmup, self.schedule.epochs or self.epochs
        if self.scaling == "legw":
            longer = self.batch_scale * epoch_of(warmup, epochs, "schedule")
            warmup = longer if longer >= 1 else longer / epochs
        schedule = replace(self.schedule, warmup=warmup, epochs=epochs)
        if schedule.warmup_epochs > self.epochs:
            got = f"{warmup:g} epochs, longer than the training (epochs={self.epochs:g})"
            raise InputError(f"schedule.warmup: {got}: shorten it or train longer")
        return schedule

    @cached_property
    def scaled_techniques(self) -> tuple[Technique, ...]:
        """The techniques that `kasoku train` applies, with times that follow `epochs`."""
        averaged = any(technique.averages_gradients for technique in self.techniques)
        pairs = [(technique, technique.over(self.epochs)) for technique in self.techniques]
        # Asynchronous(max_staleness=0), which becomes Overlap, leaves this to a technique beside it
        return tuple(new for old, new in pairs if new is old or not (averaged and new.averages_gradients))

    def parts(self, ranks: int) -> int:
        """The number of parts in which each rank takes its share of a batch."""
        virtual = self.batch // (self.norm_batch * ranks) if self.norm_batch else 1
        return self.accumulate or max(1, virtual)

    def images_at_once(self, ranks: int) -> int:
        """The images of a part, which pass through the network together."""
        return self.batch // (ranks * self.parts(ranks))

    def images_per_norm(self, ranks: int) -> int:
        """The images that share BatchNorm statistics: `norm_batch`, or a part."""
        return self.norm_batch or self.images_at_once(ranks)


def checked(thing: Any, kind: type[T], path: str) -> T:
    """The result of a table's `use`, if it is of this kind. Raises InputError with the table's path otherwise."""
    if not isinstance(thing, kind):
        raise InputError(f"{path}.use: a {kind.__name__} is wanted, this gives a {type(thing).__name__}")
    return thing


def check_data(recipe: Recipe) -> None:
    """Raises InputError where the data source lacks an argument that it must have; reads no data."""
    for name, p in parameters_of(resolve(recipe.data.use, "data.use")).items():
        variable = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.default is p.empty and not variable and recipe.data.keys.get(name, "") == "":
            raise InputError(f"data.{name} is not given, and {recipe.data.use} needs it: --set data.{name}=...")


def read_early(recipe: Recipe) -> None:
    """Reads one of kasoku's data sets in memory for the processes that are forked from this one; no other source."""
    if recipe.data.use in _IN_MEMORY:
        _READ.append((recipe.data, recipe.data()))


def dataset(recipe: Recipe) -> Dataset:
    """The recipe's data; of a network with a mean and a standard deviation of its own, normalised by these."""
    data = next((data for use, data in _READ if use == recipe.data), None) or checked(recipe.data(), Dataset, "data")
    mean, std = libraries.normalisation(recipe.model) or ((), ())
    return replace(data, mean=mean, std=std) if len(mean) == len(std) == data.channels else data


def network(recipe: Recipe, num_classes: int, in_channels: int, image_size: int, *, weights: bool = True) -> nn.Module:
    """The recipe's network. Raises InputError if its `use` gives no Module, or one that does not fit into memory.

    `weights`: loads those that its keys name; False where a checkpoint follows, so that their file may be gone.
    """
    try:
        made = libraries.build(recipe.model, num_classes, in_channels, image_size, weights=weights)
        model = checked(made, nn.Module, "model")
        if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):  # of LazyLinear and its like
            with torch.no_grad():
                model.eval()(torch.zeros(2, in_channels, image_size, image_size))
        return model.train()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _TOO_LARGE):
            raise
        raise InputError(f"model: does not fit into memory ({summary(error)}): choose smaller layers") from error


def optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer for a model. Raises InputError if its `use` is no function model -> optimizer."""
    try:
        rule = recipe.optimizer(model)
    except TypeError as error:
        wanted = "a function model -> optimizer is wanted, such as kasoku.optim.sgd"
        raise InputError(f"optimizer.use = {recipe.optimizer.use}: {error}; {wanted}") from error
    return checked(rule, Optimizer, "optimizer")


def load(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, or the recipe of ours with this name, with `path=value` settings over it.

    Raises InputError with the path of what is wrong.
    """
    return from_document(read_document(locate(path)), settings)


def read_document(file: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The TOML document of a recipe file, with settings over it."""
    ours = f", or the name of one that comes with kasoku{nearest(file.stem, list(RECIPES))}"
    return read(file, settings, wanted=f"a recipe file is wanted{ours if file.parent == Path() else ''}")


def from_document(document: dict[str, Any], settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a document."""
    for setting in settings:
        override(document, setting)
    first = None  # where tuning begins: a batch whose settings are known, the reference batch or the smallest point
    if document.get("batch") == AUTO:
        reference = document.get("reference_batch")
        known = [reference] if reference else batches_of_points(document)
        first = min((batch for batch in known if type(batch) is int and batch > 0), default=None)
        if first is None:
            advice = "give reference_batch, the batch they are for"
            raise InputError(f'batch = "auto": the rates follow the batch that tuning chooses: {advice}')
        document["batch"] = first
    if "points" in document:
        document = at_batch(document, document.pop("points"))
        for setting in settings:  # they override the points too
            override(document, setting)
        document.pop("points", None)
    return parse(Recipe, {**document, "batch": first, "origin": _AUTO_ORIGIN} if first else document)


def batches_of_points(document: dict[str, Any]) -> list[int]:
    """The batches of the points of a document; empty if it has no points."""
    points = document.get("points")
    return [p["batch"] for p in points if isinstance(p, dict) and "batch" in p] if isinstance(points, list) else []


def at_batch(document: dict[str, Any], points: Any) -> dict[str, Any]:
    """The document with the settings of its `points` for its batch.

    A point is a table of settings that hold at its `batch`. Between two points, numbers are interpolated linearly in
    the logarithm of the batch. Raises InputError for points that are not such tables, and for a batch outside them.
    """
    batch = document.get("batch")
    valid = isinstance(points, list) and all(isinstance(p, dict) and type(p.get("batch")) is int for p in points)
    if not valid or any(p["batch"] < 1 for p in points) or len({p["batch"] for p in points}) < len(points):
        raise InputError("points: [[points]] tables are wanted, each of another batch (at least 1), with its settings")
    ordered = sorted(points, key=lambda point: int(point["batch"]))
    if not ordered or type(batch) is not int:
        return document
    below = [p for p in ordered if p["batch"] <= batch]
    above = [p for p in ordered if p["batch"] >= batch]
    if not below or not above:
        advice = "choose one of these, or --set points=[] and give the settings yourself"
        smallest, largest = ordered[0]["batch"], ordered[-1]["batch"]
        raise InputError(f"batch={batch}: this recipe has settings for {smallest} to {largest}; {advice}")
    low, high = below[-1], above[0]
    if low is high:
        return _merged(document, {**low, "origin": f"the point {batch:,}"})
    fraction = math.log(batch / low["batch"]) / math.log(high["batch"] / low["batch"])
    origin = f"between the points {low['batch']:,} and {high['batch']:,}, interpolated: ours"
    return _merged(document, {**_between(low, high, fraction), "batch": batch, "origin": origin})


def _between(low: Any, high: Any, fraction: float) -> Any:
    if isinstance(low, dict):
        if not isinstance(high, dict) or low.keys() != high.keys():
            raise InputError(f"points: {sorted(low)} beside {high}: all of them must give the same settings")
        return {key: _between(low[key], high[key], fraction) for key in low}
    if low == high:
        return low
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in (low, high)):
        raise InputError(f"points: between {low} and {high} nothing can be interpolated; choose the batch of a point")
    return low + (high - low) * fraction


def _merged(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    out = dict(document)
    for key, value in part.items():
        deeper = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if deeper else value
    return out


def flat_settings(document: Any, prefix: str = "") -> dict[str, Any]:
    """A recipe's `table`, flat: {"optimizer.lr": 0.1, "techniques.0.decay": 0.9, ...}."""
    flat: dict[str, Any] = {}
    for key, value in enumerate(document) if isinstance(document, list) else document.items():
        path = f"{prefix}{key}"
        flat |= flat_settings(value, f"{path}.") if isinstance(value, dict | list) else {path: value}
    return flat


def dumps(recipe: Recipe) -> str:
    """The resolved recipe as TOML, which `load` reads back to an equal one."""
    return tomli_w.dumps(table(recipe) | ({"batch": AUTO, "origin": ""} if recipe.auto_batch else {}))
