"""Which layout has the shortest step."""
