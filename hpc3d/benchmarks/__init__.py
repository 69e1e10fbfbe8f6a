"""Measurements and predictions of `python -m hpc3d.bench`."""
