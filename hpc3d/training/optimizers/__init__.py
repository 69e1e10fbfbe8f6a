"""The optimizers, whose states are sharded as the parameters."""
