"""Checks performed by `python -m hpc3d.doctor`."""
