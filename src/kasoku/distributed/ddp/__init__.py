"""Synchronous data parallelism: gradients are reduced in buckets, overlapped with backward and the next forward."""
