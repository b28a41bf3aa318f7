"""Half precision: torch.autocast around the model's forward, and dynamic loss scaling, which fp16 needs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kasoku.core import InputError, Job, Range, Stage, Technique
from kasoku.core.torch_internals import unscale_and_check

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Autocast(Technique, stage=Stage.COMPILE):
    """Computes convolutions and matrix products in half precision; weights, sums and outputs stay float32.

    Args:
        dtype: "bf16"; or "fp16" where the device has no bf16 (V100, T4), together with LossScale.

    Saves: time and memory: twice or more the arithmetic, half the bytes of activations.
    Costs: rounding to 8 (bf16) or 11 (fp16) bits inside a layer.
    Ref: Micikevicius et al. 2018 (arXiv 1710.03740); torch.autocast.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def apply(self, job: Job) -> None:
        kind = next((p.device.type for p in job.model.parameters()), "cpu")
        # A partial of the bound method, no closure: a deep copy of the model then runs its own weights.
        job.patch(job.model, "forward", functools.partial(_half, job.model.forward, kind, DTYPES[self.dtype]))


def _half(forward: Callable[..., Any], kind: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(kind, dtype=dtype):
        outputs = forward(*args, **kwargs)
        return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, outputs)


@dataclass(frozen=True)
class LossScale(Technique, stage=Stage.GRADIENT, vetoes_steps=True):
    """Scales the gradient up through the backward pass, so that fp16 does not round small ones to zero.

    The loss itself is not changed. A loop takes it from `job.loss`: the gradients of another loss would be divided by a
    scale that did not multiply them. A step whose gradients are not all finite is left out, on every rank, and the
    scale is divided by `factor`; after `every` good steps it is multiplied by it. Under Overlap each rank looks at its
    own gradients as they are sent, so the decision waits for no bucket and updates stay behind the next forward. Beside
    Asynchronous each rank (or node) has a scale of its own.

    Args:
        start: first scale, above 0.
        factor: of growth and of retreat, above 1.
        every: good steps in a row before it grows, at least 1.

    Saves: accuracy in fp16.
    Costs: a pass over the gradients, and one wait for the device a step; on several ranks for a number of each rank.
    Ref: Micikevicius et al. 2018 (arXiv 1710.03740), 3.2.
    """

    start: Annotated[float, Range(above=0)] = 65536.0
    factor: Annotated[float, Range(above=1)] = 2.0
    every: Annotated[int, Range(at_least=1)] = 2000

    def apply(self, job: Job) -> None:
        """Scales behind the loss; unscales and checks before clipping, unless Overlap has done so."""
        scaler = _Scaler(job, self)
        job.patch(job, "loss", scaler.loss)
        job.decide_step(scaler.decide)
        job.before_step(scaler.unscale)
        job.after_regrouping(scaler.agree)
        job.keep("loss_scale", scaler)


class _Scaler:
    def __init__(self, job: Job, settings: LossScale) -> None:
        self.job, self.settings = job, settings
        self.inner: Callable[[Any, Tensor], Tensor] = job.loss
        self.scale, self.good = settings.start, 0
        self.scaled = False  # the loss of this step
        self.decided = False  # another technique has asked on this step, and unscales its gradients

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        loss = self.inner(outputs, labels)
        if loss.requires_grad:
            scale, self.scaled = self.scale, True
            loss.register_hook(lambda gradient: gradient * scale)  # type: ignore[no-untyped-call]
        return loss

    def agree(self) -> None:
        """Ranks that run ahead of each other have scales of their own; those that step together take the smallest."""
        self.scale, self.good = min(self.job.step_comm.gather_objects((self.scale, self.good)))

    def decide(self, overflow: Tensor) -> float | None:
        """The factor that unscales this step's gradients; None if those of a rank overflow, and the scale falls."""
        self.decided = True
        flags = torch.cat([overflow, torch.full_like(overflow, float(self.scaled))])
        with self.job.trace.span("wait", "an overflow on any rank"):
            self.job.step_comm.all_reduce(flags, op="max").wait()
        overflows, scaled = flags.tolist()
        scale, factor, self.scaled = self.scale, self.settings.factor, False
        if overflows:
            self.scale, self.good = max(scale / factor, 2.0**-100), 0  # 1 / scale is finite in float32
            return None
        if not scaled:
            raise InputError("LossScale: a loss that is not of job.loss was not scaled: call job.loss(outputs, labels)")
        self.good += 1
        if self.good == self.settings.every:
            self.scale, self.good = scale * factor, 0
        return 1 / scale

    @torch.no_grad()
    def unscale(self) -> None:
        params = list(self.job.model.parameters())
        grads = [p.grad for p in params if p.grad is not None]
        if grads and not self.decided:
            overflow = torch.zeros(1, device=grads[0].device)
            unscale_and_check(grads, overflow, torch.full_like(overflow, 1 / self.scale))
            if self.decide(overflow) is None:
                for p in params:
                    p.grad = None  # the optimizer then leaves them where they are
        self.decided = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good = state["scale"], state["good"]
