"""Communicator cases on groups of 2 to N of the N ranks of an MPI job, on simulated hosts.

`on_two_level.py HOST ... LONG ...` takes the host of each rank, and runs the cases once for each
LONG: the size in bytes from which blocks count as long. If LONG is a folder, rank 0's host has the
devices in it, and the other hosts have none.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

from hpc3d.runtime import launch

ROUNDED = (5, 70001)  # long for 5 members


def same_bits(comm):
    """All members get bitwise the same sum, although such sums depend on their order."""
    mine = np.random.default_rng(comm.rank).normal(size=ROUNDED).astype(np.float32)
    total = comm.all_reduce(mine).wait().view(np.uint32)
    whole = comm.all_gather(total[None]).wait()
    assert (whole == total).all()


def message_between(comm):
    """A message is not mixed up with a collective that is posted after it."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    block = np.full((comm.size, *ROUNDED), comm.rank + 10.0)
    coming = comm.recv(ROUNDED, block.dtype, before)
    pending = comm.reduce_scatter(block), comm.all_reduce(block)
    sent = comm.send(np.full(ROUNDED, float(comm.rank)), after)
    assert (coming.wait() == before).all()
    total = sum(range(10, 10 + comm.size))
    assert all((each.wait() == total).all() for each in reversed(pending))
    sent.wait()


def body(job):
    from mpi4py import MPI

    from hpc3d.comm import all_pairs, cartesian
    from hpc3d.runtime import host_map
    from tests.comm.cases import every
    from tests.comm.on_mpi import kind_of

    hosts, longs = sys.argv[1 : 1 + job.size], sys.argv[1 + job.size :]
    cartesian.node_of_rank = lambda comm: hosts[: comm.size]
    for long, size in product(longs, range(2, job.size + 1)):
        if long.isdigit():
            all_pairs.AllPairs.long = int(long)
        host_map._DEVICES = Path(long if job.rank == 0 else "/none")
        group = MPI.COMM_WORLD.Split(job.rank < size)
        if job.rank < size:
            comm = cartesian.build({"x": size}, group).comm("x")
            every(comm)
            same_bits(comm)
            message_between(comm)
        if job.rank == 0:
            print(size, kind_of(comm), flush=True)
    job.barrier()


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
