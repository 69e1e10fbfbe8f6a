"""Each line of a mesh has a communicator of its own."""

import numpy as np

from hpc3d.comm.threads import run


def test_every_line_of_a_mesh_is_its_own_group():
    def rank(mesh):
        mine = np.array([[mesh.rank]])
        lines = {axis: mesh.comm(axis).all_gather(mine).wait() for axis in "xyz"}
        return {axis: line.ravel().tolist() for axis, line in lines.items()}

    lines = run({"x": 2, "y": 1, "z": 3}, rank)
    assert lines[4] == {"x": [1, 4], "y": [4], "z": [3, 4, 5]}
