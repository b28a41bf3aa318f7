"""`kasoku eval`: top-1 and top-5 of runs, alone and as an ensemble."""

from __future__ import annotations

from kasoku.commands.arguments import EvaluateArguments
from kasoku.training.trained_run import evaluate_runs


def run(arguments: EvaluateArguments) -> int:
    """Prints the accuracies; returns the exit code."""
    return evaluate_runs(arguments.runs, arguments.data)
