"""One time for all hosts: how far each host's clock is from that of rank 0, and how it drifts.

Ranks of a host share its monotonic clock, so one rank a host, its leader, exchanges messages.
Host i > 0 asks the host whose number is i without its highest bit: a tree of log2(hosts) rounds,
as in HCA3 (Hunold and Carpen-Amarie, CLUSTER'18).  An exchange stamps t1 when it asks and t3 when
the answer t2 is there; then the other clock is ahead by

    offset = t2 - (t1 + t3) / 2,    within half of the round trip t3 - t1

(Cristian 1989).  Each exchange bounds the offset; what bounds of all exchanges of a
synchronisation have in common (SKaMPI's envelope, Worsch, Reussner and Augustin 2002) is never
wider than the shortest round trip, and its middle is a knot of a piecewise-linear model of the one
clock against the other.  Models compose from rank 0 down the tree, so that a drift between two
exchanges does not add up.  All exchanges are kept.
"""

from typing import NamedTuple

import numpy as np

from hpc3d.trace.events import CLOCK_MODEL, CLOCK_SAMPLES, record_type

# Exchanges of a synchronisation: until one was short, in ns.  A busy machine answers at once only
# now and then.
LEAST, MOST, SHORT = 16, 2000, 20_000

STOP = -1


class Clocks:
    """The clocks of the hosts of a job; `hosts` names that of every rank of `comm`."""

    def __init__(self, comm, hosts, clock):
        self.comm, self.clock, self.rounds = comm, clock, 0
        self.leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self.place = self.leaders.index(comm.rank) if comm.rank in self.leaders else None

    def synchronise(self):
        """Exchange with the parent, then with the children; collective over the leaders.

        Returns the samples of this rank, rows of CLOCK_SAMPLES.
        """
        self.rounds += 1
        if self.place is None:
            return []
        samples = self.ask(self.leaders[parent(self.place)]) if self.place else []
        for child in children(self.place, len(self.leaders)):
            self.answer(self.leaders[child])
        return samples

    def ask(self, peer):
        samples, shortest = [], SHORT + 1
        while len(samples) < LEAST or (shortest > SHORT and len(samples) < MOST):
            samples.append(self.exchange(peer))
            shortest = min(shortest, samples[-1][3])
        self.comm.send(np.array([STOP]), peer).wait()
        return samples

    def exchange(self, peer):
        before = self.clock()
        sent = self.comm.send(np.array([before]), peer)
        there = self.receive(peer)
        after = self.clock()
        sent.wait()
        middle = (before + after) // 2
        return self.comm.rank, middle, there - middle, after - before, self.rounds, peer

    def answer(self, peer):
        while self.receive(peer) != STOP:
            self.comm.send(np.array([self.clock()]), peer).wait()

    def receive(self, peer):
        return int(self.comm.recv((1,), np.dtype(np.int64), peer).wait()[0])


def parent(place):
    """The number of a host without its highest bit."""
    return place - (1 << place.bit_length() - 1)


def children(place, hosts):
    """The hosts that ask this one, in the order of the rounds."""
    bit = 1 << place.bit_length()
    while place + bit < hosts:
        yield place + bit
        bit <<= 1


class Model(NamedTuple):
    """rank 0's time = t + offset + drift (t - t0) for the last t0 <= t, the first one before it;
    `residual` is how far 99 of 100 samples lie from it at most, in ns, less their half trip."""

    t0: np.ndarray
    offset: np.ndarray
    drift: np.ndarray
    residual: float

    def to_global(self, t):
        """Local times, int64 [n], on rank 0's clock."""
        piece = np.maximum(np.searchsorted(self.t0, t, "right") - 1, 0)
        ahead = self.offset[piece] + self.drift[piece] * (t - self.t0[piece])
        return t + np.rint(ahead).astype(np.int64)

    def rows(self, rank):
        """The model as rows of CLOCK_MODEL."""
        rows = np.zeros(len(self.t0), record_type(CLOCK_MODEL))
        rows["rank"], rows["resid_p99_ns"] = rank, self.residual
        rows["t0"], rows["offset_ns"], rows["drift"] = self.t0, self.offset, self.drift
        return rows


IDENTITY = Model(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), 0.0)


def as_rows(samples):
    return np.asarray(samples, record_type(CLOCK_SAMPLES))


def knot(samples):
    """(time, offset, width of the bounds) of the exchanges of one synchronisation.

    Where their bounds have nothing in common, because a clock was set, those of the shortest.
    """
    half = samples["rtt_ns"] / 2
    low, high = (samples["offset_ns"] - half).max(), (samples["offset_ns"] + half).min()
    if low > high:
        best = samples[samples["rtt_ns"].argmin()]
        return best["t_local"], best["offset_ns"], best["rtt_ns"]
    return samples["t_local"].mean(), (low + high) / 2, high - low


def fit(samples, above=IDENTITY):
    """The model through the knots of all synchronisations; IDENTITY without any.

    `above` is the model of the peer that was asked.
    """
    samples = as_rows(samples)
    if not len(samples):
        return IDENTITY
    rounds = [samples[samples["round"] == number] for number in np.unique(samples["round"])]
    times, offset, _ = np.transpose([knot(each) for each in rounds])
    t0 = np.rint(times).astype(np.int64)
    offset = through(above, t0, offset)
    drift = np.diff(offset) / np.maximum(1, np.diff(t0)) if len(t0) > 1 else np.zeros(1)
    pieces = slice(len(drift))
    model = Model(t0[pieces], offset[pieces], drift, 0.0)
    here = samples["t_local"]
    away = model.to_global(here) - here - through(above, here, samples["offset_ns"])
    beyond = np.maximum(0, np.abs(away) - samples["rtt_ns"] / 2)
    return model._replace(residual=float(np.percentile(beyond, 99)))


def through(above, here, offset):
    """The offset to rank 0 at local times `here`, from that to a peer with the model `above`."""
    there = here + np.rint(offset).astype(np.int64)
    return offset + (above.to_global(there) - there)
