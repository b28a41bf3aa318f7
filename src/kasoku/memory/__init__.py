"""What backward keeps, what is computed again, and updates as gradients arrive."""

from kasoku.memory.saved import SavedMemory

__all__ = ["SavedMemory"]
