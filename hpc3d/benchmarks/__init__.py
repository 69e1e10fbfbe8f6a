"""Benchmarks and predictions of the command `python -m hpc3d.bench`."""
