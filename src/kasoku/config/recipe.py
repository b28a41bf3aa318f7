"""A recipe: what to train, to which accuracy. Read from strict TOML, written back resolved beside every result."""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from torch import nn
from torch.optim import Optimizer

from kasoku.config.toml import Factory, override, parse, tables
from kasoku.core import Constant, InputError, Schedule, Technique
from kasoku.device import Device

T = TypeVar("T")
AUTO = "auto"  # in the place of a batch: tuned before training


@dataclass(frozen=True)
class Evaluate:
    """When and how the accuracy is measured: every so many epochs, from `start` on, and always at the end."""

    every: float = 1.0
    start: float = 0.0
    target: float = 0.0  # top-1 to reach, 0 to 1; 0: none
    stop: bool = True  # end the training once the target is reached
    views: Literal["plain", "mirror", "crops"] = "plain"  # test-time averaging
    batch: int = 0  # images at once; 0: as in training
    stale: bool = False  # also show the accuracy without Recalibrate: what stale BatchNorm averages cost

    def __post_init__(self) -> None:
        if not 0 < self.every < math.inf:
            raise InputError(f"every={self.every}: epochs between evaluations, above 0")
        if not 0 <= self.target <= 1:
            raise InputError(f"target={self.target}: a fraction from 0 to 1 (0.94 for 94 %)")


@dataclass(frozen=True)
class Save:
    """How often a checkpoint is written, in seconds and in steps (0: not by that measure), and how many are kept."""

    every_s: float = 300.0
    every_steps: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every_s < 0 or self.every_steps < 0 or self.keep < 1:
            raise InputError("every_s and every_steps: 0 or more; keep: at least 1 checkpoint")


@dataclass(frozen=True)
class Recipe:
    """The whole document. No world size: `batch` is global, what one device takes is derived.

    With batch = "auto" in the document, `batch` is where tuning begins and `auto_batch` is set: `kasoku train` tunes
    before it trains, and its run folder has the recipe of the size found.
    """

    model: Factory
    data: Factory
    optimizer: Factory
    epochs: float
    batch: int
    loss: Factory = field(default_factory=lambda: Factory("kasoku.optim.cross_entropy"))
    schedule: Schedule = field(default_factory=Constant)
    techniques: tuple[Technique, ...] = ()
    accumulate: int = 0  # parts a device takes one after the other; 0: a virtual rank at a time, or all at once
    norm_batch: int = 0  # images that share BatchNorm statistics; 0: what a device takes at once
    norm_average: float = 0.0  # epochs that running statistics remember; 0: each module's own momentum
    last_batch: Literal["drop", "fill"] = "drop"  # an epoch's incomplete batch: left out, or filled up
    reference_batch: int = 0  # the batch the optimizer's rates are for; they follow `batch` by `scaling`. 0: this one
    scaling: Literal["linear", "sqrt", "legw"] = "linear"
    origin: str = ""  # where settings that depend on the batch come from; written by kasoku
    seed: int = 0
    evaluate: Evaluate = Evaluate()
    device: Device = field(default_factory=Device)
    save: Save = Save()
    auto_batch: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs={self.epochs}: above 0, and finite")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed}: from 0 to 2^63 - 1")
        if self.batch < 1:
            raise InputError(f"batch={self.batch}: at least 1 image")
        if self.reference_batch < 0:
            raise InputError(f"reference_batch={self.reference_batch}: the batch the rates are for, or 0")
        if self.accumulate < 0 or (self.accumulate and self.batch % self.accumulate):
            raise InputError(f"accumulate={self.accumulate}: a divisor of batch={self.batch}, from 1 on")
        if self.norm_batch < 0 or (self.norm_batch and self.batch % self.norm_batch):
            raise InputError(f"norm_batch={self.norm_batch}: a divisor of batch={self.batch}, or 0")
        once = self.batch // max(1, self.accumulate)
        if self.accumulate and once < self.norm_batch:
            raise InputError(
                f"norm_batch={self.norm_batch}: with accumulate={self.accumulate} a part of the batch has {once} "
                f"images, and a group cannot span parts: accumulate at most {self.batch // self.norm_batch}"
            )
        if not 0 <= self.norm_average < math.inf:
            raise InputError(f"norm_average={self.norm_average}: epochs above 0, or 0 for each module's own momentum")
        warmup = self.course.warmup
        if warmup > self.epochs:
            raise InputError(
                f"schedule.warmup: {warmup:g} epochs, longer than the training (epochs={self.epochs:g}): shorten it or "
                "train longer"
            )

    @property
    def batch_scale(self) -> float:
        """How many reference batches the batch is."""
        return self.batch / self.reference_batch if self.reference_batch else 1.0

    @property
    def rate_scale(self) -> float:
        """What the optimizer's rates are multiplied by.

        Ref: linear: [004]; Goyal et al. 2017. sqrt: Krizhevsky 2014 (arXiv 1404.5997). legw: sqrt, and the warm-up's
        epochs grow linearly: You et al. 2019 (arXiv 1901.08256).
        """
        return self.batch_scale if self.scaling == "linear" else math.sqrt(self.batch_scale)

    @property
    def course(self) -> Schedule:
        """The schedule at this batch."""
        if self.scaling != "legw" or self.batch_scale == 1:
            return self.schedule
        return replace(self.schedule, warmup=self.schedule.warmup * self.batch_scale)

    def parts(self, ranks: int) -> int:
        """In how many parts each of so many ranks takes its share of a batch."""
        virtual = self.batch // (self.norm_batch * ranks) if self.norm_batch else 1
        return self.accumulate or max(1, virtual)


