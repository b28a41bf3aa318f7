"""A recipe: what to train, to which accuracy. Read from strict TOML, written back resolved beside every result."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from kasoku.core import Constant, Factory, InputError, Schedule, Technique
from kasoku.core.toml import override, parse, tables
from kasoku.device import Device


@dataclass(frozen=True)
class Evaluate:
    """When and how the accuracy is measured: every so many epochs, from `start` on, and always at the end."""

    every: float = 1.0
    start: float = 0.0
    target: float = 0.0  # top-1 to reach, 0 to 1; 0: none
    stop: bool = True  # end the training once the target is reached
    views: Literal["plain", "mirror", "crops"] = "plain"  # test-time averaging
    batch: int = 0  # images at once; 0: as in training

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
    """The whole document. No world size: `batch` is global, what one device takes is derived."""

    model: Factory
    data: Factory
    optimizer: Factory
    epochs: float
    batch: int
    loss: Factory = field(default_factory=lambda: Factory("kasoku.optim.cross_entropy"))
    schedule: Schedule = field(default_factory=Constant)
    techniques: tuple[Technique, ...] = ()
    accumulate: int = 1
    reference_batch: int = 0  # the batch the optimizer's rates are for; they follow `batch` linearly. 0: this one
    seed: int = 0
    evaluate: Evaluate = Evaluate()
    device: Device = field(default_factory=Device)
    save: Save = Save()

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs={self.epochs}: above 0, and finite")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed}: from 0 to 2^63 - 1")
        if self.batch < 1:
            raise InputError(f"batch={self.batch}: at least 1 image")
        if self.reference_batch < 0:
            raise InputError(f"reference_batch={self.reference_batch}: the batch the rates are for, or 0")
        if self.accumulate < 1 or self.batch % self.accumulate:
            raise InputError(f"accumulate={self.accumulate}: a divisor of batch={self.batch}, from 1 on")

    @property
    def rate_scale(self) -> float:
        """What the optimizer's rates are multiplied by: the linear scaling rule. Ref: [004]; Goyal et al. 2017."""
        return self.batch / self.reference_batch if self.reference_batch else 1.0


def load(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, with `path=value` settings over it. Raises InputError with the path of what is wrong."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): a recipe file is wanted") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    return from_document(document, settings)


def from_document(document: dict[str, Any], settings: Sequence[str] = ()) -> Recipe:
    """The same from a parsed document."""
    for setting in settings:
        override(document, setting)
    return parse(Recipe, document)


def dumps(recipe: Recipe) -> str:
    """The resolved recipe as TOML, which `load` reads back to an equal one."""
    return tomli_w.dumps(tables(recipe))
