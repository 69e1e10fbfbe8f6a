"""Algorithm-based fault tolerance: checksums of products and of messages."""
