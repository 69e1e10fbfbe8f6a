"""One time for all hosts: how far each host's clock is from that of rank 0, and how it drifts.

Ranks of a node share its monotonic clock, so one rank a node, its leader, exchanges messages.
Node i > 0 asks the node whose number is i without its highest bit: a tree of log2(nodes) rounds,
as in HCA3 (Hunold and Carpen-Amarie, CLUSTER'18), in each of which all pairs exchange at once.
An exchange stamps t1 when it asks and t3 when the answer t2 is there; then the other clock is
ahead by

    offset = t2 - (t1 + t3) / 2,    within half of the round trip t3 - t1

(Cristian 1989).  Each exchange bounds the offset; what bounds of all exchanges of a
synchronisation have in common (SKaMPI's envelope, Worsch, Reussner and Augustin 2002) is never
wider than the shortest round trip, and its middle is a knot of a piecewise-linear model of the one
clock against the other.  Models compose from rank 0 down the tree, so that a drift between two
exchanges does not add up.  All exchanges are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.trace.schema import CLOCK_MODEL, CLOCK_SAMPLES, record_type

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hpc3d.comm.communicator import Communicator

# A synchronisation ends when none of so many exchanges was shorter than the shortest before, or
# after so many ns: a busy machine answers at once only now and then.
IN_VAIN, LONGEST = 50, 200_000_000

_STOP = -1
Sample = tuple[int, int, int, int, int, int]  # a row of CLOCK_SAMPLES


class Clocks:
    """The clocks of the nodes of a job; `nodes` has something of its own for that of every rank of
    `comm`."""

    def __init__(
        self, comm: Communicator, nodes: Sequence[Hashable], clock: Callable[[], int]
    ) -> None:
        self.comm, self.clock, self.rounds = comm, clock, 0
        self.leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
        self.place = self.leaders.index(comm.rank) if comm.rank in self.leaders else None

    def synchronise(self) -> list[Sample]:
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

    def ask(self, peer: int) -> list[Sample]:
        samples, vain, end = [self.exchange(peer)], 0, self.clock() + LONGEST
        shortest = samples[0][3]
        while vain < IN_VAIN and self.clock() < end:
            samples.append(self.exchange(peer))
            vain = vain + 1 if samples[-1][3] >= shortest else 0
            shortest = min(shortest, samples[-1][3])
        self.comm.send(np.array([_STOP]), peer).wait()
        return samples

    def exchange(self, peer: int) -> Sample:
        before = self.clock()
        sent = self.comm.send(np.array([before]), peer)
        there = self.receive(peer)
        after = self.clock()
        sent.wait()
        middle = (before + after) // 2
        return self.comm.rank, middle, there - middle, after - before, self.rounds, peer

    def answer(self, peer: int) -> None:
        while self.receive(peer) != _STOP:
            self.comm.send(np.array([self.clock()]), peer).wait()

    def receive(self, peer: int) -> int:
        return int(self.comm.recv((1,), np.dtype(np.int64), peer).wait()[0])


def parent(place: int) -> int:
    """The number of a node without its highest bit."""
    return place - (1 << place.bit_length() - 1)


def children(place: int, nodes: int) -> Iterator[int]:
    """The nodes that ask this one, in the order of the rounds."""
    bit = 1 << place.bit_length()
    while place + bit < nodes:
        yield place + bit
        bit <<= 1


class Model(NamedTuple):
    """rank 0's time = t + offset + drift (t - t0) for the last t0 <= t, the first one before it;
    `residual` is how far 99 of 100 samples lie from it at most, in ns, less their half trip."""

    t0: np.ndarray
    offset: np.ndarray
    drift: np.ndarray
    residual: float

    def to_global(self, t: np.ndarray) -> np.ndarray:
        """Local times, int64 [n], on rank 0's clock."""
        piece = np.maximum(np.searchsorted(self.t0, t, "right") - 1, 0)
        ahead = self.offset[piece] + self.drift[piece] * (t - self.t0[piece])
        return t + np.rint(ahead).astype(np.int64)

    def rows(self, rank: int) -> np.ndarray:
        """The model as rows of CLOCK_MODEL."""
        rows = np.zeros(len(self.t0), record_type(CLOCK_MODEL))
        rows["rank"], rows["resid_p99_ns"] = rank, self.residual
        rows["t0"], rows["offset_ns"], rows["drift"] = self.t0, self.offset, self.drift
        return rows


IDENTITY = Model(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), 0.0)


def as_rows(samples: ArrayLike) -> np.ndarray:
    return np.asarray(samples, record_type(CLOCK_SAMPLES))


def knot(samples: np.ndarray) -> tuple[float, float, float]:
    """(time, offset, width of the bounds) of the exchanges of one synchronisation.

    Where their bounds have nothing in common, because a clock was set, those of the shortest.
    """
    half = samples["rtt_ns"] / 2
    low, high = (samples["offset_ns"] - half).max(), (samples["offset_ns"] + half).min()
    if low > high:
        best = samples[samples["rtt_ns"].argmin()]
        return best["t_local"], best["offset_ns"], best["rtt_ns"]
    return samples["t_local"].mean(), (low + high) / 2, high - low


def fit(samples: ArrayLike, above: Model = IDENTITY) -> Model:
    """The model through the knots of all synchronisations; IDENTITY without any.

    `above` is the model of the peer that was asked.
    """
    samples = as_rows(samples)
    if not len(samples):
        return IDENTITY
    rounds = [samples[samples["round"] == number] for number in np.unique(samples["round"])]
    times, offset, width = np.transpose([knot(each) for each in rounds])
    t0 = np.rint(times).astype(np.int64)
    model = _telling(t0, _through(above, t0, offset), width)
    here = samples["t_local"]
    away = model.to_global(here) - here - _through(above, here, samples["offset_ns"])
    beyond = np.maximum(0, np.abs(away) - samples["rtt_ns"] / 2)
    return model._replace(residual=float(np.percentile(beyond, 99)))


def _telling(t0: np.ndarray, offset: np.ndarray, width: np.ndarray) -> Model:
    """The model through the knots that tell something: the narrowest one, and of those whose
    bounds it misses always the narrowest, until it misses none.  The knots of a round in which
    the machine was busy are wide, and would only make it worse."""
    kept = [int(width.argmin())]
    while True:
        model = _straight(t0[sorted(kept)], offset[sorted(kept)])
        away = np.abs(model.to_global(t0) - t0 - offset) - width / 2
        missed = np.setdiff1d(np.flatnonzero(away > 1), kept)  # 1 ns: of rounding
        if not len(missed):
            return model
        kept.append(int(missed[width[missed].argmin()]))


def _straight(t0: np.ndarray, offset: np.ndarray) -> Model:
    """The model that is straight from knot to knot."""
    drift = np.diff(offset) / np.maximum(1, np.diff(t0)) if len(t0) > 1 else np.zeros(1)
    pieces = slice(len(drift))
    return Model(t0[pieces], offset[pieces], drift, 0.0)


def _through(above: Model, here: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """The offset to rank 0 at local times `here`, from that to a peer with the model `above`."""
    there = here + np.rint(offset).astype(np.int64)
    return offset + (above.to_global(there) - there)
