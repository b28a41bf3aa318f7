"""What backward keeps, what is computed again, and updates as gradients arrive."""

from kasoku.memory.saved import SavedMemory, larger

__all__ = ["SavedMemory", "larger"]
