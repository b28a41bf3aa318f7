"""`kasoku predict`: the five likeliest classes of images, as CSV or as a submission to the ILSVRC."""

import csv
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from kasoku.commands.arguments import PredictArguments
from kasoku.core import InputError, summary
from kasoku.data import find_images
from kasoku.training.trained_run import classify, load_members


def run(arguments: PredictArguments) -> int:
    """Writes a row for each image; returns the exit code. Raises InputError in the end if some cannot be read."""
    members = load_members([arguments.trained], precision="fp32")  # bf16 rounds probabilities to two digits
    numbers = class_numbers(arguments.numbers, members[0].classes) if arguments.numbers else None
    files = [file for image in arguments.images for file in find_images(image)]
    top = min(5, len(members[0].classes))
    columns = [f"{column}_{i + 1}" for i in range(top) for column in ("class", "probability")]
    errors, out, shown = list[str](), arguments.out, cast(Any, sys.stdout)
    with suppress(AttributeError):  # of a notebook
        shown.reconfigure(errors="surrogateescape")  # a path may be any bytes
    writing = partial(open, mode="w", encoding="utf-8", errors="surrogateescape", newline="")
    with writing(out) if out else nullcontext(shown) as lines:
        table = csv.writer(lines)
        if numbers is None:
            table.writerow(["image", *columns, "error"])
        for file, likeliest, error in classify(members, files, top):
            errors += [error] if error else []
            if arguments.json:
                found = [{"class": name, "probability": share} for name, share in likeliest]
                image = {"image": str(file), "classes": found, "error": error}
                arguments.document.setdefault("images", []).append(image)
            if numbers is not None:
                print(*([numbers[name] for name, _ in likeliest] or ["0"] * top), file=lines)
                continue
            cells = [cell for name, share in likeliest for cell in (name, f"{share:.4f}")]
            table.writerow([file, *(cells or [""] * len(columns)), error])
    if errors:
        raise InputError(f"{len(errors)} of {len(files)} images cannot be read, the first: {errors[0]}")
    return 0


def class_numbers(file: Path, classes: Sequence[str]) -> dict[str, str]:
    """The number of each class: the last word of its line, after the class. Raises InputError for a file without it."""
    try:
        lines = [line.rsplit(maxsplit=1) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"--numbers {file}: cannot be read ({summary(error)})") from error
    # a line of the ILSVRC's own list, map_clsloc.txt, ends with a name: n02119789 1 kit_fox
    pairs = [words if words[-1].isdecimal() else " ".join(words).split()[:2] for words in lines]
    numbers = {pair[0].strip(): pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    if lost := [name for name in classes if name not in numbers]:
        raise InputError(f"--numbers {file}: no number of class {lost[0]}: lines of a class and its number are wanted")
    return numbers
