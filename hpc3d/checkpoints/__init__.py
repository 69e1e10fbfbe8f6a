"""Checkpoints of runs: any layout loads any layout."""
