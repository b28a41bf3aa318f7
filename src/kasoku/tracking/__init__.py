"""Experiment trackers: W&B, trackio, MLflow, TensorBoard."""

from kasoku.tracking.track import Track, Tracker

__all__ = ["Track", "Tracker"]
