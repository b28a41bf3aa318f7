"""What a network's layers take on a GPU: the shares of a step by their work, scaled to times that were measured.

Note: a step of b images takes alpha + beta b. Alpha (starting kernels, updates) is spread alike over the layers, beta
by their work: the larger of what their products take at the GPU's peak and what their outputs take of its memory. A
third of it is forward. The total is that which was measured; only how it spreads over the layers is worked out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError
from kasoku.distributed.batchnorm.grouped import norms
from kasoku.distributed.ddp.cost_model import Sized, UnitTimes
from kasoku.distributed.ddp.layer_index import Units
from kasoku.models import resnet50
from kasoku.simulate.cluster import Gpu

_TOUCHED = 3.0  # times an output passes through memory: written, read by what follows, read or written by its norm
_RESNET50 = 4.089e9  # products of an image of 224 pixels, of all layers with parameters
_ALIKE = 0.01  # of these, that another number of classes makes
_FORWARD = 1 / 3  # of a step


@dataclass(frozen=True)
class LayerCost:
    """A part with parameters of its own: products and output elements of one image. `norm`: a BatchNorm's channels."""

    name: str
    products: float
    outputs: float
    norm: int = 0


@dataclass(frozen=True)
class ModelCosts:
    """What a simulation knows of a network: its layers in the order of their forwards, and its gradients.

    `tensors` say which layer is whose by that order, `defined` by the order of definition: plans are made by it.
    `modules`: the names of all its parts, also of those without parameters.
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
        """Whether it is the network that the GPU was measured with: a name alone may be of another stem or size."""
        return self.name == gpu.network and abs(self.products / _RESNET50 - 1) < _ALIKE

    def work(self, gpu: Gpu) -> list[float]:
        """Seconds an image of each layer's forward, were it as fast as the GPU's data sheet."""
        return [_work(gpu, layer.products, layer.outputs) for layer in self.layers]

    def carried(self, wire_bytes: int) -> tuple[list[Sized], list[Sized]]:
        """`tensors` and `defined` as they are sent, `wire_bytes` an element; what is marked "norm" in fp32."""

        def sent(t: Sized) -> Sized:
            width = max(wire_bytes, 4) if t.kind == "norm" else wire_bytes
            return Sized(t.unit, t.elements, width * t.elements, t.kind, t.name)

        return [sent(t) for t in self.tensors], [sent(t) for t in self.defined]


@dataclass(frozen=True)
class MeasuredTimes:
    """Times measured on one device: at some batches (images, {block: (forward_s, backward_s)}), and of an update."""

    measured: tuple[tuple[int, dict[str, tuple[float, float]]], ...]
    update_s: float = 0.0

    def __post_init__(self) -> None:
        first = self.measured[0][1].keys()
        if other := [n for n, times in self.measured if times.keys() != first]:
            raise InputError(
                f"--profile: at {other[0]} images other blocks than at {self.measured[0][0]}: profile one model"
            )


def model_costs(name: str, model: nn.Module, shape: Sequence[int]) -> ModelCosts:
    """Looks at a model on the meta device; `shape`: (C, H, W) of an image."""
    model = model.to("meta")
    units = Units(model)
    found: dict[int, tuple[float, float]] = {}
    order: list[int] = []
    places = {module: i for i, (_, module) in enumerate(units.modules)}

    def passed(module: nn.Module, _: object, out: Any) -> None:
        i = places[module]
        outputs = float(out.numel()) if isinstance(out, Tensor) else 0.0
        if i not in found:
            order.append(i)
        before = found.get(i, (0.0, 0.0))
        found[i] = before[0] + _products(module, outputs), before[1] + outputs

    hooks = [module.register_forward_hook(passed) for module in places]
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *shape, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    order += [i for i in range(len(units.modules)) if i not in found]
    defined = tuple(units.tensors)
    units.order = order
    channels: dict[nn.Module, int] = {norm: norm.num_features for norm in norms(model)}
    layers = tuple(
        LayerCost(units.modules[i][0], *found.get(i, (0.0, 0.0)), channels.get(units.modules[i][1], 0)) for i in order
    )
    return ModelCosts(name, layers, tuple(units.tensors), defined, frozenset(part for part, _ in model.named_modules()))


@cache
def _measured() -> ModelCosts:
    """The network that GPUs were measured with."""
    with torch.device("meta"):
        return model_costs(Gpu.network, resnet50(), (3, 224, 224))


def units(net: ModelCosts, gpu: Gpu, images: float, *, slower: float = 1.0) -> list[UnitTimes]:
    """The layers' times for a batch of so many images on a GPU; another network than the measured one by its work."""
    work = net.work(gpu)
    if not sum(work):
        raise InputError(f"{net.name}: no layer with parameters does any work: a network that trains is wanted")
    beta_s = 1e-3 * gpu.beta_ms * (1.0 if net.measured(gpu) else sum(work) / sum(_measured().work(gpu)))
    fixed = 1e-3 * gpu.alpha_ms * slower / len(net.layers)
    out = []
    for layer, mine in zip(net.layers, work, strict=True):
        seconds = fixed + beta_s * images * slower * mine / sum(work)
        out.append(UnitTimes(layer.name, _FORWARD * seconds, (1 - _FORWARD) * seconds))
    return out


