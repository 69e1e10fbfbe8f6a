"""Training: optimizers, learning rate schedules, guards, and the loop of a run."""
