"""Measurement of a module's compute and message times, for plans based on measured times."""
