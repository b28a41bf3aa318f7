"""The LARS step in torch operations, for CPUs and for devices without Triton.

Note: one update, three implementations. In every form, a step is V = keep V + f g + d w and w = shrink w - out V; f and
d follow from the tensor's two norms (`Rule`). On a CPU, torch's fused SGD computes it right after the norms, while the
tensor is still in the cache. On devices without Triton, foreach operations compute it and read no value back
to the host. `triton.py` has the third implementation.

Note: the scale of the buffer. The fused SGD applies its rate outside of its buffer; LARS needs it inside. So the CPU
stores u = V / s, with the number s in `state["scale"]`, and calls the kernel with momentum keep s / f and rate out f.
A state without a scale has s = 1. Every implementation reads both kinds, so a run may move between devices.

Note: norms in float32. On a CPU, torch.linalg.vector_norm of 10^7 random values was 3.6e-4 too small, and torch.dot
1.3e-4, since each vector lane keeps one running sum. Summing rows of 2,048 first is right to 1e-7 at the same speed.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kasoku.core.hardware import is_dense
from kasoku.core.torch_internals import fused_sgd

_ROW = 2048  # values in one running sum
_PLAIN: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False}  # of torch's fused SGD


@dataclass(frozen=True)
class Rule:
    """The numbers of a group's update at this step.

    With f = rate * trust and d = d0 + d1 * f: step = f * g + d * w; V = keep * V + step;
    w = shrink * w - out * V, with nesterov w = shrink * w - out * (step + momentum * V).
    """

    rate: float  # factor on the gradient, inside the buffer
    out: float  # factor on the buffer when it is subtracted from the weights
    momentum: float  # factor of Nesterov's look-ahead
    nesterov: bool  # whether the step looks ahead
    d0: float  # the part of d that does not depend on f
    d1: float  # the part of d that is proportional to f
    shrink: float  # factor on the weights before the step
    decay: float  # the weight decay in the trust ratio
    eta: float | None  # the trust coefficient; None: trust is 1
    eps: float  # added to the denominator of the trust ratio


class Move(NamedTuple):
    """The update of one parameter: its gradient (in its memory layout), its state, the share of the buffer to keep."""

    p: Tensor
    g: Tensor
    state: dict[str, Any]
    keep: float
    rule: Rule


# ---- CPU


def step_cpu(moves: list[Move]) -> list[Move]:
    """Updates layers one by one with torch's fused SGD, and all other tensors in one call; returns what it left out."""
    together: dict[tuple[int, float], list[Move]] = {}
    rest: list[Move] = []
    for move in moves:
        rule = move.rule
        if not (move.p.dtype == move.g.dtype == torch.float32 and is_dense(move.p)):
            rest.append(move)
        elif rule.eta is None:
            together.setdefault((id(rule), move.keep), []).append(move)
        else:
            g, w = _norm(move.g), _norm(move.p)
            trust = 1.0 if w == 0 or g == 0 else rule.eta * w / (g + rule.decay * w + rule.eps)
            if not _fused([move], trust):
                rest.append(move)
    for same in together.values():
        if not _fused(same, 1.0):
            rest += same
    return rest


def _fused(moves: list[Move], trust: float) -> bool:
    """Updates tensors of equal rule, scale and trust; does nothing and returns False if float32 cannot hold V / f."""
    rule, f = moves[0].rule, moves[0].rule.rate * trust
    if not 1e-12 < f < 1e12:
        return False
    momentum, decay, lr = moves[0].keep / f, (rule.d0 + rule.d1 * f) / f, rule.out * f
    if rule.nesterov and not lr * decay < 0.5:
        return False
    params, grads = [move.p for move in moves], [move.g for move in moves]
    buffers = [move.state["momentum_buffer"] for move in moves]
    if rule.shrink != 1:
        torch._foreach_mul_(params, rule.shrink)
    if rule.nesterov:
        # The look-ahead has another factor than the buffer, so there are two steps: along the buffer, then along the
        # gradient. The second decays weights that the first has changed; the rate of the first corrects for that.
        _sgd(params, grads, buffers, lr * rule.momentum / (1 - lr * decay), momentum, decay)
        _sgd(params, grads, [], lr, 0.0, decay)
    else:
        _sgd(params, grads, buffers, lr, momentum, decay)
    for move in moves:
        move.state["scale"] = f
    return True


def _sgd(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], lr: float, momentum: float, decay: float
) -> None:
    """Calls torch's fused SGD. Its first step must fill the buffer, which it would not do with momentum 0."""
    first = bool(buffers) and momentum == 0
    momentum = 1.0 if first else momentum
    fused_sgd(params, grads, buffers, lr=lr, momentum=momentum, weight_decay=decay, is_first_step=first, **_PLAIN)


def _norm(x: Tensor) -> float:
    """The 2-norm of dense float32 memory, to about 1e-7."""
    n = x.numel()
    rows = 0 if n <= 4 * _ROW else n // _ROW
    square = 0.0
    if rows:
        norms = torch.linalg.vector_norm(x.as_strided((rows, _ROW), (_ROW, 1)), dim=1)
        square += torch.dot(norms, norms).item()
    if n > rows * _ROW:
        rest = x.as_strided((n - rows * _ROW,), (1,), x.storage_offset() + rows * _ROW)
        square += torch.dot(rest, rest).item()
    if not 1e-24 < square < 1e30:  # squares may have left float32's range
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return math.sqrt(square)


# ---- elsewhere


def step_foreach(moves: list[Move]) -> None:
    """Updates tensors of any device, dtype and layout; reads nothing back to the host."""
    rules: dict[int, list[Move]] = {}
    for move in moves:
        rules.setdefault(id(move.rule), []).append(move)
    for same in rules.values():
        rule = same[0].rule
        exact = torch.float64 if same[0].p.dtype == torch.float64 else torch.float32
        own = [(move.p, move.state["momentum_buffer"]) for move in same]
        params, buffers = ([x.to(exact) for x in some] for some in zip(*own, strict=True))
        grads = [move.g.to(exact) for move in same]
        f: Any  # numbers, or scalar tensors if they depend on norms
        d: Any
        if rule.eta is None:
            f, d = [rule.rate] * len(same), [rule.d0 + rule.d1 * rule.rate] * len(same)
        else:
            wide = torch.float32 if params[0].device.type == "mps" else torch.float64  # all other devices have float64
            w, g = torch.stack(torch._foreach_norm([*params, *grads], 2, wide)).view(2, len(same))
            ratio = rule.eta * w / (g + rule.decay * w + rule.eps)
            scale = rule.rate * torch.where((w == 0) | (g == 0), 1.0, ratio)
            f, d = scale.to(exact).unbind(), (rule.d0 + rule.d1 * scale).to(exact).unbind()
        steps = torch._foreach_mul(grads, f)
        torch._foreach_add_(steps, torch._foreach_mul(params, d))
        torch._foreach_mul_(buffers, [move.keep for move in same])
        torch._foreach_add_(buffers, steps)
        if rule.nesterov:
            torch._foreach_add_(steps, buffers, alpha=rule.momentum)
        if rule.shrink != 1:
            torch._foreach_mul_(params, rule.shrink)
        torch._foreach_add_(params, steps if rule.nesterov else buffers, alpha=-rule.out)
        for move, (p, buffer), new_p, new_buffer in zip(same, own, params, buffers, strict=True):
            if new_p is not p:
                p.copy_(new_p)
                buffer.copy_(new_buffer)
            move.state.pop("scale", None)
