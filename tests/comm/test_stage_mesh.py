"""Pipeline stages with different numbers of replicas: senders and receivers of each row."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm.communicator import Self
from hpc3d.comm.stage_mesh import ranks_of, shares, stage_and_replica, stage_mesh
from hpc3d.comm.threads import run_stages

ROWS = 6


def test_ranks_are_numbered_stage_by_stage():
    assert ranks_of((2, 1, 3)) == [range(2), range(2, 3), range(3, 6)]
    assert [stage_and_replica((2, 1, 3), rank) for rank in range(6)] == [
        *((0, 0), (0, 1), (1, 0)),
        *((2, 0), (2, 1), (2, 2)),
    ]


@pytest.mark.parametrize(("rows", "replicas"), [(6, 3), (7, 3), (5, 5), (8, 1)])
def test_replicas_split_all_rows_in_order(rows, replicas):
    found = shares(rows, replicas)
    assert [row for part in found for row in part] == [*range(rows)]
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (2, 1), (1, 3), (3, 2, 2), (2, 1, 1, 3)])
@pytest.mark.parametrize("each", [1, 4])
def test_rows_reach_the_replicas_of_the_next_stage_and_return(replicas, each):
    """Send `each` rows per sample forward and back; every rank receives its rows of the first
    stage's block."""
    whole = np.arange(ROWS * each * 2.0).reshape(-1, 2)

    def rank(mesh, _):
        stage, comm = mesh.coord("p"), mesh.comm("p")
        mine = shares(ROWS, mesh.size("d"))[mesh.coord("d")]
        wanted = whole[mine.start * each : mine.stop * each]
        block = wanted
        if stage > 0:
            block = comm.recv(wanted.shape, wanted.dtype, stage - 1).wait()
            assert (block == wanted).all()
        if stage + 1 < len(replicas):
            comm.send(block, stage + 1).wait()
            block = comm.recv(wanted.shape, wanted.dtype, stage + 1).wait()
            assert (block == -wanted).all()
        if stage > 0:
            comm.send(-wanted, stage - 1).wait()
        return len(mine)

    found = run_stages(replicas, ROWS, rank)
    assert sum(found) == ROWS * len(replicas)


def test_unequal_stages_send_each_row_once():
    """There are four messages from 3 replicas (rows 0 1, 2 3, 4 5) to 2 (rows 0 1 2, 3 4 5)."""
    sent = {}

    def rank(mesh, _):
        comm = mesh.comm("p")
        if mesh.coord("p"):
            comm.recv((3, 1), np.float64, 0).wait()
            return
        comm.world.send = lambda block, peer, send=comm.world.send: (
            sent.setdefault((mesh.rank, peer), len(block)) and send(block, peer)
        )
        comm.send(np.zeros((2, 1)), 1).wait()

    run_stages((3, 2), ROWS, rank)
    assert sent == {(0, 3): 2, (1, 3): 1, (1, 4): 1, (2, 4): 2}


def test_arrays_of_the_world_may_be_in_host_memory():
    """Messages between stages with different numbers of replicas are in device memory."""
    world, host = Self(Pool(), 0), Self(Pool(), 0)
    mesh = stage_mesh((1,), 4, world, lambda members: world, host)
    assert mesh.world is host and mesh.pool is world.pool is not host.pool


def test_replicas_of_a_stage_have_a_data_axis():
    def rank(mesh, line):
        total = mesh.comm("d").all_reduce(np.array([float(mesh.rank)])).wait()[0]
        ends = line([0, 4]) if mesh.rank in (0, 4) else None
        return total, ends and ends.all_reduce(np.array([1.0])).wait()[0]

    found = run_stages((2, 3), ROWS, rank)
    assert found == [(1.0, 2.0), (1.0, None), (9.0, None), (9.0, None), (9.0, 2.0)]


def test_ranks_of_a_replica_have_a_tensor_axis():
    """Two ranks per replica: ranks with the same index exchange rows and reduce gradients."""

    def rank(mesh, _):
        sums = [mesh.comm(axis).all_reduce(np.array([mesh.rank])).wait()[0] for axis in "dx"]
        return tuple(map(mesh.coord, "pdx")), *sums, mesh.comm("p").members

    assert ranks_of((2, 1), 2, plane=1) == [range(1, 5, 2), range(5, 7, 2)]
    assert run_stages((2, 1), ROWS, rank, ways=2) == [
        ((0, 0, 0), 2, 1, (0, 4)),
        ((0, 0, 1), 4, 1, (1, 5)),
        ((0, 1, 0), 2, 5, (2, 4)),
        ((0, 1, 1), 4, 5, (3, 5)),
        ((1, 0, 0), 4, 9, (0, 4)),
        ((1, 0, 1), 5, 9, (1, 5)),
    ]
