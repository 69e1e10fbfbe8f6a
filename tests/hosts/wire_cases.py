"""Collectives over ranks of several hosts: `wire_cases.py` on the ranks of an MPI job.

Rank 0 prints the communicator's name and the bytes of its block. For each call, it prints the
bytes that the network card of each rank's host received and sent during the call.
"""

import json
import sys
from pathlib import Path

import numpy as np

from hpc3d.runtime import launch

ROWS = 3 << 19  # of float32; the headers of the wire are then a small part
CARD = [Path(f"/sys/class/net/eth0/statistics/{way}_bytes") for way in ("rx", "tx")]
CALLS = {
    "all_gather": lambda comm, block: comm.all_gather(block[: ROWS // comm.size]),
    "reduce_scatter": lambda comm, block: comm.reduce_scatter(block),
    "all_reduce": lambda comm, block: comm.all_reduce(block),
    "broadcast": lambda comm, block: comm.broadcast(block[: ROWS * (comm.rank == 0)], 0),
    "reduce": lambda comm, block: comm.reduce(block, 0),
}


def carried():
    return [int(each.read_text()) for each in CARD]


def body(job):
    from hpc3d.comm.cartesian import build
    from tests.comm.cases import long_blocks
    from tests.comm.on_two_level import message_between, same_bits

    comm = build({"x": job.size}).comm("x")
    long_blocks(comm, "float32")
    same_bits(comm)
    message_between(comm)
    block, found = np.ones(ROWS, np.float32), {}
    for op, call in CALLS.items():
        call(comm, block).wait()
        job.barrier()
        before = carried()
        job.barrier()
        call(comm, block).wait()
        job.barrier()
        found[op] = job.gather([now - then for now, then in zip(carried(), before, strict=True)])
    if job.rank == 0:
        print(json.dumps([type(comm).__name__, block.nbytes, found]))


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
