"""LARS, in a foreach and a Triton implementation."""
