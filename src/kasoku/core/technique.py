"""A technique changes how a job trains: a frozen dataclass that is its own configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from kasoku.core.limits import Checked

if TYPE_CHECKING:
    from kasoku.core.comm import Comm


class Stage(IntEnum):
    """The order in which techniques are applied; their `before_step` hooks run in the opposite order.

    GRADIENT is for techniques that unscale reduced gradients before STEP techniques read them; NODE for those that
    exchange between groups of ranks, after COMM techniques have averaged within a group.
    """

    MODEL = 0
    MEMORY = 1
    COMPILE = 2
    DATA = 3
    STEP = 4
    GRADIENT = 5
    NODE = 6
    COMM = 7


@dataclass(frozen=True)
class Technique(Checked):
    """Base class of techniques. A subclass has its settings as fields, a `stage`, and `apply`.

    Other code reads these class attributes instead of a technique's class or name; your own techniques declare them in
    the same way, in the head of the class: `class Mine(Technique, needs_whole_gradients=True)`. `refuses` maps an
    attribute that another technique must not have beside this one to the reason and the remedy, which the error says.
    """

    stage: ClassVar[Stage] = Stage.STEP
    refuses: ClassVar[Mapping[str, str]] = {}

    exchanges_gradients: ClassVar[bool] = False  # sends gradients or updates to the other ranks
    averages_gradients: ClassVar[bool] = False  # replaces gradients by their means over the ranks of `job.step_comm`
    sums_exactly: ClassVar[bool] = False  # adds the gradients of all parts so that their order changes no bit
    overlaps_backward: ClassVar[bool] = False  # sends gradients in buckets while backward runs
    channels: ClassVar[int] = 0  # communicators of its own, opened while the training starts
    stale: ClassVar[bool] = False  # its steps use weights that may lack the latest updates of other ranks
    is_asynchronous: ClassVar[bool] = False  # its ranks step without waiting for each other
    skips_unused: ClassVar[bool] = False  # takes steps that do not use all parameters, instead of refusing them
    images_per_group: ClassVar[int] = 0  # images that share BatchNorm statistics, in whole groups a rank; 0: no groups
    averages_weights: ClassVar[bool] = False  # evaluates with other weights than those that are trained
    moves_weights: ClassVar[bool] = False  # changes weights by more than the optimizer's updates
    groups_span_ranks: ClassVar[bool] = False  # computes over the images of several ranks together
    renews_statistics: ClassVar[bool] = False  # measures BatchNorm's running statistics before evaluation
    compiles_model: ClassVar[bool] = False  # compiles the model or parts of it
    captures_graph: ClassVar[bool] = False  # replays forward and backward as a graph, in which no Python runs
    needs_whole_gradients: ClassVar[bool] = False  # reads all gradients before the first parameter is updated
    reads_state: ClassVar[bool] = False  # reads the optimizer's state, by parameter, between steps
    exchanges_losses: ClassVar[bool] = False  # tells all ranks the losses of a step's images
    vetoes_steps: ClassVar[bool] = False  # decides at each step, by `Job.decide_step`, whether any parameter changes
    saves_memory: ClassVar[bool] = False  # keeps less for backward than autograd does
    changes_pixels: ClassVar[bool] = False  # changes images of the loader, or their order of decoding
    mixes_images: ClassVar[bool] = False  # makes one training image of several
    changes_resolution: ClassVar[bool] = False  # trains on images of other sizes than the recipe's
    shares_batch: ClassVar[bool] = False  # its ranks take unequal shares of a batch
    in_sandbox: ClassVar[bool] = True  # is applied again to the copy of a job on which batch sizes are tried

    def __init_subclass__(cls, **declared: Any) -> None:
        super().__init_subclass__()
        for name, value in declared.items():
            if type(value) is not type(vars(Technique).get(name)):
                reason = "no declaration of Technique, or one of another type"
                raise TypeError(f"{cls.__name__}: {name}={value!r}: {reason}")
            setattr(cls, name, value)

    def apply(self, job: Any) -> None:
        """Installs itself on a `Job`, by its hooks and `job.patch`, which undo it; called once.

        Subclasses write `job: Job`; this file cannot, since job.py imports it.
        """
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def over(self, epochs: float) -> "Technique":
        """The technique that `kasoku train` applies in place of this one; its times may be shares of the training."""
        return self

    def ranks_in_step(self, comm: "Comm", applied: "Sequence[Technique]") -> "Comm":
        """Those of the ranks in `comm` that make each step together with this one, by all techniques. Collective."""
        return comm

    def warmed_up_rates(self, job: Any) -> list[float] | None:
        """The rate of each parameter group after the warm-up; None where this technique sets no rates."""
        return None

    def batch_factor(self, epoch: int) -> int:
        """The batch of an update in this epoch, as a multiple of the recipe's."""
        return 1

    def image_share(self, epoch: int) -> float:
        """The share of the training images that this epoch takes."""
        return 1.0

    def pixel_share(self, epoch: float, side: int) -> float:
        """The share of the pixels of square images of this side that a step computes with at this epoch."""
        return 1.0

    @classmethod
    def conflict(cls, other: "Technique | type[Technique]") -> str:
        """Why this technique cannot be combined with another; empty where it can."""
        theirs = other if isinstance(other, type) else type(other)
        if theirs is cls:
            return f"technique {cls.__name__} is given twice: leave one of them out"
        for one, another in ((cls, theirs), (theirs, cls)):
            if reason := next((line for name, line in one.refuses.items() if getattr(another, name)), ""):
                return f"techniques {theirs.__name__} and {cls.__name__} cannot be combined: {reason}"
        return ""
