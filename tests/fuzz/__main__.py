"""`make fuzz`: mutated inputs for all that reads what a stranger may have written.

    python tests/fuzz [KIND ...] [--seconds S] [--seed N] [--long] [--keep DIR]

Each core runs one kind at a time, in a process of its own, for an equal share of the seconds; with --long each kind
stops at its part of a million inputs instead. A finding is an input that gives neither the right result nor a refusal
in one line. It is written to the folder of --keep, and the exit code is 1, as it is for a kind without any input. The
last line is one JSON object: the seed, and the inputs and findings of each kind. One kind with the same seed gets the
same inputs again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import documents
import native

import files

KINDS = {**native.KINDS, **documents.KINDS, **files.KINDS}
LONG = {"jpeg": 870_000, "jpeg-memory": 80_000, "recipe": 6_000, "set": 6_000, "tar": 15_000}  # inputs
LONG |= {"pack": 20_000, "pack-raw": 5_000, "checkpoint": 1_000, "run": 1_000, "forged": 2_000}
_SHARES = {"jpeg": 2}  # its build takes long
_START_S = 4.0  # of each process: imports, and the last input


def _alone(kind: str, arguments: argparse.Namespace, begin: float) -> dict[str, Any]:
    """Runs one kind in this process."""
    until = math.inf if arguments.long else begin + arguments.seconds
    most = LONG[kind] if arguments.long else 10**9
    with tempfile.TemporaryDirectory() as folder:
        result = KINDS[kind](Path(folder), seed=arguments.seed, until=until, most=most, keep=arguments.keep)
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def _in_process(kind: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs one kind in another process; one that ends without a result is a finding."""
    words = [kind, "--seconds", str(seconds), "--seed", str(arguments.seed), "--keep", str(arguments.keep)]
    words += ["--long"] * arguments.long
    limit_s = None if arguments.long else seconds + 120  # Python's alarm does not reach a loop in C
    command = [sys.executable, str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=limit_s)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["fuzz"][kind]
    except (IndexError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"{kind} --seed {arguments.seed}: the process ended without a result ({error})", file=sys.stderr)
        result = {"inputs": 0, "findings": 1}
    print(f"{kind}: {json.dumps(result)}", flush=True)
    return result


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of wall time in all (default: %(default)g)")
    today = int(f"{datetime.date.today():%Y%m%d}")
    parser.add_argument("--seed", type=int, default=today, help="(default: the date, %(default)s)")
    parser.add_argument("--long", action="store_true", help="a million inputs")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings go")
    arguments = parser.parse_args()
    kinds = arguments.kinds or list(KINDS)
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"no kind {unknown[0]}: of {', '.join(KINDS)}")
    if len(kinds) == 1:
        results = {kinds[0]: _alone(kinds[0], arguments, begin)}
    else:
        cores = len(os.sched_getaffinity(0))
        shares = [_SHARES.get(kind, 1) for kind in kinds]
        share_s = arguments.seconds / max(math.ceil(sum(shares) / cores), *shares)
        with ThreadPoolExecutor(cores) as pool:
            ended = pool.map(lambda kind, n: _in_process(kind, arguments, n * share_s - _START_S), kinds, shares)
            results = dict(zip(kinds, ended, strict=True))
    inputs = sum(result["inputs"] for result in results.values())
    print(json.dumps({"fuzz": results, "seed": arguments.seed, "inputs": inputs}))
    return int(any(r["findings"] or not (r["inputs"] or "skipped" in r) for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
