"""Arrays: a pool that reuses memory, 16-bit arrays, and abstract arrays without data."""
