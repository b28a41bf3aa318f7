"""`kasoku predict`: the five likeliest classes of images, as CSV."""

from __future__ import annotations

import csv
import sys

import torch

from kasoku.commands.arguments import PredictArguments
from kasoku.data import find_images, normalise, read_image
from kasoku.training.trained_run import load


def run(arguments: PredictArguments) -> int:
    """Writes CSV to stdout: the image, then class and probability of the five likeliest; returns the exit code."""
    trained = load(arguments.trained, precision="fp32")  # bf16 rounds probabilities to two digits
    files = [file for image in arguments.images for file in find_images(image)]
    top = min(5, len(trained.classes))
    out = csv.writer(sys.stdout)
    out.writerow(["image"] + [f"{column}_{i + 1}" for i in range(top) for column in ("class", "probability")])
    for start in range(0, len(files), 64):
        part = files[start : start + 64]
        pixels_NHWC = torch.stack([read_image(file, trained.image_size, trained.channels) for file in part])
        x_NCHW = normalise(pixels_NHWC.to(trained.device), trained.mean, trained.std)
        best = trained.logits(x_NCHW).float().softmax(1).topk(top, dim=1)
        for file, probabilities, classes in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
            pairs = zip(classes, probabilities, strict=True)
            out.writerow([file] + [cell for k, p in pairs for cell in (trained.classes[k], f"{p:.4f}")])
    return 0
