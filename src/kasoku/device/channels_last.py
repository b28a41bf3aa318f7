"""Memory layout of images: channels last, as the fast convolution kernels want them."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kasoku.core import Job, Stage, Technique
from kasoku.core.hardware import laid_out_like


@dataclass(frozen=True)
class ChannelsLast(Technique, stage=Stage.MODEL, in_sandbox=False):
    """Lays convolution weights, and so all activations, out with channels last in memory (NHWC).

    The parameters stay the same objects. Their gradients must have their layout: torch's fused optimizers on CPU read
    both as flat memory without a check, so a flat gradient buffer needs views with `p.stride()`.

    Saves: time: the convolution kernels need no reordering.
    Costs: rounding may differ from the other layout.
    Ref: torch's memory format tutorial.
    """

    def apply(self, job: Job) -> None:
        """Converts the weights of four dimensions, and back at close."""
        for module in job.model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                p, before = module.weight, torch.empty_like(module.weight.detach(), device="meta")
                _lay(job, p, before.contiguous(memory_format=torch.channels_last))
                job.on_close(functools.partial(_lay, job, p, before))


def _lay(job: Job, p: Tensor, like: Tensor) -> None:
    """Lays out the parameter, its gradient and the optimizer's state of it."""
    p.data = laid_out_like(like, p.data)
    if p.grad is not None:
        p.grad = laid_out_like(like, p.grad)
    state = job.state_of(p)
    state.update({name: laid_out_like(like, x) for name, x in state.items()})
