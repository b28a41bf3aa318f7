"""What backward keeps, what is computed again, and updates as gradients arrive."""

from kasoku.memory.saved_memory import SavedMemory, larger

__all__ = ["SavedMemory", "larger"]
