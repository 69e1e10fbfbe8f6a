"""Reproductions of published results."""
