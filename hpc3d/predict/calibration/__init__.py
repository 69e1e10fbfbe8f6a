"""A machine from traces of runs on it."""
