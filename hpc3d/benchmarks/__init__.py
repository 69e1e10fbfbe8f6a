"""Benchmarks and predictions performed by `python -m hpc3d.bench`."""
