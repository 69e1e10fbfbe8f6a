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


def test_ranks_with_other_tokens_and_the_same_weights_are_a_group():
    def rank(mesh):
        members = mesh.comm(mesh.data).all_gather(np.array([[mesh.rank]])).wait()
        return mesh.data, members.ravel().tolist(), mesh.index(mesh.data_axes)

    found = run({"d": 2, "x": 2, "c": 2}, rank)
    assert found[0] == ("c d", [0, 4, 1, 5], 0)
    assert found[7] == ("c d", [2, 6, 3, 7], 3)
    assert run({"d": 2, "x": 1}, rank)[1] == ("d", [0, 1], 1)