def made(thing: Any, kind: type[T], path: str) -> T:
    """What a table gave, if it is of the kind wanted. Raises InputError with the table's path otherwise."""
    if not isinstance(thing, kind):
        raise InputError(f"{path}.use: a {kind.__name__} is wanted, this gives a {type(thing).__name__}")
    return thing


def optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer for a model. Raises InputError where its table gives something else."""
    try:
        rule = recipe.optimizer(model)
    except TypeError as error:
        wanted = "a function model -> optimizer is wanted, such as kasoku.optim.sgd"
        raise InputError(f"optimizer.use = {recipe.optimizer.use}: {error}; {wanted}") from error
    return made(rule, Optimizer, "optimizer")


def load(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, with `path=value` settings over it. Raises InputError with the path of what is wrong."""
    return from_document(_read(path), settings)


def own_folders(path: Path | None) -> list[str]:
    """Where a recipe file's own modules may lie: in the current folder, beside it, or beside what it was planned from.

    The last are in the plan.json that `kasoku plan` writes beside the recipe.
    """
    folders = [str(Path.cwd()), *([str(path.resolve().parent)] if path else [])]
    try:
        planned = json.loads((path.parent / "plan.json").read_text())["import_folders"] if path else []
        return [*folders, *(str(folder) for folder in planned)]
    except (OSError, ValueError, KeyError, TypeError):
        return folders


def points(path: Path, settings: Sequence[str] = ()) -> list[int]:
    """The batches that a recipe file, with settings over it, has points for; none where it has no points."""
    document = _read(path)
    for setting in settings:
        override(document, setting)
    given = document.get("points")
    return [p["batch"] for p in given if isinstance(p, dict) and "batch" in p] if isinstance(given, list) else []


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): a recipe file is wanted") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML ({error})") from error


def from_document(document: dict[str, Any], settings: Sequence[str] = ()) -> Recipe:
    """The same from a parsed document."""
    for setting in settings:
        override(document, setting)
    begin = _where_tuning_begins(document) if document.get("batch") == AUTO else None
    if begin:
        document["batch"] = begin
    if "points" in document:
        document = at_batch(document, document.pop("points"))
        for setting in settings:  # what was asked for by name stands above the points
            override(document, setting)
        document.pop("points", None)
    if not begin:
        return parse(Recipe, document)
    recipe = parse(Recipe, {**document, "batch": begin, "origin": "auto: tuning begins here"})
    object.__setattr__(recipe, "auto_batch", True)
    return recipe


def _where_tuning_begins(document: dict[str, Any]) -> int:
    """A batch whose settings are known: the one the rates are for, or the smallest of the points."""
    reference, points = document.get("reference_batch"), document.get("points")
    of_points = [p.get("batch") for p in points if isinstance(p, dict)] if isinstance(points, list) else []
    for known in ([reference], of_points):
        batches = [batch for batch in known if type(batch) is int and batch > 0]
        if batches:
            return min(batches)
    raise InputError(
        'batch = "auto": the rates follow the batch that is found: give reference_batch, the batch that they are for'
    )


def at_batch(document: dict[str, Any], points: Any) -> dict[str, Any]:
    """The document with the settings its `points` give for its batch.

    A point is a part of a document that holds at its `batch`. Between two of them numbers are interpolated, linearly
    in the logarithm of the batch.

    Raises:
        InputError: for points that are no such tables, and for a batch outside them.
    """
    batch = document.get("batch")
    fine = isinstance(points, list) and all(isinstance(p, dict) and type(p.get("batch")) is int for p in points)
    if not fine or any(p["batch"] < 1 for p in points) or len({p["batch"] for p in points}) < len(points):
        raise InputError(
            "points: [[points]] tables are wanted, each of another batch (at least 1) and what holds there"
        )
    ordered = sorted(points, key=lambda point: int(point["batch"]))
    if not ordered or type(batch) is not int:
        return document
    below = [p for p in ordered if p["batch"] <= batch]
    above = [p for p in ordered if p["batch"] >= batch]
    if not below or not above:
        raise InputError(
            f"batch={batch}: this recipe has settings for {ordered[0]['batch']} to {ordered[-1]['batch']}; choose one "
            "of these, or --set points=[] and give the settings yourself"
        )
    low, high = below[-1], above[0]
    if low is high:
        return _merged(document, {**low, "origin": f"the point {batch:,}"})
    way = math.log(batch / low["batch"]) / math.log(high["batch"] / low["batch"])
    origin = f"between the points {low['batch']:,} and {high['batch']:,}, interpolated: ours"
    return _merged(document, {**_between(low, high, way), "batch": batch, "origin": origin})


def _between(low: Any, high: Any, way: float) -> Any:
    if isinstance(low, dict):
        if not isinstance(high, dict) or low.keys() != high.keys():
            raise InputError(f"points: {sorted(low)} beside {high}: all of them must give the same settings")
        return {key: _between(low[key], high[key], way) for key in low}
    if low == high:
        return low
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in (low, high)):
        raise InputError(f"points: between {low} and {high} there is nothing; choose the batch of a point")
    return low + (high - low) * way


def _merged(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    out = dict(document)
    for key, value in part.items():
        deeper = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if deeper else value
    return out


def dumps(recipe: Recipe) -> str:
    """The resolved recipe as TOML, which `load` reads back to an equal one."""
    auto = {"batch": AUTO, "origin": ""} if recipe.auto_batch else {}
    return tomli_w.dumps({**tables(recipe), **auto})
