"""What is computed from a trace."""
