"""Fine-tuning as a technique: published weights in, the first blocks left as they are."""

from dataclasses import dataclass
from typing import ClassVar

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.models.weights import freeze, load


@dataclass(frozen=True)
class Pretrained(Technique):
    """Starts from a file of published weights; the first `freeze` blocks keep them.

    Saves: most of the epochs. Costs: nothing. Maths: a frozen block's BatchNorm keeps its statistics too.
    Ref: Yosinski et al. 2014 (arXiv 1411.1792).
    Raises InputError for weights of another network; with another number of classes the head starts fresh.
    """

    stage: ClassVar[Stage] = Stage.MODEL
    in_sandbox: ClassVar[bool] = False
    weights: str
    freeze: int = 0

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError("weights: missing; the file to start from, .safetensors or a torch file of weights")

    def apply(self, job: Job) -> None:
        """Loads and freezes; taking it off gives nothing back but the right to train."""
        load(job.model, self.weights)
        trained = [p for p in job.model.parameters() if p.requires_grad]
        freeze(job.model, self.freeze)
        job.undo(lambda: [p.requires_grad_() for p in trained])
