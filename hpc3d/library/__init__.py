"""Python interface of hpc3d (docs/api.md)."""
