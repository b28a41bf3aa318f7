"""Global-norm clipping."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from kasoku.core import Job, Range, Technique


@dataclass(frozen=True)
class Clip(Technique, needs_whole_gradients=True):
    """Scales all gradients down together when their common norm exceeds a limit.

    Args:
        norm: the limit for the norm of all gradients, taken as one vector, above 0; inf never clips.

    Saves: runs that would diverge: a rare bad batch cannot throw the weights far.
    Costs: a pass over the gradients; no parameter is updated before all gradients are ready.
    Maths: g *= min(1, norm / |g|).
    Ref: Pascanu et al. 2013 (arXiv 1211.5063).
    """

    norm: Annotated[float, Range("leave the technique out to clip nothing", above=0)] = 1.0

    def apply(self, job: Job) -> None:
        params = [p for p in job.model.parameters() if p.requires_grad]
        job.before_step(lambda: nn.utils.clip_grad_norm_(params, self.norm))
