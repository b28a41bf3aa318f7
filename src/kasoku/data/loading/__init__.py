"""Loaders: batches in a reproducible order, read ahead by workers."""
