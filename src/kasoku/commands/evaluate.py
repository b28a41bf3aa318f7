"""`kasoku eval`: top-1 and top-5 of runs, alone and as an ensemble."""

from dataclasses import asdict

from kasoku.commands.arguments import EvaluateArguments
from kasoku.training.trained_run import print_scores, score_runs


def run(arguments: EvaluateArguments) -> int:
    """Prints the accuracies; returns the exit code."""
    scores = score_runs(arguments.runs, arguments.data)
    print_scores(scores)
    arguments.document.update(scores=[{"name": name, **asdict(each)} for name, each in scores])
    return 0
