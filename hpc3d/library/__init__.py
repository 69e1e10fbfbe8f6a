"""Python API of hpc3d, described in docs/api.md."""
