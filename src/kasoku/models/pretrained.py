"""Fine-tuning: loads published weights into a model and freezes its first blocks."""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job, Range, Stage, Technique, summary
from kasoku.core.errors import first_of
from kasoku.core.files import checked_file

WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints keep the weights
PREFIXES = ("module.", "_orig_mod.")  # that DistributedDataParallel and torch.compile put before names


@dataclass(frozen=True)
class Pretrained(Technique, stage=Stage.MODEL, in_sandbox=False):
    """Starts from a file of published weights and freezes the first `freeze` blocks.

    If only the number of classes differs, the head starts fresh.

    Args:
        weights: the file to start from: .safetensors, or a torch file of weights.
        freeze: the number of blocks, from the input on, that are not trained; 0 or more.

    Saves: most of the epochs.
    Costs: nothing.
    Maths: a frozen block's BatchNorm keeps its statistics too.
    Ref: Yosinski et al. 2014 (arXiv 1411.1792).
    """

    weights: str
    freeze: Annotated[int, Range(at_least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise InputError("weights: missing; the file to start from, .safetensors or a torch file of weights")

    def apply(self, job: Job) -> None:
        """Loads the weights and freezes the blocks; `close` unfreezes the blocks but keeps the weights."""
        load(job.model, self.weights)
        trained = [p for p in job.model.parameters() if p.requires_grad]
        freeze(job.model, self.freeze, patch=job.patch)
        job.on_close(lambda: [p.requires_grad_() for p in trained])


def load(model: nn.Module, path: str | Path) -> list[str]:
    """Copy the weights of a file into the model; return the names of the weights that were not loaded.

    The model's last linear layer keeps its initial values if the file has another number of classes. A torch file is
    read with weights_only, so none of its code runs. BatchNorm's num_batches_tracked may be missing. A model on the
    meta device is compared, and nothing is copied.

    Raises:
        InputError: the file is missing, damaged, of another model, or has more than tensors. The model is unchanged.
    """
    return fill(model, _as_timm_converts(model, read(path)), path)


def read(path: str | Path) -> dict[str, Tensor]:
    """Read the state_dict in a file of weights or in a checkpoint. Raises as `load`."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a .safetensors or torch file of weights")
    if (path.parent / "recipe.toml").is_file():  # of a run
        checked_file(path.parent, path.name)
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise many kinds of errors for foreign files
        wanted = "give a whole .safetensors file, or a torch file that holds a state_dict and nothing but tensors"
        raise InputError(f"{path}: cannot be read as weights ({summary(error)}); {wanted}") from None
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise InputError(f"{path}: holds no state_dict; give names and tensors, bare or under {', '.join(WRAPPERS)}")
    state = {str(name): tensor for name, tensor in content.items()}
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def fill(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> list[str]:
    """Copy a state_dict from `read` into the model, as `load` does; messages name `path`."""
    own = model.state_dict()
    # leave out the last linear layer if it differs only in the number of classes
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name in own if linear and name.rpartition(".")[0] == linear[-1]]
    pairs = [(own[name].shape, state[name].shape) for name in names if name in state]
    of_classes = len(pairs) == len(names) and all(a[0] != b[0] and a[1:] == b[1:] for a, b in pairs)
    fresh = names if of_classes else []
    state = {name: tensor for name, tensor in state.items() if name not in fresh}
    missing = [n for n in own if n not in state and n not in fresh and not n.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    other = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    misshapen = [f"{name} ({_shape(state[name])}, the model has {_shape(own[name])})" for name in other]
    kinds = {"missing": missing, "not in the model": unexpected, "of another shape": misshapen}
    if faults := [f"{len(names)} {kind}: {first_of(names, 3)}" for kind, names in kinds.items() if names]:
        raise InputError(f"{path}: not weights of this {type(model).__name__}; {'; '.join(faults)}")
    if any(tensor.is_meta for tensor in own.values()):
        return fresh
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a layout or a device that holds no values
        raise InputError(f"{path}: tensors that cannot be copied: {summary(error)}") from None
    return fresh


def _as_timm_converts(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for a network of timm: position embeddings for its image size, first convolutions for its channels."""
    module = sys.modules.get(type(model).__module__)
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if not module or not module.__name__.startswith("timm.") or own == {n: t.shape for n, t in state.items()}:
        return state
    convert = getattr(module, "checkpoint_filter_fn", None)
    first = getattr(model, "pretrained_cfg", {}).get("first_conv")
    with suppress(AttributeError, KeyError, RuntimeError, ValueError):  # not weights of this network: `fill` says so
        state = convert(state, model) if convert else state
        for name in [f"{conv}.weight" for conv in ([first] if isinstance(first, str) else first or ())]:
            if own[name][1] != state[name].shape[1] == 3:
                state[name] = import_module("timm.models").adapt_input_conv(own[name][1], state[name])
    return state


def freeze(model: nn.Module, blocks: int, *, patch: Callable[[nn.Module, str, Any], object] = setattr) -> list[str]:
    """Freeze the first blocks of a model; return the names of those blocks.

    Blocks are the model's top-level modules with weights. A normalisation belongs to the block before it, and an
    nn.Sequential with max-pools is split after each pool. ResNet has stem and layer1 to layer4; VGG has five stages.
    The last block, the head, always trains. Frozen normalisations stay in eval mode, also in copies and pickles of
    the model, so their running statistics do not change. `patch` sets attributes, such as a job's, which undoes it.

    Raises:
        InputError: `blocks` is below 0, or above the number of blocks before the head.
    """
    found = _blocks(model)
    names = ["+".join(block) for block in found]
    if not 0 <= blocks < len(found):
        most = f"{type(model).__name__} has {len(found) - 1} blocks before its head ({', '.join(names[:-1])})"
        raise InputError(f"freeze={blocks}: {most}; give 0 to {len(found) - 1}")
    for part in (part for block in found[:blocks] for part in block.values()):
        part.requires_grad_(False)
        for module in part.modules():
            if hasattr(module, "running_mean"):
                patch(module, "train", functools.partial(_stay_in_eval, module))
                patch(module, "training", False)
    return names[:blocks]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


def _blocks(model: nn.Module) -> list[dict[str, nn.Module]]:
    blocks: list[dict[str, nn.Module]] = []
    for name, child in model.named_children():
        parts = {name: child}
        if isinstance(child, nn.Sequential) and any(isinstance(part, nn.MaxPool2d) for part in child):
            parts = {f"{name}.{inner}": part for inner, part in child.named_children()}
        begins = True
        for part_name, part in parts.items():
            if next(part.parameters(), None) is not None:
                if begins and not (blocks and hasattr(part, "running_mean")):
                    blocks.append({})
                blocks[-1][part_name] = part
                begins = False
            begins = begins or isinstance(part, nn.MaxPool2d)
    return blocks


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
