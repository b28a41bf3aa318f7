"""`kasoku predict`: the five likeliest classes of images, as CSV."""

import csv
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import IO

from kasoku.commands.arguments import PredictArguments
from kasoku.core import InputError
from kasoku.data import find_images
from kasoku.training.trained_run import classify, load_members


def run(arguments: PredictArguments) -> int:
    """Writes a row for each image: its path, class and probability of the five likeliest, why it cannot be read.

    Returns the exit code. Raises InputError in the end if some images cannot be read.
    """
    members = load_members([arguments.trained], precision="fp32")  # bf16 rounds probabilities to two digits
    files = [file for image in arguments.images for file in find_images(image)]
    top = min(5, len(members[0].classes))
    columns = [f"{column}_{i + 1}" for i in range(top) for column in ("class", "probability")]
    errors = []
    out = arguments.out
    stream: AbstractContextManager[IO[str]] = nullcontext(sys.stdout)
    if out:
        stream = out.open("w", encoding="utf-8", errors="surrogateescape", newline="")  # a path may be any bytes
    with stream as lines:
        table = csv.writer(lines)
        table.writerow(["image", *columns, "error"])
        for file, likeliest, error in classify(members, files, top):
            cells = [cell for name, share in likeliest for cell in (name, f"{share:.4f}")]
            table.writerow([file, *(cells or [""] * len(columns)), error])
            errors += [error] if error else []
    if errors:
        raise InputError(f"{len(errors)} of {len(files)} images cannot be read, the first: {errors[0]}")
    return 0
