"""The times of a network's layers on a GPU: the measured time of a step, divided among its layers by their work.

Note: a step of b images takes alpha + beta b. Alpha (kernel launches, updates) is divided equally among the layers, and
beta by their work: the larger of the time of their products at the GPU's peak and of the time of their outputs at its
memory bandwidth. A third of it is forward. The total is measured; only the division among layers is computed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
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

_TOUCHED = 3.0  # times an output passes through memory: written, read by the next layer, read or written by its norm
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
        norms: the number of its BatchNorms.
    """

    name: str
    layers: tuple[LayerCost, ...]
    tensors: tuple[Sized, ...]
    defined: tuple[Sized, ...]
    modules: frozenset[str] = frozenset()
    norms: int = 0

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

    def with_gradients(self, width: int) -> ModelCosts:
        """The network whose gradients take `width` bytes an element."""
        tensors, defined = ([replace(t, size=width * t.elements) for t in own] for own in (self.tensors, self.defined))
        return replace(self, tensors=tuple(tensors), defined=tuple(defined))


@dataclass(frozen=True)
class MeasuredTimes:
    """Times measured on one device: (images, {block: (forward_s, backward_s)}) for each batch, and of an update."""

    measured: tuple[tuple[int, dict[str, tuple[float, float]]], ...]
    update_s: float = 0.0

    def __post_init__(self) -> None:
        first = self.measured[0][1].keys()
        if other := [n for n, times in self.measured if times.keys() != first]:
            images = f"at {other[0]} images other blocks than at {self.measured[0][0]}"
            raise InputError(f"--profile: {images}: profile one model")


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

    hooks = [module.register_forward_hook(count) for module in places]
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *shape, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    order = [*work, *(i for i in range(len(units.modules)) if i not in work)]
    defined = tuple(units.tensors)
    units.order = order
    channels: dict[nn.Module, int] = {norm: norm.num_features for norm in norms(model)}
    layers = tuple(
        LayerCost(units.modules[i][0], *work.get(i, (0.0, 0.0)), channels.get(units.modules[i][1], 0)) for i in order
    )
    modules = frozenset(part for part, _ in model.named_modules())
    return ModelCosts(name, layers, tuple(units.tensors), defined, modules, len(channels))


@cache
def _measured() -> ModelCosts:
    """The network with which GPUs were measured."""
    with torch.device("meta"):
        return model_costs(Gpu.network, resnet50(), (3, 224, 224))


def units(
    net: ModelCosts, gpu: Gpu, images: float, profile: MeasuredTimes | None = None, *, slower: float = 1.0
) -> list[UnitTimes]:
    """The times of the layers for a batch of images, by a profile, or on a GPU.

    Those of a network that no GPU was measured with follow from its work.
    """
    work = net.work(gpu)
    if profile:
        return _profiled_units(profile, net, work, images, slower)
    if not sum(work):
        raise InputError(f"{net.name}: no layer with parameters does any work: a network that trains is wanted")
    beta_s = 1e-3 * gpu.beta_ms * (1.0 if net.measured(gpu) else sum(work) / sum(_measured().work(gpu)))
    fixed_s = 1e-3 * gpu.alpha_ms * slower / len(net.layers)
    seconds = [fixed_s + beta_s * images * slower * mine / sum(work) for mine in work]
    return [
        UnitTimes(layer.name, _FORWARD * each_s, (1 - _FORWARD) * each_s)
        for layer, each_s in zip(net.layers, seconds, strict=True)
    ]


def remarks(net: ModelCosts, gpu: Gpu, images: float, profile: MeasuredTimes | None = None) -> list[str]:
    """The limits of these times, a line each: of a shipped GPU, or of a profile."""
    batches = [n for n, _ in profile.measured] if profile else [gpu.least, gpu.most]
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


def profiled(profiles: Sequence[str], net: ModelCosts) -> MeasuredTimes:
    """Reads folders of `kasoku profile`, each as DIR:IMAGES, with the images of its steps.

    Raises InputError for another text, and for the profile of another network.
    """
    measured, updates = [], []
    for text in profiles:
        path, _, count = text.rpartition(":")
        if not path or not count.isdecimal() or int(count) < 1:
            raise InputError(f"--profile {text}: DIR:IMAGES is wanted, the folder and the images of its steps")
        folder, images = Path(path), int(count)
        try:
            blocks = json.loads((folder / "profile.json").read_text())["blocks"]
            times = {str(b["name"]): (float(b["forward_s"]), float(b["backward_s"])) for b in blocks}
            ledger = read_json(folder / "ledger.json")
            facts = ledger.get("facts", {})
            seen = facts.get("batch", images) * facts.get("parts", 1)
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
        if seen != images:
            raise InputError(f"{folder}: a profile of steps of {seen} images: give {folder}:{seen}, not :{images}")
        measured.append((images, times))
    return MeasuredTimes(tuple(measured), sum(updates) / max(1, len(updates)))


def _profiled_units(
    profile: MeasuredTimes, net: ModelCosts, work: Sequence[float], images: float, slower: float
) -> list[UnitTimes]:
    """Alpha + beta images for each block if two batches were profiled, else beta; divided among its layers by work.

    The time of a block without parameters is added to the layer before it: it runs after that layer.
    """
    blocks = profile.measured[0][1]
    home = [_block(layer.name, blocks) for layer in net.layers]
    forward, backward, elements = ([0.0] * len(home) for _ in range(3))
    previous_layer = 0
    for block in blocks:
        members = [i for i, other in enumerate(home) if other == block] or [previous_layer]
        whole = sum(work[i] for i in members)
        for i in members:
            share = work[i] / whole if whole else 1 / len(members)
            forward[i] += share * _at(profile, block, 0, images)
            backward[i] += share * _at(profile, block, 1, images)
        previous_layer = members[-1]
    for t in net.tensors:
        elements[t.unit] += t.elements
    update_s = profile.update_s / max(1, sum(elements))
    return [
        UnitTimes(layer.name, slower * forward[i], slower * backward[i], slower * update_s * elements[i])
        for i, layer in enumerate(net.layers)
    ]


def _at(profile: MeasuredTimes, block: str, way: int, images: float) -> float:
    """The seconds of a block at a batch: least squares through the measured batches, never below zero."""
    points = [(n, times[block][way]) for n, times in profile.measured]
    if len({n for n, _ in points}) == 1:
        return sum(s for _, s in points) / len(points) * images / points[0][0]
    beta, alpha = statistics.linear_regression(*zip(*points, strict=True))
    return float(max(0.0, alpha + beta * images))


def _block(layer: str, times: dict[str, Any]) -> str:
    """The profiled block that is the layer or contains it."""
    return next((name for name in times if layer == name or layer.startswith(f"{name}.")), "")
