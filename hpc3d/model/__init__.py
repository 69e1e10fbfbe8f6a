"""A hand-written GPT-2, forward and backward, on the sharded product."""
