"""Ranks of emulated hosts with clock offsets and drift, on threads and with MPI."""

import sys
import time

import numpy as np

from hpc3d.trace.clock import IDENTITY, Clocks, as_rows, fit, knot
from tests.fakes.virtual_time import Clock, Network

RANKS_A_HOST = 2
ROUNDS, PAUSE = 3, 200_000_000  # ns


def skew(host):
    """Return (offset in ns, drift) of a host's clock: 5 ms or more, and up to 300 us per s."""
    return -5_000_000 * host, (-1) ** host * 1e-4 * host


class Skewed:
    """Skewed clock of this host; `now` is the true clock."""

    def __init__(self, rank, start, now):
        self.offset, self.drift = skew(rank // RANKS_A_HOST)
        self.start, self.now = start, now

    def __call__(self):
        now = self.now()
        return now + self.offset + int(self.drift * (now - self.start))

    def true(self, shown):
        return self.start + (shown - self.offset - self.start) / (1 + self.drift)


class Busy(Network):
    """Network whose messages take 20 us, and sometimes up to 0.5 ms longer."""

    def latency(self, clock):
        return 20_000 + 500_000 * clock.random.random() ** 20


def errors(comm, start, now, pause):
    """Return the error of this host's clock model during the run, and its bound, in ns.

    `now()` is the true time, and `pause(ns)` lets time pass.
    """
    clock = Skewed(comm.rank, start, now)
    hosts = [f"node{rank // RANKS_A_HOST}" for rank in range(comm.size)]
    clocks, samples = Clocks(comm, hosts, clock), []
    first = clock()
    for number in range(ROUNDS):
        if number:
            pause(PAUSE)
        samples += clocks.synchronize()
    shown = np.linspace(first, clock(), 50).astype(np.int64)
    found, bound = model(comm, samples)
    # Rank 0's own clock is the true one: its host has no skew.
    return np.abs(found.to_global(shown) - clock.true(shown)).max(), bound


def model(comm, samples):
    """Return the model of this host's clock, built from all samples as in `merge`, and its error
    bound.

    At each knot, model and truth are within half the width of the knot, so they differ by at
    most the widths at the knots, and by at most 3 times as much between them.
    """
    rows = as_rows(samples).view(np.uint8).reshape(-1, as_rows([]).itemsize)
    counts = comm.all_gather(np.array([len(rows)])).wait()
    known = {}
    for rank, count in enumerate(counts):
        mine = rows if rank == comm.rank else rows[:0]
        found = comm.broadcast(mine, rank).wait().reshape(-1).view(as_rows([]).dtype)
        assert len(found) == count
        above, bound = known[found["peer"][0]] if count else (IDENTITY, 0)
        known[rank] = fit(found, above), bound + 3 * widest(found)
    return known[comm.rank // RANKS_A_HOST * RANKS_A_HOST]


def widest(samples):
    """Return the width of the widest knot of these samples, in ns."""
    rounds = [samples[samples["round"] == number] for number in np.unique(samples["round"])]
    return max((knot(each)[2] for each in rounds), default=0) + 1000


def in_virtual_time(mesh, network):
    """Return `errors` of a rank on a thread."""
    clock = Clock(mesh.rank)
    comm = network.wrap(mesh.world, "world", clock)
    return errors(comm, clock.now, clock, clock.advance)


def body(job):
    from hpc3d.comm.cartesian import build

    mesh = build({"x": job.size}, transport=sys.argv[1])
    start = job.comm.bcast(time.monotonic_ns())
    found = job.gather(
        errors(mesh.world, start, time.monotonic_ns, lambda ns: time.sleep(ns / 1e9))
    )
    if job.rank == 0:
        for error, bound in found:
            print(error, bound)


if __name__ == "__main__":
    from hpc3d.runtime import launch

    sys.exit(launch.run("test", body))
