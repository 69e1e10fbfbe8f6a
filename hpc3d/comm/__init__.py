"""Communication: the mesh of ranks and its communicators."""
