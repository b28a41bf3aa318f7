"""LARS as published, written out for one tensor in float64, and steps of ours beside it."""

import torch
from torch import Tensor, nn

from kasoku.optim import LARS, Trust, lars

FORMS = ("mlperf", "pytorch", "mxnet")
SIZES = (1, 2, 7, 64, 1000, 2047, 2049, 4096, 65_537, 131_080, 300_001)
BIG = 10_000_000


def published(w: Tensor, grads: list[Tensor], rates: list[float], *, layerwise: bool = True, **settings) -> Tensor:
    """The weights after these steps, as the forms are published."""
    trust, momentum = settings.get("trust", Trust()), settings.get("momentum", 0.9)
    nesterov, decay = settings.get("nesterov", False), settings.get("weight_decay", 5e-5)
    decay = decay if layerwise else 0.0
    w, m, last = w.double(), torch.zeros_like(w).double(), 0.0
    for g, lr in zip([g.double() for g in grads], rates, strict=True):
        t = 1.0
        if layerwise and w.norm() > 0 and g.norm() > 0:
            t = trust.eta * w.norm() / (g.norm() + decay * w.norm() + trust.eps)
        if trust.form == "pytorch":
            step = t * g if trust.decoupled else t * (g + decay * w)
            m = momentum * m + step
            w = w - lr * (step + momentum * m if nesterov else m) - (decay * w if trust.decoupled else 0)
        else:
            step = lr * t * g + decay * w if trust.decoupled else lr * t * (g + decay * w)
            m = (momentum * lr / last if trust.form == "mxnet" and last else momentum) * m - step
            w = w + (momentum * m - step if nesterov else m)
            last = lr
    return w


class Tensors(nn.Module):
    """Weights of given sizes, two dimensions each, then as many vectors; all settings of `lars` apply."""

    def __init__(self, sizes: tuple[int, ...], vectors: tuple[int, ...] = (), dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, n) for n in sizes] + [(n,) for n in vectors]
        self.all = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def moved(model: nn.Module, grads: list[list[Tensor]], rates: list[float], **settings) -> LARS:
    """The model after a step for each list of gradients, at these rates."""
    optimizer = lars(model, **settings)
    for some, lr in zip(grads, rates, strict=True):
        advance(optimizer, model, some, lr)
    return optimizer


def advance(optimizer: LARS, model: nn.Module, grads: list[Tensor], lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad_dtype = g.dtype
        p.grad = g.clone(memory_format=torch.preserve_format)
    optimizer.step()


def random_grads(model: nn.Module, steps: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator).to(dtype) for p in model.parameters()] for _ in range(steps)]


def assert_near(model: nn.Module, start: list[Tensor], grads: list[list[Tensor]], rates, tolerance=1e-6, **settings):
    """Each parameter, and how far it came, is that of the published form to a relative error."""
    for i, (p, w) in enumerate(zip(model.parameters(), start, strict=True)):
        wanted = published(w, [some[i] for some in grads], rates, layerwise=p.ndim > 1, **settings)
        for ours, theirs in ((p.detach(), wanted), (p.detach().double() - w, wanted - w)):
            error = (ours - theirs).norm() / theirs.norm()
            assert error <= tolerance, f"tensor {i} of {p.numel()}: {error:.1e}"


def check(model: nn.Module, rates: list[float], dtype=torch.float32, tolerance=1e-6, size=1.0, **settings) -> None:
    start = [p.detach().clone() for p in model.parameters()]
    grads = [[g * size for g in some] for some in random_grads(model, len(rates), dtype)]
    moved(model, grads, rates, **settings)
    assert_near(model, start, grads, rates, tolerance, **settings)
