"""Checkpoints of runs, which can be loaded with any parallel layout."""
