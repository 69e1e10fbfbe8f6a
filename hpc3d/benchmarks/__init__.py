"""Benchmarks for `python -m hpc3d.bench`."""
