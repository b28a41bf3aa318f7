"""The times of a network's layers on a GPU: the measured time of a step, divided among its layers by their work.

Note: a step of b images takes alpha + beta b. Alpha (kernel launches, updates) is divided equally among the layers, and
beta by their work: the larger of the time of their products at the GPU's peak and of the time of their outputs at its
memory bandwidth. A third of it is forward. The total is measured; only the division among layers is computed. A layer
of a network that no GPU was measured with takes at least the time in which its weights pass through memory.
"""

import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError, summary
from kasoku.core.files import read_json
from kasoku.distributed.batchnorm.grouped import norms
from kasoku.distributed.ddp.cost_model import Sized, UnitTimes
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.models import resnet50
from kasoku.simulate.cluster import Gpu

Steps = tuple[int, dict[str, tuple[float, float]]]  # their images; by block the seconds of forward and backward
_TOUCHED = 3.0  # times an output passes through memory: written, read by the next layer, read or written by its norm
_MOVED = 32.0  # bytes of a weight in a step, in fp32: read both ways, its gradient written; five times in the update
_RESNET50 = 4.089e9  # products of an image of 224 pixels in all layers with parameters
_TOLERANCE = 0.01  # of these: the effect of another number of classes
_FORWARD = 1 / 3  # of a step


