"""Training checkpoints that can be loaded with any parallel layout."""