def remarks(net: ModelCosts, gpu: Gpu, images: float, profile: MeasuredTimes | None = None) -> list[str]:
    """What to know about these times: of a GPU that is known, or by a profile."""
    out = []
    if profile:
        batches = [n for n, _ in profile.measured]
        if not min(batches) <= images <= max(batches):
            span = f"{min(batches)} to {max(batches)}" if min(batches) < max(batches) else f"{batches[0]} alone"
            out.append(
                f"{images:g} images a {gpu.name}: the profile's times are from {span}; beyond, they are drawn on"
            )
        return out
    if not net.measured(gpu):
        out.append(
            f"{gpu.name} was measured with {gpu.network} at 224, {_RESNET50 / 1e9:.3g} G multiply-adds an image: "
            f"{net.name}, {net.products / 1e9:.3g} G, is taken by its work; profile it to be sure"
        )
    if not gpu.least <= images <= gpu.most:
        out.append(
            f"{images:g} images a {gpu.name}: its times are from {gpu.least} to {gpu.most}; beyond, they are drawn on"
        )
    return out


def profile_of(given: str) -> tuple[Path, int]:
    """The folder of a profile and the images of its steps, from DIR:IMAGES."""
    folder, _, images = given.rpartition(":")
    if not folder or not images.isdecimal() or int(images) < 1:
        raise InputError(f"--profile {given}: DIR:IMAGES is wanted, the folder and the images of its steps")
    return Path(folder), int(images)


def profiled(profiles: Sequence[tuple[Path, int]], net: ModelCosts) -> MeasuredTimes:
    """Reads the folders that `kasoku profile` wrote, each with the images of its steps.

    Raises:
        InputError: where the blocks of a profile are not the network's.
    """
    measured, updates = [], []
    for folder, images in profiles:
        try:
            found = json.loads((folder / "profile.json").read_text())["blocks"]
            times = {str(b["name"]): (float(b["forward_s"]), float(b["backward_s"])) for b in found}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder}: no profile there ({error}): a folder of kasoku profile is wanted") from error
        odd = [name for name, (forward, backward) in times.items() if not (0 <= forward < 1e6 and 0 <= backward < 1e6)]
        if odd:
            raise InputError(f"{folder}: {odd[0]} takes {times[odd[0]]} s: times of 0 or more are wanted; profile anew")
        lost = [layer.name for layer in net.layers if not _block(layer.name, times)]
        if lost or not times:
            raise InputError(f"{folder}: a profile of another model: {net.name} has {lost[0]}, the profile has not")
        if more := [name for name in times if name not in net.modules]:
            raise InputError(f"{folder}: a profile of another model: it has {more[0]}, {net.name} has not")
        ledger = _ledger(folder)
        try:
            facts = ledger.get("facts", {})
            seen = facts.get("batch", images) * facts.get("parts", 1)
            updates.append(float(ledger.get("step_s", {}).get("update", 0.0)))
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"{folder / 'ledger.json'}: not what kasoku profile writes: profile anew") from error
        if seen != images:
            raise InputError(f"{folder}: a profile of steps of {seen} images: give {folder}:{seen}, not :{images}")
        measured.append((images, times))
    return MeasuredTimes(tuple(measured), sum(updates) / max(1, len(updates)))


