"""Shared memory of the ranks of a node: `on_shared_memory.py MODE FOLDER` in an MPI job.

The shared memory is created in FOLDER, so that tests can find remaining files.
"""

import os
import signal
import sys
import time

import numpy as np

from hpc3d.runtime import launch


def round_of_calls(comm, rows):
    """Make every call once, with small and large blocks, as in a training step."""
    block = np.full((rows * comm.size, 3), comm.rank, np.float64)
    whole = comm.all_gather(block[:rows]).wait()
    partial = comm.buffer(block.shape, block.dtype)
    np.copyto(partial, block)
    part = comm.reduce_scatter(partial).wait()
    del partial
    total = comm.all_reduce(block).wait()
    owned = comm.broadcast(block if comm.rank == 0 else block[:0], 0).wait()
    comm.reduce(owned, 1).wait()
    return [float(array.sum()) for array in (whole, part, total, owned)]


def steady(comm):
    """Later rounds give the results of the first round, in the memory of the first rounds."""
    sizes = (1, 100, 5000)
    first = [round_of_calls(comm, rows) for rows in sizes]
    for _ in range(3):
        [round_of_calls(comm, rows) for rows in sizes]
    regions, live = len(comm.regions), comm.pool.live["communication"]
    for _ in range(30):
        assert [round_of_calls(comm, rows) for rows in sizes] == first
    assert len(comm.regions) == regions
    assert comm.pool.live["communication"] == live
    return "steady"


def slow(comm):
    """One member reads blocks late, after the others have released them."""
    for number in range(6):
        whole = comm.all_gather(np.full(4, 10 * number + comm.rank)).wait()
        if comm.rank == 1:
            time.sleep(0.1)
        np.testing.assert_array_equal(whole, np.repeat(10 * number + np.arange(comm.size), 4))
        del whole
    return "slow"


def kept(comm):
    """One member keeps blocks that the others release."""
    keep = []
    for number in range(9):
        whole = comm.all_gather(np.full(4, 10 * number + comm.rank)).wait()
        expected = np.repeat(10 * number + np.arange(comm.size), 4)
        np.testing.assert_array_equal(whole, expected)
        if comm.rank == 1:
            keep.append(whole)


def sizes(comm):
    """One member passes a larger block than the others."""
    comm.all_gather(np.zeros(10 if comm.rank else 1000)).wait()


def order(comm):
    """One member makes two calls in another order."""
    calls = [lambda: comm.all_gather(np.ones(9)), lambda: comm.all_reduce(np.ones((60, 60)))]
    for call in calls if comm.rank else reversed(calls):
        call().wait()


def many(comm):
    """More calls are in flight than a member's line in the flag page can hold: one member posts
    all of them before the other posts most of its calls."""
    blocks = [np.full(3, 10 * number + comm.rank) for number in range(20)]
    early = 3 if comm.rank else len(blocks)
    pending = [comm.all_gather(block) for block in blocks[:early]]
    wholes = [pending[0].wait()] if comm.rank == 0 else []
    comm.comm.Barrier()
    pending += [comm.all_gather(block) for block in blocks[early:]]
    wholes += [whole.wait() for whole in pending[len(wholes) :]]
    for number, whole in enumerate(wholes):
        expected = np.repeat(10 * number + np.arange(comm.size), 3)
        np.testing.assert_array_equal(whole, expected)
    return "many"


def killed(comm):
    """A member dies while the others wait for it."""
    round_of_calls(comm, 5000)
    comm.comm.Barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    round_of_calls(comm, 5000)


def kind(comm):
    return type(comm).__name__


def body(job):
    from hpc3d.comm import shared_memory
    from hpc3d.comm.cartesian import build

    mode, shared_memory.SHARED = globals()[sys.argv[1]], sys.argv[2]
    comm = build({"x": job.size}).comm("x")
    job.barrier()
    assert mode is kind or not os.listdir(shared_memory.SHARED)
    job.barrier()
    try:
        said = mode(comm)
    except RuntimeError as error:
        assert str(error).startswith(f"ranks {comm.members} ")
        said = "refused"
    print(said, flush=True)
    job.barrier()


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
