"""The five nouns of kasoku and what serves them: torch, safetensors and the standard library only."""

from kasoku.core.clock import Clock, Wall, process_start
from kasoku.core.comm import Comm, Solo, Work
from kasoku.core.errors import CorruptionError, InputError, attributed, described, one_line, say, summary
from kasoku.core.job import Job
from kasoku.core.job_state import Batch, Hyper, Stateful
from kasoku.core.limits import Checked, Range, checked
from kasoku.core.local_threads import DeadlockError, Threads
from kasoku.core.retuning import Adaptive
from kasoku.core.schedule import ArcCotangent, Constant, Cosine, Linear, Polynomial, Schedule, StepDecay
from kasoku.core.technique import Stage, Technique
from kasoku.core.trace import Span, Trace

__all__ = [
    "Adaptive", "ArcCotangent", "Batch", "Checked", "Clock", "Comm", "Constant", "CorruptionError", "Cosine",
    "DeadlockError", "Hyper", "InputError", "Job", "Linear", "Polynomial", "Range", "Schedule", "Solo", "Span",
    "Stage", "Stateful", "StepDecay", "Technique", "Threads", "Trace", "Wall", "Work", "attributed", "checked",
    "described", "one_line", "process_start", "say", "summary",
]  # fmt: skip