def _ledger(folder: Path) -> dict[str, Any]:
    """That beside a profile; empty where there is none."""
    try:
        found = json.loads((folder / "ledger.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def units_of(
    profile: MeasuredTimes, net: ModelCosts, gpu: Gpu, images: float, *, slower: float = 1.0
) -> list[UnitTimes]:
    """The layers' times by a profile: of each block alpha + beta images where two batches were measured, else beta.

    What a block without parameters takes is the layer's before it: it runs after that one, and backward before it.
    """
    work = net.work(gpu)
    first = profile.measured[0][1]
    home = [_block(layer.name, first) for layer in net.layers]
    of_block = {block: sum(w for w, h in zip(work, home, strict=True) if h == block) for block in first}
    members = {block: home.count(block) for block in first}
    elements = [0] * len(net.layers)
    for t in net.tensors:
        elements[t.unit] += t.elements
    update_s = slower * profile.update_s / max(1, sum(elements))
    shares = [
        {block: mine / of_block[block] if of_block[block] else 1 / members[block]}
        for mine, block in zip(work, home, strict=True)
    ]
    for block, i in _between(first, home).items():
        shares[i][block] = 1.0
    out = []
    for layer, mine, own in zip(net.layers, shares, elements, strict=True):
        forward, backward = (
            slower * sum(share * _at(profile, block, way, images) for block, share in mine.items()) for way in (0, 1)
        )
        out.append(UnitTimes(layer.name, forward, backward, update_s * own))
    return out


def _between(blocks: Iterable[str], home: Sequence[str]) -> dict[str, int]:
    """The layer that each block without layers of its own follows; of the first ones the layer that follows them."""
    last = {block: i for i, block in enumerate(home)}
    out, before = {}, 0
    for block in blocks:
        if block in last:
            before = last[block]
        else:
            out[block] = before
    return out


def _at(profile: MeasuredTimes, block: str, way: int, images: float) -> float:
    """What a block takes at a batch: least squares through the measured ones, never below zero."""
    points = [(n, times[block][way]) for n, times in profile.measured]
    if len({n for n, _ in points}) == 1:
        return sum(s for _, s in points) / len(points) * images / points[0][0]
    mean_n = sum(n for n, _ in points) / len(points)
    mean_s = sum(s for _, s in points) / len(points)
    beta = sum((n - mean_n) * (s - mean_s) for n, s in points) / sum((n - mean_n) ** 2 for n, _ in points)
    return float(max(0.0, mean_s + beta * (images - mean_n)))


def _block(layer: str, times: dict[str, Any]) -> str:
    """The profile's block that a layer is or lies in."""
    return next((name for name in times if layer == name or layer.startswith(f"{name}.")), "")


def _work(gpu: Gpu, products: float, outputs: float) -> float:
    return max(2 * products / (1e12 * gpu.tflops), _TOUCHED * 2 * outputs / (1e9 * gpu.memory_gb_s))


def _products(module: nn.Module, outputs: float) -> float:
    """Multiply-adds: each element of an output of a matrix product takes a row of its weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return 0.0
    return outputs * float(weight[0].numel())
