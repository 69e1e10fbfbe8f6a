"""Primitives: local array operations with rules for NumPy, CUDA and abstract arrays."""
