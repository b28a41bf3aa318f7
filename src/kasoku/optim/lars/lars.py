"""LARS: scales each layer's step to the norm of its weights, for batches of tens of thousands of images."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import nn

from kasoku.core import Checked, InputError, Range, checked
from kasoku.core.hardware import laid_out_like
from kasoku.optim.lars.foreach import LIBRARY, Move, Rule, step_cpu, step_foreach
from kasoku.optim.param_groups import NonNegative, Share, refuse_nesterov, split


@dataclass(frozen=True)
class Trust(Checked):
    """The factor on a layer's learning rate: trust = eta * |w| / (|g| + weight_decay * |w| + eps).

    Args:
        eta: the trust coefficient; a step changes a layer by about lr * eta of its norm; 0 or more.
        eps: keeps the ratio finite where gradients vanish; 0 or more.
        form: how the rate and the trust enter the momentum buffer; all forms agree while the rate is constant.
            "mlperf": the buffer holds both. "pytorch": the buffer holds the trust, and the rate multiplies the buffer.
            "mxnet": as mlperf, but the momentum is multiplied by this rate over the last one.
        decoupled: the decay term is weight_decay * w, multiplied neither by the rate nor by the trust; a `Rate`
            technique then applies its schedule to weight_decay as well.
    """

    eta: Annotated[float, Range(at_least=0)] = 1e-3
    eps: Annotated[float, Range(at_least=0)] = 0.0
    form: Literal["mlperf", "pytorch", "mxnet"] = "mlperf"
    decoupled: bool = False


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose groups with `layerwise=True` scale each tensor's step to its norm.

    All settings are keys of the parameter groups, so that techniques can change them. All state belongs to single
    parameters. Each step reads the weights anew, so other code may write to them, also through `.data`. A slice of a
    tensor has in its state, as `squares`, the sums of squares of all weights and gradients of the tensor.

    Args:
        params: parameter groups; each may set any of the keys below, and `layerwise`.
        lr, momentum, nesterov, weight_decay, trust: as in `lars`, for groups that set none.
    """

    slices = "norms"

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 10.0,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 5e-5,
        trust: Trust = Trust(),
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, **vars(trust), "layerwise": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises InputError for a closure, and for a buffer whose shape is not its parameter's.
        """
        if closure is not None:
            raise InputError("LARS.step(closure) is not supported: call backward() in the loop, then step()")
        alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Move]] = {}
        for group in self.param_groups:
            rule = _rule(group)
            for p in group["params"]:
                g = p.grad
                if g is None or not (p.numel() or p in self.state):  # a slice may be empty
                    continue
                state = self.state[p]
                buffer = state.get("momentum_buffer")
                if buffer is not None and buffer.shape != p.shape:
                    got = f"a momentum_buffer of shape {tuple(buffer.shape)} for weights of {tuple(p.shape)}"
                    raise InputError(f"{got}: load the optimizer's state of this model")
                # the weights may have another dtype or device by now
                state["momentum_buffer"] = torch.zeros_like(p) if buffer is None else laid_out_like(p, buffer.to(p))
                keep = group["momentum"]
                if group["form"] == "mxnet":
                    last = state.get("lr", 0.0)
                    keep *= group["lr"] / last if last else 1.0
                    state["lr"] = group["lr"]
                move = Move(p, laid_out_like(p, g), state, keep, rule, state.pop("squares", None))
                alike.setdefault((p.device, p.dtype, g.dtype), []).append(move)
        for (device, *_), moves in alike.items():
            path, rest = _path(device), moves
            if path == "cpu":
                rest = step_cpu(moves)
            elif path == "triton":
                from kasoku.optim.lars import triton  # only where it is installed

                rest = triton.step(moves)
            step_foreach(rest)
            torch.autograd.graph.increment_version([move.p for move in moves])  # kernels do not


@checked
def lars(
    model: nn.Module,
    lr: NonNegative = 10.0,
    *,
    momentum: Share = 0.9,
    nesterov: bool = False,
    weight_decay: NonNegative = 5e-5,
    trust: Trust = Trust(),
) -> LARS:
    """LARS for all weights; plain momentum SGD at the same rate, without decay, for biases and norm parameters.

    Args:
        model: its parameters that require a gradient are trained.
        lr: learning rate for the mean gradient, 0 or more; a `Rate` technique multiplies it by its schedule.
        momentum: share of the velocity kept at each step, from 0 to below 1.
        nesterov: look one step ahead along the velocity, which needs momentum.
        weight_decay: added to the gradient as weight_decay * w, 0 or more.
        trust: coefficient, form, and whether the decay is decoupled.

    Saves: steps: batches of tens of thousands of images reach the accuracy of small ones.
    Costs: two norms a layer. C code on a CPU finds w and g in the cache after them; CUDA and torch's operations do not.
    Maths: t = eta |w| / (|g| + weight_decay |w| + eps), 1 where |w| or |g| is 0; g' = g + weight_decay w.
        mlperf: m = momentum m - lr t g'; w += m (Nesterov: w += momentum m - lr t g').
        pytorch: v = momentum v + t g'; w -= lr v (Nesterov: lr (t g' + momentum v)).
        mxnet: mlperf with momentum * lr / last lr for momentum, if the last lr was above 0.
        decoupled: lr t g' becomes lr t g + weight_decay w; pytorch: v = momentum v + t g; w -= lr v + weight_decay w.
    Ref: You et al. 2017 (arXiv 1708.03888); the MLPerf reference; MXNet's LBSGD; [000] for the decoupled decay.
    """
    refuse_nesterov(nesterov, momentum)
    weights, vectors = split(model)
    plain: dict[str, Any] = {"params": vectors, "layerwise": False, "weight_decay": 0.0}
    groups = [group for group in ({"params": weights}, plain) if group["params"]]
    return LARS(groups, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, trust=trust)


def _rule(group: dict[str, Any]) -> Rule:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    inside, decoupled = group["form"] != "pytorch", group["decoupled"]
    return Rule(
        rate=lr if inside else 1.0,
        out=1.0 if inside else lr,
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        d0=decay if decoupled and inside else 0.0,
        d1=0.0 if decoupled else decay,
        shrink=1.0 - decay if decoupled and not inside else 1.0,
        decay=decay,
        eta=group["eta"] if group["layerwise"] else None,
        eps=group["eps"],
    )


@cache
def _path(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu" if LIBRARY else "foreach"
    return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "foreach"
