"""hpc3d from Python: docs/api.md."""
