"""What the doctor examines."""
