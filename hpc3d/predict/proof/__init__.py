"""Proof that a layout reduces and gathers every value exactly once, without running it."""
