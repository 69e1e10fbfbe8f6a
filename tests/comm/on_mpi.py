"""Communicator cases on groups of 1 to N of the N ranks of an MPI job, each run twice."""

import sys
from math import inf

from hpc3d.runtime import launch


def kind_of(comm):
    """Return the class, and "MPI" if long blocks also use MPI's collectives."""
    name, wire = type(comm).__name__, getattr(comm, "wire", comm)
    return f"{name} MPI" if getattr(wire, "long", 0) == inf else name


def body(job):
    from mpi4py import MPI

    from hpc3d.comm.cartesian import build
    from tests.comm.cases import every

    for size in range(1, job.size + 1):
        group = MPI.COMM_WORLD.Split(job.rank < size)
        if job.rank < size:
            comm = build({"x": size}, group, transport=sys.argv[1]).comm("x")
            every(comm)
            every(comm)
        if job.rank == 0:
            print(size, kind_of(comm), flush=True)
    job.barrier()


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
