"""What a run shows and writes: the bar, the logs, the charts."""

from kasoku.report.bar import Bar, print_table
from kasoku.report.ledger import Ledger
from kasoku.report.log import Log, NoLog
from kasoku.report.machine import environment
from kasoku.report.steps import Timed
from kasoku.report.verdict import StepBottleneck, StepFacts, facts_of

__all__ = [
    "Bar",
    "Ledger",
    "Log",
    "NoLog",
    "StepBottleneck",
    "StepFacts",
    "Timed",
    "environment",
    "facts_of",
    "print_table",
]
