"""What a run shows and writes: the bar, the logs, the charts."""

from kasoku.report.bar import Bar, print_table
from kasoku.report.ledger import Ledger
from kasoku.report.log import Log, NoLog
from kasoku.report.machine import environment
from kasoku.report.steps import Timed
from kasoku.report.verdict import Cause, Facts, facts_of

__all__ = [
    "Bar",
    "Cause",
    "Facts",
    "Ledger",
    "Log",
    "NoLog",
    "Timed",
    "environment",
    "facts_of",
    "print_table",
]
