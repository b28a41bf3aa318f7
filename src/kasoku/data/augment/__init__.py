"""Augmentation, as a pure function of (seed, epoch, sample index)."""
