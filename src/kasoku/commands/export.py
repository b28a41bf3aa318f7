"""`kasoku export`: a trained network for other programs, as safetensors, torch.export or ONNX.

The exported program takes pixels: float32 x_NCHW from 0 to 1, any number of images; it normalises them itself and
returns logits_NK.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kasoku.commands import CommandArguments, argument, option
from kasoku.core import InputError
from kasoku.core.files import write_atomically
from kasoku.training.trained_run import Trained, load

SUFFIXES = {"safetensors": "safetensors", "torch-export": "pt2", "onnx": "onnx"}


@dataclass(frozen=True, kw_only=True)
class ExportArguments(CommandArguments):
    """The arguments of `kasoku export`."""

    trained: Path = argument(metavar="RUN")
    format: str = option(choices=tuple(SUFFIXES), required=True)
    out: Path | None = option(metavar="FILE", help="where to (default: in the run folder)")


def run(arguments: ExportArguments) -> int:
    """Exports, and prints the file; returns the exit code."""
    print(export(arguments.trained, arguments.format, arguments.out))
    return 0


class _FromPixels(nn.Module):
    """Normalises pixels, then the network."""

    mean: Tensor
    std: Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.network = trained.job.model
        self.register_buffer("mean", torch.tensor(trained.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(trained.std).view(1, -1, 1, 1))

    def forward(self, pixels_NCHW: Tensor) -> Tensor:
        out: Tensor = self.network((pixels_NCHW - self.mean) / self.std)
        return out


def export(run: Path, format: str, out: Path | None = None) -> Path:
    """Writes a run's best weights, or its whole network, as `format`: one of SUFFIXES; returns the file."""
    trained = load(run)
    trained.job.close()  # the plain network: no autocast, plain layout
    trained.job.model.cpu()
    path = out or run / f"export.{SUFFIXES[format]}"
    if format == "safetensors":
        facts = {"classes": json.dumps(trained.classes), "model": trained.recipe.model.use}
        more = {"mean": json.dumps(trained.mean), "std": json.dumps(trained.std)}
        weights = {name: w.contiguous() for name, w in trained.job.model.state_dict().items()}
        write_atomically(path, lambda part: save_file(weights, part, metadata={**facts, **more}))
        return path
    program = _FromPixels(trained).eval()
    example = (torch.rand(2, trained.channels, *trained.image_size),)
    shapes: Any = {"pixels_NCHW": {0: torch.export.Dim("batch", min=1)}}
    if format == "torch-export":
        exported = torch.export.export(program, example, dynamic_shapes=shapes)
        write_atomically(path, lambda part: torch.export.save(exported, part))
        return path
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError('ONNX export needs more packages: pip install "onnx>=1.17" "onnxscript>=0.5"') from error
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["logits"]}
    written = torch.onnx.export(program, example, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    if written is None:
        raise InputError(f"{run}: torch could not turn this network into ONNX; use --format torch-export")
    write_atomically(path, lambda part: written.save(str(part)))
    return path
