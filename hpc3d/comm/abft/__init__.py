"""Algorithm-based fault tolerance: checksums of matrix products and messages."""
