"""Measurement of the times of a module's pieces, for plans based on measured times."""
