"""A run from set-up to its last checkpoint: set-up, step, loop, evaluation, logging (floor 5)."""
