"""Search for the layout with the shortest step time."""
