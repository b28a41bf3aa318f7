"""What a run shows and writes: the bar, the logs."""

from kasoku.report.bar import Bar, print_table
from kasoku.report.log import Log
from kasoku.report.machine import environment

__all__ = ["Bar", "Log", "environment", "print_table"]
