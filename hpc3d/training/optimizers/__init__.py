"""Optimizers, whose states are sharded like the parameters."""
