"""What backward keeps, what is computed again, and updates as gradients arrive."""

from kasoku.memory.saved_memory import SavedMemory

__all__ = ["SavedMemory"]
