"""Clock synchronization: offset and drift of each host's clock relative to rank 0's clock.

Ranks of a node share its monotonic clock, so only one rank per node, the leader, exchanges
messages.  Node i > 0 queries its parent, the node whose number is i with the highest bit cleared.
The nodes form a tree and are synchronized in log2(nodes) rounds, as in HCA3 (Hunold and
Carpen-Amarie, CLUSTER'18).  All pairs of a round run concurrently.  In each exchange, a node sends
a request at its local time t1, the parent replies with its own time t2, and the reply arrives at
local time t3.  The parent's clock is then ahead by

    offset = t2 - (t1 + t3) / 2,    with an error of at most (t3 - t1) / 2

(Cristian 1989).  Each exchange thus yields an interval that contains the offset.  The intersection
of all intervals of a synchronization (SKaMPI's envelope, Worsch, Reussner and Augustin 2002) is
never wider than the shortest round trip.  Its midpoint is a knot of a piecewise-linear model of
the offset between the two clocks.  Models are composed from rank 0 down the tree, so drift between
two exchanges does not accumulate.  All exchanges are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.trace.schema import CLOCK_MODEL, CLOCK_SAMPLES, record_type

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hpc3d.comm.communicator import Communicator

# A synchronization ends after IN_VAIN consecutive exchanges that did not improve the shortest
# round trip, or after LONGEST ns. The time limit matters on busy machines, where short round trips
# are rare.
IN_VAIN, LONGEST = 50, 200_000_000

_STOP = -1
Sample = tuple[int, int, int, int, int, int]  # a row of CLOCK_SAMPLES


class Clocks:
    """Clock synchronization between the nodes of a job; `nodes[r]` is the node of rank r."""

    def __init__(
        self, comm: Communicator, nodes: Sequence[Hashable], clock: Callable[[], int]
    ) -> None:
        self.comm, self.clock, self.rounds = comm, clock, 0
        self.leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
        self.index = self.leaders.index(comm.rank) if comm.rank in self.leaders else None

    def synchronize(self) -> list[Sample]:
        """Exchange clock readings with the parent node, then with the child nodes.

        The leaders of all nodes must call this method. Returns the samples of this rank, as rows
        of CLOCK_SAMPLES.
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
    """Return the parent of a node in the tree: its own number with the highest bit cleared."""
    return index - (1 << index.bit_length() - 1)


def children(index: int, nodes: int) -> Iterator[int]:
    """Yield the children of a node in the tree, in the order in which they query the node."""
    bit = 1 << index.bit_length()
    while index + bit < nodes:
        yield index + bit
        bit <<= 1


class Model(NamedTuple):
    """Piecewise-linear clock model: rank 0's time = t + offset + drift (t - t0).

    The segment with the largest t0 <= t applies; earlier times use the first segment.
    `residual` is the 99th percentile of max(0, |d| - rtt / 2) over all samples, in ns, where d is
    the difference between the measured offset and the model's offset, and rtt is the round-trip
    time.
    """

    t0: np.ndarray
    offset: np.ndarray
    drift: np.ndarray
    residual: float

    def to_global(self, t: np.ndarray) -> np.ndarray:
        """Convert local times in ns, int64 [n], to times on rank 0's clock."""
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
    """Return the local time, the clock offset and its uncertainty for one synchronization, in ns.

    The uncertainty is the width of the intersection of all offset intervals.  If they do not
    intersect, because a clock was adjusted, the exchange with the shortest round trip is used.
    """
    half = samples["rtt_ns"] / 2
    low, high = (samples["offset_ns"] - half).max(), (samples["offset_ns"] + half).min()
    if low > high:
        best = samples[samples["rtt_ns"].argmin()]
        return best["t_local"], best["offset_ns"], best["rtt_ns"]
    return samples["t_local"].mean(), (low + high) / 2, high - low


def fit(samples: ArrayLike, above: Model = IDENTITY) -> Model:
    """Fit a clock model to the samples of all synchronizations with the parent node.

    `above` is the parent node's own clock model.  Returns IDENTITY if there are no samples.
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
    """Return the clock model that interpolates a greedily selected subset of the knots.

    A knot is the offset that one synchronization measured at a time t0, known to within an
    interval of a given width. The selection starts with the knot that has the narrowest interval.
    While the model lies outside the intervals of some knots, the one of these knots with the
    narrowest interval is added. The remaining knots have wide intervals, because they were
    measured on a busy machine; interpolating them as well would only add noise.
    """
    kept = [int(width.argmin())]
    while True:
        times, ahead = t0[sorted(kept)], offset[sorted(kept)]
        drift = np.diff(ahead) / np.maximum(1, np.diff(times)) if len(kept) > 1 else np.zeros(1)
        model = Model(times[: len(drift)], ahead[: len(drift)], drift, 0.0)
        away = np.abs(model.to_global(t0) - t0 - offset) - width / 2
        missed = np.setdiff1d(np.flatnonzero(away > 1), kept)  # rounding tolerance: 1 ns
        if not len(missed):
            return model
        kept.append(int(missed[width[missed].argmin()]))


def _through(above: Model, here: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the offset to rank 0's clock at the local times `here`.

    This is the sum of the measured `offset` to the parent's clock and the parent's offset to rank
    0's clock, which is computed with the parent's clock model `above`.
    """
    there = here + np.rint(offset).astype(np.int64)
    return offset + (above.to_global(there) - there)
