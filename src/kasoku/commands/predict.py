"""`kasoku predict`: the five likeliest classes of images, as CSV."""

import csv
import sys

from kasoku.commands.arguments import PredictArguments
from kasoku.data import find_images
from kasoku.training.trained_run import load


def run(arguments: PredictArguments) -> int:
    """Writes CSV to stdout: the image, then class and probability of the five likeliest; returns the exit code."""
    trained = load(arguments.trained, precision="fp32")  # bf16 rounds probabilities to two digits
    files = [file for image in arguments.images for file in find_images(image)]
    out = csv.writer(sys.stdout)
    top = min(5, len(trained.classes))
    out.writerow(["image"] + [f"{column}_{i + 1}" for i in range(top) for column in ("class", "probability")])
    for file, likeliest in trained.classified(files, top):
        out.writerow([file] + [cell for name, share in likeliest for cell in (name, f"{share:.4f}")])
    return 0
