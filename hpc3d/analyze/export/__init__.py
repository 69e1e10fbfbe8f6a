"""Export of the events of a trace to other tools."""
