"""Primitives, which are local array operations with NumPy, CUDA and abstract rules."""
