"""How ranks train together."""

from kasoku.parallel.barrier import AllReduce

__all__ = ["AllReduce"]
