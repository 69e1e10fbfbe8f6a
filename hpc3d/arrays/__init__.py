"""Arrays: memory that is used again, and arrays without data."""
