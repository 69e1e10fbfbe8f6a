"""The protocol of communicators on every implementation, against NumPy on the gathered data."""

import numpy as np
import pytest

from hpc3d.comm.communicator import Self
from hpc3d.comm.threads import run
from tests.comm.cases import CASES, DTYPES, blocks
from tests.mpi import checked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads(size, case, dtype):
    run({"x": size}, lambda mesh: case(mesh.comm("x"), dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_self(case):
    case(Self(), "float64")


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", "SharedMemory"), ("mpi", "MpiCommunicator")]
)
def test_real_ranks(transport, kind):
    out = checked(4, "-m", "tests.comm.on_mpi", transport, timeout=200)
    assert out.split() == ["1", "Self", "2", kind, "3", kind, "4", kind]


@pytest.mark.parametrize(
    ("hosts", "longs", "kinds"),
    [
        (
            "abcde",
            [1, 1 << 16],
            {
                2: "MpiCommunicator",
                3: "MpiCommunicator",
                4: "MpiCommunicator",
                5: "MpiCommunicator",
            },
        ),
        ("abba", [1], {2: "MpiCommunicator", 3: "MpiCommunicator", 4: "TwoLevel"}),
        (
            "aababb",
            [1 << 16],
            {
                2: "SharedMemory",
                3: "MpiCommunicator",
                4: "MpiCommunicator",
                5: "MpiCommunicator",
                6: "TwoLevel",
            },
        ),
        (
            "abccab",
            [1],
            {
                2: "MpiCommunicator",
                3: "MpiCommunicator",
                4: "MpiCommunicator",
                5: "MpiCommunicator",
                6: "TwoLevel",
            },
        ),
    ],
)
def test_ranks_of_several_hosts(hosts, longs, kinds):
    out = checked(len(hosts), "-m", "tests.comm.on_two_level", *hosts, *longs, timeout=200)
    assert out.split() == [str(word) for _ in longs for pair in kinds.items() for word in pair]


def test_every_line_of_a_mesh_is_its_own_group():
    def rank(mesh):
        mine = np.array([[mesh.rank]])
        lines = {axis: mesh.comm(axis).all_gather(mine).wait() for axis in "xyz"}
        return {axis: line.ravel().tolist() for axis, line in lines.items()}

    lines = run({"x": 2, "y": 1, "z": 3}, rank)
    assert lines[4] == {"x": [1, 4], "y": [4], "z": [3, 4, 5]}


CALLS = {
    "all_gather": lambda comm, block: comm.all_gather(block),
    "reduce_scatter": lambda comm, block: comm.reduce_scatter(block),
    "all_reduce": lambda comm, block: comm.all_reduce(block),
    "broadcast": lambda comm, block: comm.broadcast(block, 0),
    "reduce": lambda comm, block: comm.reduce(block, 0),
    "all_to_all": lambda comm, block: comm.all_to_all(block),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_thread_gets_the_memory_of_a_peer(call):
    def rank(mesh):
        comm = mesh.comm("x")
        block = blocks(comm, (6, 2), "float64")[comm.rank]
        return block, CALLS[call](comm, block).wait()

    ranks = run({"x": 3}, rank)
    for mine, (_, result) in enumerate(ranks):
        for peer, arrays in enumerate(ranks):
            assert mine == peer or not any(np.shares_memory(result, array) for array in arrays)


def test_a_sent_block_is_a_copy():
    def rank(mesh):
        comm = mesh.comm("x")
        block = np.full(3, comm.rank)
        comm.send(block, 1 - comm.rank).wait()
        block[:] = -1
        return comm.recv((3,), block.dtype, 1 - comm.rank).wait().tolist()

    assert run({"x": 2}, rank) == [[1, 1, 1], [0, 0, 0]]


def test_a_rank_that_raises_wakes_the_others():
    def rank(mesh):
        if mesh.rank == 1:
            raise KeyError("the first error")
        mesh.comm("x").all_reduce(np.ones(1)).wait()

    with pytest.raises(KeyError, match="the first error"):
        run({"x": 3}, rank)


def test_a_rank_that_raises_wakes_one_that_waits_for_a_message():
    def rank(mesh):
        if mesh.rank == 1:
            raise KeyError("the first error")
        mesh.comm("x").recv((1,), np.dtype(float), 1).wait()

    with pytest.raises(KeyError, match="the first error"):
        run({"x": 2}, rank)
