"""The algebra: how matrices lie on the mesh, and the one sharded product."""
