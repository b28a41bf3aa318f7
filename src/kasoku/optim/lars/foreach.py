"""The step of LARS in operations of torch: for CPUs, and for every device that has no Triton.

Note: one update, several ways to compute it. Whatever the form, a step is V = keep V + f g + d w and
w = shrink w - out V, with f and d from the tensor's two norms (`Rule`). On a CPU torch's fused SGD does it while the
tensor that was just measured is still in the cache. The composition of foreach operations reads no value back to the
host. `lars_triton` is the third way.

Note: the scale of the buffer. The fused SGD has one rate, outside its buffer. Ours belongs inside, so the CPU keeps
u = V / s, with the number s in `state["scale"]`, and gives the kernel keep s / f for its momentum and out f for its
rate. A state without a scale has s = 1; every way takes either, so a run may move between devices.

Note: norms in float32 need care. torch.linalg.vector_norm of 10^7 random values on a CPU was 3.6e-4 too small,
torch.dot 1.3e-4 (each vector lane keeps one running sum); rows of 2,048 first are right to 1e-7 at the same speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kasoku.core.hardware import is_dense
from kasoku.core.torch_internals import fused_sgd

_ROW = 2048  # values a running sum goes over


@dataclass(frozen=True)
class Rule:
    """What a group does at this step, in numbers.

    With f = rate * trust and d = d0 + d1 * f: step = f * g + d * w; V = keep * V + step;
    w = shrink * w - out * V, with nesterov w = shrink * w - out * (step + momentum * V).

    Args:
        rate: of the gradient, inside the buffer.
        out: from the buffer to the weights.
        momentum: of Nesterov's look-ahead.
        nesterov: whether there is one.
        d0: the share of w in the step that does not follow f.
        d1: the share that does.
        shrink: what is left of w beside all that.
        decay: the weight decay in the trust ratio.
        eta: the trust coefficient; None: trust is 1.
        eps: of the trust ratio.
    """

    rate: float
    out: float
    momentum: float
    nesterov: bool
    d0: float
    d1: float
    shrink: float
    decay: float
    eta: float | None
    eps: float


class Move(NamedTuple):
    """One parameter in a step: its gradient (laid out like it), its state, the share of the buffer that is kept."""

    p: Tensor
    g: Tensor
    state: dict[str, Any]
    keep: float
    rule: Rule


# ---- CPU


def step_cpu(moves: list[Move]) -> None:
    """Each layer measured, then moved by torch's fused SGD; all other tensors in one call of it."""
    together: dict[tuple[int, float], list[Move]] = {}
    rest: list[Move] = []
    for move in moves:
        if not (move.p.dtype == move.g.dtype == torch.float32 and is_dense(move.p)):
            rest.append(move)
        elif move.rule.eta is None:
            together.setdefault((id(move.rule), move.keep), []).append(move)
        elif not _fused([move], _trust(move)):
            rest.append(move)
    for same in together.values():
        if not _fused(same, 1.0):
            rest += same
    if rest:
        step_foreach(rest)


def _fused(moves: list[Move], trust: float) -> bool:
    """Moves tensors of one rule, scale and trust; False, and nothing done, where float32 could not hold V / f."""
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
        # The look-ahead takes another factor than the buffer, so it is two steps: along the buffer, then along the
        # gradient. The second decays weights that the first has moved; the first's rate makes up for that.
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
    """The fused SGD of torch, which fills the buffer at a first step, but not where its momentum is 0."""
    first = bool(buffers) and momentum == 0
    fused_sgd(
        params,
        grads,
        buffers,
        lr=lr,
        momentum=1.0 if first else momentum,
        weight_decay=decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=first,
    )


def _trust(move: Move) -> float:
    rule, g, w = move.rule, _norm(move.g), _norm(move.p)
    if rule.eta is None or w == 0 or g == 0:
        return 1.0
    return rule.eta * w / (g + rule.decay * w + rule.eps)


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
    """Any device, dtype and layout; nothing is read back to the host."""
    rules: dict[int, list[Move]] = {}
    for move in moves:
        rules.setdefault(id(move.rule), []).append(move)
    for same in rules.values():
        _foreach(same, same[0].rule)


def _foreach(moves: list[Move], rule: Rule) -> None:
    exact = torch.float64 if moves[0].p.dtype == torch.float64 else torch.float32
    own = [(move.p, move.state["momentum_buffer"]) for move in moves]
    params, buffers = ([x.to(exact) for x in some] for some in zip(*own, strict=True))
    grads = [move.g.to(exact) for move in moves]
    along_g, along_w = _factors(params, grads, rule)
    steps = torch._foreach_mul(grads, along_g)
    torch._foreach_add_(steps, torch._foreach_mul(params, along_w))
    torch._foreach_mul_(buffers, [move.keep for move in moves])
    torch._foreach_add_(buffers, steps)
    if rule.nesterov:
        torch._foreach_add_(steps, buffers, alpha=rule.momentum)
    if rule.shrink != 1:
        torch._foreach_mul_(params, rule.shrink)
    torch._foreach_add_(params, steps if rule.nesterov else buffers, alpha=-rule.out)
    for move, (p, buffer), new_p, new_buffer in zip(moves, own, params, buffers, strict=True):
        if new_p is not p:
            p.copy_(new_p)
            buffer.copy_(new_buffer)
        move.state.pop("scale", None)


def _factors(params: list[Tensor], grads: list[Tensor], rule: Rule) -> tuple[Any, Any]:
    """The f and d of each tensor: numbers, or scalar tensors where they depend on norms."""
    n = len(params)
    if rule.eta is None:
        return [rule.rate] * n, [rule.d0 + rule.d1 * rule.rate] * n
    wide = torch.float32 if params[0].device.type == "mps" else torch.float64  # all that has float64
    w, g = torch.stack(torch._foreach_norm([*params, *grads], 2, wide)).view(2, n)
    ratio = rule.eta * w / (g + rule.decay * w + rule.eps)
    f = rule.rate * torch.where((w == 0) | (g == 0), 1.0, ratio)
    return f.to(params[0].dtype).unbind(), (rule.d0 + rule.d1 * f).to(params[0].dtype).unbind()
