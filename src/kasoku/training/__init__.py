"""Training from a recipe: the loop, checkpoints, validation, and trained runs put to use."""
