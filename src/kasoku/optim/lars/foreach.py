"""The LARS step in torch operations, and by C code on CPUs.

Note: one update, three implementations. In every form, a step is V = keep V + f g + d w and w = shrink w - out V; f and
d follow from the tensor's two norms (`Rule`). `_lars.c` does it tensor by tensor, so that w and g are still in the
cache after their norms: 7 passes over memory would be 1.4 times the 5 of plain SGD. `triton.py` does it on CUDA. Where
neither can (no C compiler, another dtype, memory with gaps), foreach operations do, and read no value back to the host.
"""

import ctypes
from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kasoku.core.hardware import is_dense

_SHARED = 2**18  # several threads share a step of at least this many weights

try:
    LIBRARY: Any = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))  # see setup.py
    LIBRARY.kasoku_lars_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
except (OSError, AttributeError):  # not built, or for another machine, or from other sources
    LIBRARY = None


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

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that f and d follow from, then those of the update, as kernels read them."""
        factors = (self.rate, self.d0, self.d1, self.decay, self.eta or 0.0, self.eps)
        return (*factors, self.out, self.shrink, float(self.nesterov), self.momentum if self.nesterov else 1.0)


class Move(NamedTuple):
    """The update of one parameter: its gradient (in its memory layout), its state, the share of the buffer to keep."""

    p: Tensor
    g: Tensor
    state: dict[str, Any]
    keep: float
    rule: Rule
    squares: Tensor | None = None  # of the two norms of the tensor that p is a slice of


def step_cpu(moves: list[Move]) -> list[Move]:
    """Updates float32 tensors by the C code; returns the moves that it left out."""
    left_out: list[Move] = []
    places, numbers, n = array("q"), array("d"), 0
    for move in moves:
        p, g, state, keep, rule, squares = move
        if not (p.dtype == g.dtype == torch.float32 and is_dense(p)):
            left_out.append(move)
            continue
        if squares is not None and rule.eta is not None:
            w, g_norm = squares.sqrt().tolist()
            ratio = rule.eta * w / (g_norm + rule.decay * w + rule.eps) if w and g_norm else 1.0
            rule = replace(rule, rate=rule.rate * ratio, eta=None)
        n += p.numel()
        at = p.data_ptr(), g.data_ptr(), state["momentum_buffer"].data_ptr()
        places.extend((*at, p.numel(), rule.eta is not None))
        numbers.extend((keep, *rule.numbers))
    threads = torch.get_num_threads() if n >= _SHARED else 1
    count = len(moves) - len(left_out)
    if not LIBRARY.kasoku_lars_step(places.buffer_info()[0], numbers.buffer_info()[0], count, threads):
        raise MemoryError(f"no memory for the norms of {n:,} weights")
    return left_out


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
            known = [move.squares for move in same if move.squares is not None]
            own_norms = torch._foreach_norm([*params, *grads], 2, wide) if not known else ()
            w, g = torch.stack(known, 1).sqrt() if known else torch.stack(own_norms).view(2, len(same))
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
        for (p, buffer), new_p, new_buffer in zip(own, params, buffers, strict=True):
            if new_p is not p:
                p.copy_(new_p)
                buffer.copy_(new_buffer)
