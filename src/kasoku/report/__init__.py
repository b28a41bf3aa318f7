"""What a run shows and writes: the bar, the logs, the charts."""

from kasoku.report.bar import Bar, print_table
from kasoku.report.ledger import Ledger
from kasoku.report.log import Log, NoLog
from kasoku.report.machine import environment
from kasoku.report.steps import Timed
from kasoku.report.verdict import Bottleneck, StepFacts, facts_of

__all__ = [
    "Bar",
    "Bottleneck",
    "Ledger",
    "Log",
    "NoLog",
    "StepFacts",
    "Timed",
    "environment",
    "facts_of",
    "print_table",
]
