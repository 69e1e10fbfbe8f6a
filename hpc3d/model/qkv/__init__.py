"""Projections and norms of queries, keys and values."""
