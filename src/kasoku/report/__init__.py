"""Progress bar, logs, the ledger of time, bottlenecks, and the report page."""

from kasoku.report.bottleneck import StepBottleneck, StepFacts, facts_of
from kasoku.report.environment import environment
from kasoku.report.ledger import Ledger, LiveVerdict, Timed
from kasoku.report.loggers import Bar, Log, print_table
from kasoku.report.script_timer import watch

__all__ = [
    "Bar", "Ledger", "LiveVerdict", "Log", "StepBottleneck", "StepFacts", "Timed", "environment", "facts_of",
    "print_table", "watch",
]  # fmt: skip
