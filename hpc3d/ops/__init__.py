"""Primitives: what one rank does to its own arrays, by NumPy, by CUDA, and without data."""
