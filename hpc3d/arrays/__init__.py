"""Array types and memory: a memory pool, 16-bit float arrays, and arrays without data."""
