"""Export of trace events to other tools."""