@dataclass(frozen=True)
class LayerCost:
    """A module with its own parameters: products and output elements of an image. `norm`: a BatchNorm's channels."""

    name: str
    products: float
    outputs: float
    norm: int = 0


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a network: its layers in the order of their forwards, and its gradients.

    Attributes:
        tensors: the gradients, with layers numbered in the order of their forwards.
        defined: the gradients, with layers numbered in the order of definition, by which buckets are planned.
        modules: the names of all modules, also of those without parameters.
    """

    name: str
    layers: tuple[LayerCost, ...]
    tensors: tuple[Sized, ...]
    defined: tuple[Sized, ...]
    modules: frozenset[str] = frozenset()

    @property
    def products(self) -> float:
        """Multiply-adds of one image."""
        return sum(layer.products for layer in self.layers)

    def measured(self, gpu: Gpu) -> bool:
        """Whether the GPU was measured with this network; the name alone may stand for another stem or size."""
        return self.name == gpu.network and abs(self.products / _RESNET50 - 1) < _TOLERANCE

    def work(self, gpu: Gpu) -> list[float]:
        """Seconds for an image in each layer's forward at the speeds of the GPU's data sheet."""
        flops, bytes_ = 1e12 * gpu.tflops, 1e9 * gpu.memory_gb_s
        return [max(2 * layer.products / flops, _TOUCHED * 2 * layer.outputs / bytes_) for layer in self.layers]

    def with_gradients(self, width: int) -> "ModelCosts":
        """The network whose gradients take `width` bytes an element."""
        tensors, defined = ([replace(t, size=width * t.elements) for t in own] for own in (self.tensors, self.defined))
        return replace(self, tensors=tuple(tensors), defined=tuple(defined))


@dataclass(frozen=True)
class MeasuredTimes:
    """Times measured on one device, in seconds: of forward and backward by block, (fixed, of an image); of an update.

    `batches`: the images of the measured steps.
    """

    batches: tuple[int, ...]
    blocks: dict[str, tuple[tuple[float, float], tuple[float, float]]]
    update_s: float = 0.0


def model_costs(name: str, model: nn.Module, shape: Sequence[int]) -> ModelCosts:
    """The costs of a model, which is moved to the meta device; `shape`: (C, H, W) of an image."""
    model = model.to("meta")
    units = LayerIndex(model)
    work: dict[int, tuple[float, float]] = {}  # products and outputs
    places = {module: i for i, (_, module) in enumerate(units.modules)}

    def count(module: nn.Module, _: object, out: Any) -> None:
        i, weight = places[module], getattr(module, "weight", None)
        outputs = float(out.numel()) if isinstance(out, Tensor) else 0.0
        # each output element of a matrix product is a product with one row of the weight
        row = float(weight[0].numel()) if isinstance(weight, Tensor) and weight.ndim > 1 else 0.0
        products, earlier = work.get(i, (0.0, 0.0))
        work[i] = products + outputs * row, earlier + outputs

    with torch.no_grad(), ExitStack() as hooks:
        for module in places:
            hooks.enter_context(module.register_forward_hook(count))
        model.eval()(torch.empty(1, *shape, device="meta"))
    order = [*work, *(i for i in range(len(units.modules)) if i not in work)]
    defined = tuple(units.tensors)
    units.order = order
    channels: dict[int, int] = {places[norm]: norm.num_features for norm in norms(model) if norm in places}
    layers = tuple(LayerCost(units.modules[i][0], *work.get(i, (0.0, 0.0)), channels.get(i, 0)) for i in order)
    return ModelCosts(name, layers, tuple(units.tensors), defined, frozenset(dict(model.named_modules())))


@cache
def _measured() -> ModelCosts:
    """The network with which GPUs were measured."""
    with torch.device("meta"):
        return model_costs(Gpu.network, resnet50(), (3, 224, 224))


def units(net: ModelCosts, gpu: Gpu, images: float, profile: MeasuredTimes | None, slower: float) -> list[UnitTimes]:
    """The times of the layers for a batch of images, by a profile, or on a GPU."""
    work = net.work(gpu)
    if profile:
        return _profiled_units(profile, net, work, images, slower)
    if not sum(work):
        raise InputError(f"{net.name}: no layer with parameters does any work: a network that trains is wanted")
    fixed_s, image_s = [1e-3 * gpu.alpha_ms / len(work)] * len(work), 1e-3 * gpu.beta_ms / sum(work)
    if not net.measured(gpu):
        image_s *= sum(work) / sum(_measured().work(gpu))
        weights = [sum(t.elements for t in net.tensors if t.unit == i) for i in range(len(work))]
        fixed_s = [max(s, _MOVED * n / gpu.memory_gb_s / 1e9) for s, n in zip(fixed_s, weights, strict=True)]
    seconds = [slower * (s + image_s * images * mine) for s, mine in zip(fixed_s, work, strict=True)]
    return [UnitTimes(x.name, _FORWARD * s, (1 - _FORWARD) * s) for x, s in zip(net.layers, seconds, strict=True)]


def remarks(net: ModelCosts, gpu: Gpu, images: float, profile: MeasuredTimes | None = None) -> list[str]:
    """The limits of these times, a line each: of a shipped GPU, or of a profile."""
    batches = profile.batches if profile else (gpu.least, gpu.most)
    least, most = min(batches), max(batches)
    out = []
    if not profile and not net.measured(gpu):
        of = f"{gpu.network} at 224, {_RESNET50 / 1e9:.3g} G multiply-adds an image"
        mine = f"{net.name}, {net.products / 1e9:.3g} G, is estimated by its work"
        out.append(f"{gpu.name} was measured with {of}: {mine}; a profile is surer")
    if not least <= images <= most:
        times = "the profile's times" if profile else "times"
        span = f"{least} to {most}" if least < most else f"{least} alone"
        out.append(f"{images:g} images a {gpu.name}: {times} are from {span}; beyond, extrapolated")
    return out


def profiled(folders: Sequence[str], net: ModelCosts) -> MeasuredTimes:
    """Reads folders of `kasoku profile`. Raises InputError for another folder, and for profiles of another network."""
    measured, updates = list[Steps](), []
    for folder in map(Path, folders):
        try:
            blocks = json.loads((folder / "profile.json").read_text())["blocks"]
            times = {str(b["name"]): (float(b["forward_s"]), float(b["backward_s"])) for b in blocks}
            ledger = read_json(folder / "ledger.json")
            images = max(1, int(ledger["facts"]["batch"] * ledger["facts"].get("parts", 1)))
            updates.append(float(ledger.get("step_s", {}).get("update", 0.0)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            wanted = "a folder of kasoku profile is wanted; profile again"
            raise InputError(f"{folder}: no profile there ({summary(error)}): {wanted}") from error
        odd = [name for name, both in times.items() if not all(0 <= s < 1e6 for s in both)]
        parents = {name[:dot] for name in times for dot in range(len(name)) if name[dot] == "."} | {""}
        # of a layer whose children are profiled, its own weights, such as position embeddings, take no time
        lost = [x.name for x in net.layers if not _block(x.name, times) and x.name not in parents]
        more = [name for name in times if name not in net.modules]
        if odd:
            raise InputError(f"{folder}: {odd[0]} takes {times[odd[0]]} s: times of 0 or more are wanted")
        if lost or more:
            has, lacks, part = (net.name, "the profile", lost[0]) if lost else ("it", net.name, more[0])
            raise InputError(f"{folder}: a profile of another model: {has} has {part}, {lacks} has not")
        if measured and times.keys() != measured[0][1].keys():
            raise InputError(f"--profile: at {images} images other blocks than at {measured[0][0]}: profile one model")
        measured.append((images, times))
    lines = {name: (_line(measured, name, 0), _line(measured, name, 1)) for name in measured[0][1]}
    return MeasuredTimes(tuple(n for n, _ in measured), lines, statistics.fmean(updates))


def _profiled_units(
    profile: MeasuredTimes, net: ModelCosts, work: Sequence[float], images: float, slower: float
) -> list[UnitTimes]:
    """The times of the blocks, divided among their layers by work.

    The time of a block without parameters is added to the layer before it: it runs after that layer.
    """
    home = [_block(layer.name, profile.blocks) for layer in net.layers]
    seconds, elements, previous_layer = [(0.0, 0.0)] * len(home), [0.0] * len(home), 0
    for block, lines in profile.blocks.items():
        members = [i for i, other in enumerate(home) if other == block] or [previous_layer]
        whole = sum(work[i] for i in members)
        forward_s, backward_s = (slower * max(0.0, fixed_s + image_s * images) for fixed_s, image_s in lines)
        for i in members:
            share = work[i] / whole if whole else 1 / len(members)
            seconds[i] = seconds[i][0] + share * forward_s, seconds[i][1] + share * backward_s
        previous_layer = members[-1]
    for t in net.tensors:
        elements[t.unit] += t.elements
    update_s = slower * profile.update_s / max(1, sum(elements))
    return [UnitTimes(net.layers[i].name, *seconds[i], update_s * elements[i]) for i in range(len(home))]


def _line(measured: Sequence[Steps], block: str, way: int) -> tuple[float, float]:
    """Seconds of a block, (fixed, of an image): least squares; through 0 if all steps are of one batch."""
    images, seconds = zip(*((n, times[block][way]) for n, times in measured), strict=True)
    if len({*images}) == 1:
        return 0.0, statistics.fmean(seconds) / images[0]
    line = statistics.linear_regression(images, seconds)
    return line.intercept, line.slope


def _block(layer: str, times: dict[str, Any]) -> str:
    """The profiled block that is the layer or contains it."""
    return next((name for name in times if layer == name or layer.startswith(f"{name}.")), "")
