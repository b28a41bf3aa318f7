"""`kasoku export`: a trained network for other programs, as safetensors, torch.export or ONNX.

The exported program takes pixels: float32 x_NCHW from 0 to 1, any number of images; it normalises them itself and
returns logits_NK.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kasoku.commands.arguments import FORMATS, ExportArguments
from kasoku.core import InputError
from kasoku.core.files import write_atomically
from kasoku.training.trained_run import Trained, load


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


def run(arguments: ExportArguments) -> int:
    """Writes a run's best weights, or its whole network, and prints the file; returns the exit code."""
    trained = load(arguments.trained)
    trained.job.close()  # the plain network: no autocast, plain layout
    trained.job.model.cpu()
    save: Callable[[Path], object]
    program = _FromPixels(trained).eval()
    example = (torch.rand(2, trained.channels, *trained.image_size),)
    shapes: Any = {"pixels_NCHW": {0: torch.export.Dim("batch", min=1)}}
    if arguments.format == "safetensors":
        facts = {"classes": json.dumps(trained.classes), "model": trained.recipe.model.use}
        facts |= {"mean": json.dumps(trained.mean), "std": json.dumps(trained.std)}
        weights = {name: w.contiguous() for name, w in trained.job.model.state_dict().items()}
        save = partial(save_file, weights, metadata=facts)
    elif arguments.format == "torch-export":
        save = partial(torch.export.save, torch.export.export(program, example, dynamic_shapes=shapes))
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
        save = written.save
    path = arguments.out or arguments.trained / f"export.{FORMATS[arguments.format]}"
    write_atomically(path, save)
    print(path)
    return 0
