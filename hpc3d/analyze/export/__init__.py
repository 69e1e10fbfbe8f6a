"""The events of a trace for other programs."""
