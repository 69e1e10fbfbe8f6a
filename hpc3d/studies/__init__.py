"""Reproductions of published results, and parameter studies."""
