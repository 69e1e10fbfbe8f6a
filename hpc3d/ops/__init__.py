"""Primitives: local array operations, implemented for NumPy, CUDA and abstract arrays."""
