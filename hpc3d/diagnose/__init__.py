"""Checks that `python -m hpc3d.doctor` runs."""
