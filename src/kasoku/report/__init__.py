"""What a run shows and writes: the bar, the logs, the charts."""

from kasoku.report.bar import Bar, print_table
from kasoku.report.log import Log, NoLog
from kasoku.report.machine import environment
from kasoku.report.plot import Panel, draw

__all__ = ["Bar", "Log", "NoLog", "Panel", "draw", "environment", "print_table"]
