"""Checks of `hpc3d.doctor`."""
