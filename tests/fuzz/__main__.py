"""`make fuzz`: mutated inputs for all that reads what a stranger may have written.

    python tests/fuzz [KIND ...] [--seconds S] [--seed N] [--long] [--keep DIR]

Each kind gets an equal share of the seconds; with --long it stops at its part of a million inputs instead. A finding is
an input that ends in anything but the right result or one line: it is written to the folder of --keep, and the exit
code is 1. The last line is one JSON object: the inputs and findings of each kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import documents
import native

import files

KINDS = {**native.KINDS, **documents.KINDS, **files.KINDS}
LONG = {  # inputs
    "jpeg": 900_000,
    "jpeg-memory": 60_000,
    "recipe": 10_000,
    "set": 10_000,
    "tar": 15_000,
    "pack": 3_000,
    "checkpoint": 1_000,
    "run": 1_000,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="in all (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--long", action="store_true", help="a million inputs")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings go")
    arguments = parser.parse_args()
    kinds = arguments.kinds or list(KINDS)
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"no kind {unknown[0]}: of {', '.join(KINDS)}")
    results = {}
    for kind in kinds:
        seconds = 1e9 if arguments.long else arguments.seconds / len(kinds)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            limit = LONG[kind] if arguments.long else 10**9
            result = KINDS[kind](Path(folder), seed=arguments.seed, seconds=seconds, most=limit, keep=arguments.keep)
        results[kind] = result | {"seconds": round(time.monotonic() - begin, 1)}
        print(f"{kind}: {json.dumps(results[kind])}", flush=True)
    print(json.dumps({"fuzz": results}))
    return int(any(result["findings"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
