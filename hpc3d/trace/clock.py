"""Common time of all hosts: offset and drift of each host's clock against the clock of rank 0.

Ranks of a node share its monotonic clock, so one rank per node, the leader, exchanges messages.
Node i > 0 asks the node whose number is i without its highest bit.  This is a tree of log2(nodes)
rounds, as in HCA3 (Hunold and Carpen-Amarie, CLUSTER'18).  All pairs of a round run concurrently.
An exchange records t1 when it asks and t3 when the answer t2 arrives.  The other clock is then
ahead by

    offset = t2 - (t1 + t3) / 2,    within half of the round trip t3 - t1

(Cristian 1989).  Each exchange bounds the offset.  The intersection of the bounds of all exchanges
of a synchronization (SKaMPI's envelope, Worsch, Reussner and Augustin 2002) is never wider than
the shortest round trip.  Its middle is a knot of a piecewise-linear model of one clock against the
other.  Models compose from rank 0 down the tree, so drift between two exchanges does not
accumulate.  All exchanges are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.trace.schema import CLOCK_MODEL, CLOCK_SAMPLES, record_type

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hpc3d.comm.communicator import Communicator

# A synchronization ends after this many exchanges without a shorter round trip, or after this many
# ns, because prompt answers are rare on a busy machine.
IN_VAIN, LONGEST = 50, 200_000_000

_STOP = -1
Sample = tuple[int, int, int, int, int, int]  # a row of CLOCK_SAMPLES


class Clocks:
    """Clocks of the nodes of a job; `nodes` has the node of every rank of `comm`."""

    def __init__(
        self, comm: Communicator, nodes: Sequence[Hashable], clock: Callable[[], int]
    ) -> None:
        self.comm, self.clock, self.rounds = comm, clock, 0
        self.leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
        self.index = self.leaders.index(comm.rank) if comm.rank in self.leaders else None

    def synchronize(self) -> list[Sample]:
        """Exchange with the parent, then with the children; collective over the leaders.

        Returns the samples of this rank, rows of CLOCK_SAMPLES.
        """
        self.rounds += 1
        if self.index is None:
            return []
        samples = self.ask(self.leaders[parent(self.index)]) if self.index else []
        for child in children(self.index, len(self.leaders)):
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


def parent(index: int) -> int:
    """Return the number of a node without its highest bit."""
    return index - (1 << index.bit_length() - 1)


def children(index: int, nodes: int) -> Iterator[int]:
    """Yield the nodes that ask this one, in the order of the rounds."""
    bit = 1 << index.bit_length()
    while index + bit < nodes:
        yield index + bit
        bit <<= 1


class Model(NamedTuple):
    """Piecewise-linear model: rank 0's time = t + offset + drift (t - t0).

    The segment with the last t0 <= t applies; before all segments, the first one does.
    `residual` is the 99th percentile of the samples' distance from the model in ns, less half of
    their round trip.
    """

    t0: np.ndarray
    offset: np.ndarray
    drift: np.ndarray
    residual: float

    def to_global(self, t: np.ndarray) -> np.ndarray:
        """Convert local times, int64 [n], to rank 0's clock."""
        piece = np.maximum(np.searchsorted(self.t0, t, "right") - 1, 0)
        ahead = self.offset[piece] + self.drift[piece] * (t - self.t0[piece])
        return t + np.rint(ahead).astype(np.int64)

    def rows(self, rank: int) -> np.ndarray:
        """Return the model as rows of CLOCK_MODEL."""
        rows = np.zeros(len(self.t0), record_type(CLOCK_MODEL))
        rows["rank"], rows["resid_p99_ns"] = rank, self.residual
        rows["t0"], rows["offset_ns"], rows["drift"] = self.t0, self.offset, self.drift
        return rows


IDENTITY = Model(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), 0.0)


def as_rows(samples: ArrayLike) -> np.ndarray:
    return np.asarray(samples, record_type(CLOCK_SAMPLES))


def knot(samples: np.ndarray) -> tuple[float, float, float]:
    """Return (time, offset, width of the bounds) of the exchanges of one synchronization.

    If their bounds do not intersect, because a clock was set, the shortest exchange is used.
    """
    half = samples["rtt_ns"] / 2
    low, high = (samples["offset_ns"] - half).max(), (samples["offset_ns"] + half).min()
    if low > high:
        best = samples[samples["rtt_ns"].argmin()]
        return best["t_local"], best["offset_ns"], best["rtt_ns"]
    return samples["t_local"].mean(), (low + high) / 2, high - low


def fit(samples: ArrayLike, above: Model = IDENTITY) -> Model:
    """Return the model through the knots of all synchronizations; IDENTITY without samples.

    `above` is the model of the peer's clock.
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
    """Return the model through the informative knots.

    It starts with the narrowest knot. While the model misses the bounds of a knot, the narrowest
    such knot is added. Knots of rounds on a busy machine are wide and would only add error.
    """
    kept = [int(width.argmin())]
    while True:
        model = _straight(t0[sorted(kept)], offset[sorted(kept)])
        away = np.abs(model.to_global(t0) - t0 - offset) - width / 2
        missed = np.setdiff1d(np.flatnonzero(away > 1), kept)  # 1 ns of rounding
        if not len(missed):
            return model
        kept.append(int(missed[width[missed].argmin()]))


def _straight(t0: np.ndarray, offset: np.ndarray) -> Model:
    """Return the model that is linear between the knots."""
    drift = np.diff(offset) / np.maximum(1, np.diff(t0)) if len(t0) > 1 else np.zeros(1)
    pieces = slice(len(drift))
    return Model(t0[pieces], offset[pieces], drift, 0.0)


def _through(above: Model, here: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the offset to rank 0's clock at local times `here`.

    It is the `offset` to a peer's clock plus the offset of that clock to rank 0's, from the model
    `above`.
    """
    there = here + np.rint(offset).astype(np.int64)
    return offset + (above.to_global(there) - there)
