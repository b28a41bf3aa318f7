"""`kasoku reproduce`: the experiments of a document, scaled to this machine, beside what it published.

It runs benchmarks of the checkout, and its program lies beside them: benchmarks/reproduce.py.
"""

import sys
from importlib import import_module
from pathlib import Path

from kasoku.commands.arguments import ReproduceArguments
from kasoku.core import InputError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(arguments: ReproduceArguments) -> int:
    """Runs the program; returns its exit code. Raises InputError outside a checkout."""
    if not (BENCHMARKS / "reproduce.py").is_file():
        remedy = "clone the repository, and pip install -e '.[report,search,onnx]' there"
        raise InputError(f"kasoku reproduce runs benchmarks, which kasoku's package does not hold: {remedy}")
    sys.path.insert(0, str(BENCHMARKS))
    code: int = import_module("reproduce").run(arguments)
    return code
