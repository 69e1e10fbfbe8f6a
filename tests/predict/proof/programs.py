"""Meshes and arrays with states, for tests."""

import numpy as np

from hpc3d.predict.proof.state_check import StateCheck
from hpc3d.predict.proof.stated_mesh import stated_mesh


def mesh_of(varied=(), **sizes):
    """Return a mesh whose check refuses wrong states."""
    return stated_mesh(sizes, dict.fromkeys(sizes, 0), StateCheck(lambda: "here", varied))


def block(mesh, shape, **states):
    """Return an array with states."""
    array = mesh.empty(shape, np.float64)
    array.cell.states = states
    return array
