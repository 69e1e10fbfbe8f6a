"""Profiling of a torch module: compute times, overheads and message times for the planner."""
