"""kasoku (加速, "acceleration"): trains image classifiers to a wanted accuracy in the least time."""

__version__ = "0.1.0"
