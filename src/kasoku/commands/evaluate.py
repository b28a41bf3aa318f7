"""`kasoku eval`: top-1 and top-5 of runs, alone and as an ensemble."""

from kasoku.commands.arguments import EvaluateArguments
from kasoku.training.trained_run import print_scores, score_runs


def run(arguments: EvaluateArguments) -> int:
    """Prints the accuracies; returns the exit code."""
    print_scores(score_runs(arguments.runs, arguments.data))
    return 0
