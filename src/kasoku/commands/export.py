"""`kasoku export`: a trained network, or an ensemble of them, for other programs: safetensors, torch.export or ONNX.

The exported program takes pixels: float32 (N, C, H, W) from 0 to 1, any number of images; it normalises them itself and
returns logits (N, K); of an ensemble these are the logarithms of its members' mean probabilities. Each file says so
itself and holds the names of the classes: safetensors and ONNX in their metadata, torch.export in the extra file
kasoku.json.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kasoku.commands.arguments import FORMATS, ExportArguments
from kasoku.core import InputError
from kasoku.core.files import write_atomically
from kasoku.data.augment.basic import stored_side
from kasoku.training.trained_run import Trained, ensemble_logits, load_members


class _FromPixels(nn.Module):
    """Normalises pixels, then the network; or all networks of an ensemble."""

    mean: Tensor
    std: Tensor

    def __init__(self, members: Sequence[Trained]) -> None:
        super().__init__()
        self.networks = nn.ModuleList([member.job.model for member in members])
        self.register_buffer("mean", torch.tensor(members[0].mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(members[0].std).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        x_NCHW = (pixels - self.mean) / self.std
        return ensemble_logits([network(x_NCHW) for network in self.networks])


def run(arguments: ExportArguments) -> int:
    """Writes a run's best weights, or its whole network, and prints the file and its input; returns the exit code."""
    members = load_members([arguments.trained])
    for member in members:
        member.job.close()  # the plain network: no autocast, plain layout
        member.job.model.cpu()
    trained = members[0]
    facts = _facts(members, weights_only=arguments.format == "safetensors")
    save: Callable[[Path], object]
    program = _FromPixels(members).eval()
    example = (torch.rand(2, trained.channels, *trained.image_size),)
    shapes: Any = {"pixels": {0: torch.export.Dim("batch", min=1)}}
    if arguments.format == "safetensors":
        networks = nn.ModuleDict({member.path.name: member.job.model for member in members})
        plain = networks if len(members) > 1 else trained.job.model
        weights = {name: w.contiguous() for name, w in plain.state_dict().items()}
        save = partial(save_file, weights, metadata=facts)
    elif arguments.format == "torch-export":
        exported = torch.export.export(program, example, dynamic_shapes=shapes)
        save = partial(torch.export.save, exported, extra_files={"kasoku.json": json.dumps(facts)})
    else:
        try:
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise InputError('ONNX export needs more packages: pip install "onnx>=1.17" "onnxscript>=0.5"') from error
        names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["logits"]}
        written = torch.onnx.export(program, example, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        if written is None:
            message = "torch could not turn this network into ONNX; use --format torch-export"
            raise InputError(f"{arguments.trained}: {message}")
        written.model.metadata_props.update(facts)
        graph = written.model.graph
        graph.inputs[0].doc_string, graph.outputs[0].doc_string = facts["input"], facts["output"]
        save = written.save
    path = arguments.out or arguments.trained / f"export.{FORMATS[arguments.format]}"
    write_atomically(path, save)
    print(f"{path}\ninput: {facts['input']}\nfrom a photo: {facts['resize']}")
    print(f"output: {facts['output']}; the file holds the names of the classes")
    return 0


def _facts(members: Sequence[Trained], *, weights_only: bool) -> dict[str, str]:
    """What another program must know to use the network; the same in all formats."""
    trained, count = members[0], len(members)
    shape = " x ".join(map(str, trained.image_size))
    resize = f"the middle 7/8 of the photo in the shape of {shape}, bilinear, antialiased"
    if len(set(trained.image_size)) == 1:
        side = stored_side(trained.image_size[0])
        resize = f"shorter side to {side}, bilinear, antialiased; then the middle {shape}"
    resize += "; a JPEG is decoded at 1/2, 1/4 or 1/8 before that, where it stays larger"
    colours = {1: "grey", 3: "RGB"}.get(trained.channels, "all channels")
    mean, std = json.dumps(trained.mean), json.dumps(trained.std)
    then = f"then normalised: (pixel - mean) / std, mean {mean}, std {std}" if weights_only else "not normalised"
    output = f"logits, float32, N x {len(trained.classes)}, before softmax"
    if count > 1:
        output += f"; of the ensemble the logarithms of its {count} members' mean probabilities"
    return {
        "input": f"pixels, float32, N x {trained.channels} x {shape}, {colours} from 0 to 1, {then}",
        "resize": resize,
        "output": output,
        "classes": json.dumps(trained.classes),
        "model": ", ".join(dict.fromkeys(member.recipe.model.use for member in members)),
        "mean": mean,
        "std": std,
    }
