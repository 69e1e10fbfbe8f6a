"""Metrics that are computed from a trace."""
