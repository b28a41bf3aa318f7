"""Augmentation, and schedules of batch and image size. No draw depends on an earlier one."""
