"""Transformer models with hand-written backward passes and sharded matrix products."""
