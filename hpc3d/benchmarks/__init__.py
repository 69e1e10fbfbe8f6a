"""Measurements and predictions that `python -m hpc3d.bench` runs."""
