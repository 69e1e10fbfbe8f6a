"""Implementation of the benchmarks of `python -m hpc3d.bench`."""
