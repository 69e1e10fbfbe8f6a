"""Tensor parallelism of captured modules: linear layers that are split over several ranks."""
