"""Is an update of 2,048 virtual ranks on one device the update that [000] defines?

    python benchmarks/virtual_update.py

Batch 81,920 is 2,048 groups of 40 images. kasoku makes one update: `VirtualRanks`, 64 groups at once, smoothing, LARS
with its decoupled decay, as recipes/imagenet_resnet50_81920.toml has them. The same update is computed another way, in
float64: a plain loop over the 2,048 groups, in which BatchNorm is written out, then the mean of the groups' gradients,
LARS written out, and running statistics from the mean and the total variance. The network is small (two convolutions),
its images noise.
largest_relative_difference: of any value of the update, over the largest of its tensor; kasoku in float64 and float32.
Why it matters: one device tells whether a batch of thousands of devices converges only if it computes what they do.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common import finish
from kasoku.core import Job
from kasoku.data import Dataset, Memory, loader
from kasoku.distributed import VirtualRanks
from kasoku.optim import Trust, cross_entropy, lars

SIDE, CLASSES, SMOOTHING, AVERAGE = 8, 10, 0.1, 0.1
LR, MOMENTUM, DECAY, TRUST = 13.0, 0.96, 5e-5, Trust(eta=0.0025, eps=1e-9, decoupled=True)
NORMS = (("conv1", "norm1"), ("conv2", "norm2"))


class Small(nn.Module):
    """Two convolutions with BatchNorm and ReLU, the mean of the image, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Images to logits_NK, in the precision of the weights."""
        x_NCHW = x_NCHW.to(self.head.weight.dtype)
        for conv, norm in NORMS:
            x_NCHW = torch.relu(getattr(self, norm)(getattr(self, conv)(x_NCHW)))
        return self.head(x_NCHW.mean((2, 3)))


def images(n: int) -> Dataset:
    """Noise, of another brightness in each image, so that the groups' statistics differ."""
    generator = torch.Generator().manual_seed(0)
    light_N = torch.randint(40, 256, (n, 1, 1, 1), generator=generator)
    x_NHWC = (torch.rand(n, SIDE, SIDE, 3, generator=generator) * light_N).to(torch.uint8)
    split = Memory(x_NHWC, torch.randint(CLASSES, (n,), generator=generator))
    return Dataset("noise", tuple(map(str, range(CLASSES))), split, split, 3, (SIDE, SIDE), (0.3,) * 3, (0.2,) * 3)


def ours(groups: int, norm_batch: int, parts: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """The model's state before and after an update by kasoku, and its batch as "images" and "labels"."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = loader(images(groups * norm_batch), "train", groups * norm_batch, parts=parts)
    rule = partial(lars, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, trust=TRUST)
    loss = partial(cross_entropy, smoothing=SMOOTHING)
    if dtype == torch.float64:  # kasoku's loss is always computed in float32
        loss = partial(nn.functional.cross_entropy, label_smoothing=SMOOTHING)
    job = Job(model, rule, loader=batches, loss=loss, accumulate=parts)
    job.apply(VirtualRanks(norm_batch, AVERAGE))
    seen = []
    for x_NCHW, y_N in job.loader:
        seen.append((x_NCHW.clone(), y_N.clone()))
        (job.loss(job.model(x_NCHW), y_N) / parts).backward()
    job.optimizer.step()
    job.close()
    x_NCHW, y_N = (torch.cat(values) for values in zip(*seen, strict=True))
    return before, model.state_dict(), {"images": x_NCHW, "labels": y_N}


def reference(before: dict[str, Tensor], seen: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """The state after the update, in float64, by a plain loop over the groups."""
    state = {name: value.double() for name, value in before.items()}
    weights = {name: value.requires_grad_() for name, value in state.items() if name.endswith(("weight", "bias"))}
    grads = {name: torch.zeros_like(value) for name, value in weights.items()}
    means, squares = ({norm: torch.zeros_like(state[f"{norm}.bias"]) for _, norm in NORMS} for _ in range(2))
    values: dict[str, int] = {}
    for x_NCHW, y_N in zip(seen["images"].double().chunk(groups), seen["labels"].chunk(groups), strict=True):
        for conv, norm in NORMS:
            x_NCHW = nn.functional.conv2d(x_NCHW, weights[f"{conv}.weight"], stride=int(conv[-1]), padding=1)
            mean_C = x_NCHW.mean((0, 2, 3))
            off_NCHW = x_NCHW - mean_C[:, None, None]
            variance_C = off_NCHW.square().mean((0, 2, 3))
            means[norm] += mean_C.detach() / groups
            squares[norm] += (variance_C + mean_C**2).detach() / groups
            values[norm] = groups * x_NCHW.numel() // x_NCHW.shape[1]
            scale_C = weights[f"{norm}.weight"] / (variance_C + 1e-5).sqrt()
            x_NCHW = (off_NCHW * scale_C[:, None, None] + weights[f"{norm}.bias"][:, None, None]).clamp(min=0)
        logs_NK = (x_NCHW.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]).log_softmax(1)
        target_NK = torch.full_like(logs_NK, SMOOTHING / CLASSES)
        target_NK[range(len(y_N)), y_N] += 1 - SMOOTHING
        loss = -(target_NK * logs_NK).sum(1).mean() / groups
        for name, grad in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            grads[name] += grad
    for name, w in weights.items():
        w, g = w.detach(), grads[name]
        trust = TRUST.eta * w.norm() / (g.norm() + DECAY * w.norm() + TRUST.eps) if w.ndim > 1 else 1.0
        state[name] = w - LR * trust * g - (DECAY * w if w.ndim > 1 else 0.0)
    share = 1 - torch.exp(torch.tensor(-1 / AVERAGE, dtype=torch.float64))  # the epoch has one update
    for norm, mean_C in means.items():
        variance_C = (squares[norm] - mean_C**2) * values[norm] / (values[norm] - 1)
        for name, new in (("running_mean", mean_C), ("running_var", variance_C)):
            state[f"{norm}.{name}"] = (1 - share) * state[f"{norm}.{name}"] + share * new
    return {name: value.detach() for name, value in state.items()}


def difference(groups: int, norm_batch: int, parts: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest difference of each tensor's update from the reference, over the largest value of that update."""
    before, after, seen = ours(groups, norm_batch, parts, dtype)
    wanted = reference(before, seen, groups)
    off = {}
    for name, value in after.items():
        if value.is_floating_point():
            move = wanted[name] - before[name].double()
            off[name] = ((value.double() - wanted[name]).abs().max() / move.abs().max()).item()
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=2048, help="virtual ranks (default: %(default)s)")
    parser.add_argument("--norm-batch", type=int, default=40, help="images of each (default: %(default)s)")
    parser.add_argument("--parts", type=int, default=32, help="of the batch, one after another (default: %(default)s)")
    arguments = parser.parse_args()
    sizes = arguments.groups, arguments.norm_batch, arguments.parts
    off = {str(dtype).removeprefix("torch."): difference(*sizes, dtype) for dtype in (torch.float64, torch.float32)}
    figures: dict[str, Any] = {"largest_relative_difference": {name: max(each.values()) for name, each in off.items()}}
    parameters = dict(zip(("groups", "norm_batch", "parts"), sizes, strict=True))
    finish("virtual_update", parameters, figures | {"by_tensor": off})


if __name__ == "__main__":
    main()
