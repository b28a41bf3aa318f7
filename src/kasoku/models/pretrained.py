"""Fine-tuning as a technique: loads published weights and freezes the first blocks."""

from dataclasses import dataclass
from typing import ClassVar

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.models.weights import freeze, load


@dataclass(frozen=True)
class Pretrained(Technique):
    """Starts from a file of published weights and freezes the first `freeze` blocks.

    Saves: most of the epochs. Costs: nothing. Maths: a frozen block's BatchNorm keeps its statistics too.
    Ref: Yosinski et al. 2014 (arXiv 1411.1792).
    Raises InputError for weights of another network. If only the number of classes differs, the head starts fresh.
    """

    stage: ClassVar[Stage] = Stage.MODEL
    in_sandbox: ClassVar[bool] = False
    weights: str
    freeze: int = 0

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError("weights: missing; the file to start from, .safetensors or a torch file of weights")

    def apply(self, job: Job) -> None:
        """Loads the weights and freezes the blocks; undo unfreezes the blocks but keeps the weights."""
        load(job.model, self.weights)
        trained = [p for p in job.model.parameters() if p.requires_grad]
        freeze(job.model, self.freeze)
        job.undo(lambda: [p.requires_grad_() for p in trained])
