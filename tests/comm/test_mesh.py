"""Each line of a mesh has its own communicator."""

import numpy as np

from hpc3d.comm.mesh import plane
from hpc3d.comm.threads import run


def test_each_axis_of_a_mesh_has_its_own_communicator():
    def rank(mesh):
        mine = np.array([[mesh.rank]])
        lines = {axis: mesh.comm(axis).all_gather(mine).wait() for axis in "xyz"}
        return {axis: line.ravel().tolist() for axis, line in lines.items()}

    lines = run({"x": 2, "y": 1, "z": 3}, rank)
    assert lines[4] == {"x": [1, 4], "y": [4], "z": [3, 4, 5]}


def replicas(sizes):
    """Return, for each rank, the name and members of its group with other tokens and the same
    dense weights, and its index in the group; and the same for expert weights."""

    def rank(mesh):
        def group(axes):
            members = mesh.comm(plane(axes)).all_gather(np.array([[mesh.rank]])).wait()
            return plane(axes), members.ravel().tolist(), mesh.index(axes)

        return group(mesh.data_axes), group(mesh.expert_data_axes)

    return run(sizes, rank)


def test_context_and_data_ranks_form_one_replica_group():
    found = replicas({"d": 2, "x": 2, "c": 2})
    assert found[0] == (("c d", [0, 4, 1, 5], 0),) * 2
    assert found[7] == (("c d", [2, 6, 3, 7], 3),) * 2
    assert replicas({"d": 2, "x": 1})[1] == (("d", [0, 1], 1),) * 2


def test_expert_ranks_replicate_only_dense_weights():
    dense, experts = replicas({"d": 2, "e": 2, "x": 2})[5]
    assert dense == ("d e", [1, 3, 5, 7], 2)
    assert experts == ("d", [1, 5], 1)
    dense, experts = replicas({"d": 2, "e": 2, "c": 2})[3]
    assert dense == ("c d e", [0, 2, 4, 6, 1, 3, 5, 7], 5)
    assert experts == ("c d", [2, 6, 3, 7], 2)
    assert replicas({"e": 2})[1] == (("d e", [0, 1], 1), ("d", [1], 0))
