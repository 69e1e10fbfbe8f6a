"""Tensor layouts on the mesh and the sharded matrix product."""
