"""Every test of memory runs on one thread."""

from contracts import one_thread as one_thread
