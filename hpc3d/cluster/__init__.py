"""Ranks: how they start, where they stand on the mesh, how they talk, what they compute on."""
