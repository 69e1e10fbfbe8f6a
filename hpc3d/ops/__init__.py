"""Primitives: operations on one rank's arrays, with NumPy, CUDA and abstract rules."""
