"""Ranks of emulated hosts whose clocks are off and drift, on threads and on MPI."""

import sys
import time

import numpy as np

from hpc3d.trace.clock import IDENTITY, Clocks, as_rows, fit

RANKS_A_HOST = 2
ROUNDS, PAUSE = 3, 0.2


def skew(host):
    """(offset in ns, drift) of a host's clock: 5 ms and more, and up to 300 us a second."""
    return -5_000_000 * host, (-1) ** host * 1e-4 * host


class Skewed:
    """The true clock, and what this host's clock shows."""

    def __init__(self, rank, start):
        self.offset, self.drift = skew(rank // RANKS_A_HOST)
        self.start = start

    def __call__(self):
        now = time.monotonic_ns()
        return now + self.offset + int(self.drift * (now - self.start))

    def true(self, shown):
        return self.start + (shown - self.offset - self.start) / (1 + self.drift)


def errors(comm, start):
    """How far the model of this rank's host is from the truth, in ns, at times within the run."""
    clock = Skewed(comm.rank, start)
    hosts = [f"node{rank // RANKS_A_HOST}" for rank in range(comm.size)]
    clocks, samples = Clocks(comm, hosts, clock), []
    first = clock()
    for number in range(ROUNDS):
        if number:
            time.sleep(PAUSE)
        samples += clocks.synchronise()
    shown = np.linspace(first, clock(), 50).astype(np.int64)
    # Rank 0's own clock is the true one: its host has no skew.
    return np.abs(model(comm, samples).to_global(shown) - clock.true(shown)).tolist()


def model(comm, samples):
    """The model of this rank's host, from the samples of all, as `merge` makes it."""
    rows = as_rows(samples).view(np.uint8).reshape(-1, as_rows([]).itemsize)
    counts = comm.all_gather(np.array([len(rows)])).wait()
    known = {}
    for rank, count in enumerate(counts):
        mine = rows if rank == comm.rank else rows[:0]
        found = comm.broadcast(mine, rank).wait().reshape(-1).view(as_rows([]).dtype)
        assert len(found) == count
        above = known.get(found["peer"][0], IDENTITY) if count else IDENTITY
        known[rank] = fit(found, above)
    return known[comm.rank // RANKS_A_HOST * RANKS_A_HOST]


def body(job):
    from hpc3d.comm.cartesian import build

    mesh = build({"x": job.size}, transport=sys.argv[1])
    start = job.comm.bcast(time.monotonic_ns())
    worst = max(errors(mesh.world, start), default=0)
    found = job.gather(worst)
    if job.rank == 0:
        print(max(found))


if __name__ == "__main__":
    from hpc3d.runtime import launch

    sys.exit(launch.run("test", body))
