"""Training: optimizers, learning rate schedules, guards, and the training loop."""
