"""What ranks say to each other: the mesh and its communicators."""
