"""Data sets: which images there are, with their labels."""
