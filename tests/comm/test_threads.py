"""Ranks that are threads of one process."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from tests.comm.cases import CASES, DTYPES, NARROW, blocks, rounded_once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_thread_communicators(size, case, dtype):
    run({"x": size}, lambda mesh: case(mesh.comm("x"), dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_16_bit_sums_are_rounded_once(size, dtype):
    run({"x": size}, lambda mesh: rounded_once(mesh.comm("x"), dtype))


CALLS = {
    "all_gather": lambda comm, block: comm.all_gather(block),
    "reduce_scatter": lambda comm, block: comm.reduce_scatter(block),
    "all_reduce": lambda comm, block: comm.all_reduce(block),
    "broadcast": lambda comm, block: comm.broadcast(block, 0),
    "reduce": lambda comm, block: comm.reduce(block, 0),
    "all_to_all": lambda comm, block: comm.all_to_all(block),
}


@pytest.mark.parametrize("call", CALLS)
def test_threads_do_not_share_result_memory(call):
    def rank(mesh):
        comm = mesh.comm("x")
        block = blocks(comm, (6, 2), "float64")[comm.rank]
        return block, CALLS[call](comm, block).wait()

    ranks = run({"x": 3}, rank)
    for mine, (_, result) in enumerate(ranks):
        for peer, arrays in enumerate(ranks):
            assert mine == peer or not any(np.shares_memory(result, array) for array in arrays)


def test_sent_block_is_copied():
    def rank(mesh):
        comm = mesh.comm("x")
        block = np.full(3, comm.rank)
        comm.send(block, 1 - comm.rank).wait()
        block[:] = -1
        return comm.recv((3,), block.dtype, 1 - comm.rank).wait().tolist()

    assert run({"x": 2}, rank) == [[1, 1, 1], [0, 0, 0]]


def test_exception_on_one_rank_ends_the_others():
    def rank(mesh):
        if mesh.rank == 1:
            raise KeyError("the first error")
        mesh.comm("x").all_reduce(np.ones(1)).wait()

    with pytest.raises(KeyError, match="the first error"):
        run({"x": 3}, rank)


def test_exception_on_one_rank_ends_a_pending_receive():
    def rank(mesh):
        if mesh.rank == 1:
            raise KeyError("the first error")
        mesh.comm("x").recv((1,), np.dtype(float), 1).wait()

    with pytest.raises(KeyError, match="the first error"):
        run({"x": 2}, rank)
