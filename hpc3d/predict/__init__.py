"""What a run would cost: its program, its machine, and the layouts to choose from."""
