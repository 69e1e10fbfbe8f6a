"""A short step of two ranks, with times in ms:

rank 0   gemm 0-4   all-gather 4-6   receive 6-9
rank 1   gemm 0-5   all-gather 5-6   update 6-8   send 8-9

Rank 0 waits in the all-gather from 4 to 5, and for the message from 6 to 8.
"""

import h5py
import numpy as np

from hpc3d import trace
from hpc3d.trace.file import write_table
from hpc3d.trace.schema import CLOCK_MODEL, RANK_PTR
from tests.analyze.synthetic import by_hand, call, row

GROUPS = [("x", (0, 1))]
ROWS = [
    row(0, 0, 4, flops=4e9, layer=0),
    call(0, "all_gather", 4, 6, seq=0, bytes=1000, count=250, posted=4),
    call(0, "recv", 6, 9, seq=0, peer=1, bytes=400, count=0, posted=6),
    row(1, 0, 5, flops=5e9, layer=0),
    call(1, "all_gather", 5, 6, seq=0, bytes=1000, count=250, posted=5),
    row(1, 6, 8, "optimizer", phase="optimizer", op="elementwise"),
    call(1, "send", 8, 9, seq=0, peer=0, bytes=400, count=100, posted=8),
]
STEPS = {(0, 0): (0, 10), (1, 0): (0, 10)}


MEMORY = [{"rank": rank, "kind": 0, "bytes": 10, "peak": 20} for rank in (0, 1)]


def small(path, rows=ROWS, memory=MEMORY, **values):
    """Return the open trace of the step."""
    results = {"loss": [2.5, 2.5], "grad_norm": [1.0, 1.0]}
    by_hand(path, rows, STEPS, GROUPS, results=results, memory=memory, **values).close()
    count = np.bincount([each["rank"] for each in rows], minlength=2)
    with h5py.File(path, "r+") as file:
        write_table(file, "clock/model", CLOCK_MODEL)
        write_table(file, "index", [RANK_PTR], {"rank_ptr": np.cumsum([0, *count])})
        file["ranks/n_events"][:] = count
    return trace.open(path)
