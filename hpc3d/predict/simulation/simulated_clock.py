"""The time of a rank on a machine: what its arrays compute and its calls move let it pass.

The model, the optimiser and the engine run as they are; the recorder reads this clock.  All ranks
along a tensor, data or context axis do the same at the same time, so one of them stands for all:
what it sends to the next rank of a ring it gets from the one before as soon.  The stages of a
pipeline tell each other when messages leave.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.abstract import CostMeter
from hpc3d.comm.abstract_communicator import AbstractCommunicator
from hpc3d.comm.communicator import Pending, received_bytes
from hpc3d.comm.mesh import CONTEXT, WORLD, Mesh, groups_of, queue_of
from hpc3d.ops.float8 import E4M3
from hpc3d.predict.machine.between_hosts import legs

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.grid import Grid
    from hpc3d.model.context import Context
    from hpc3d.predict.machine.machine import Machine

_CARD, _HOST = "card", "host"  # whose ends are among those of the queues
_LONG = 1e6  # bytes of a message by which pairs of ranks are compared


class Clock(CostMeter):
    """Whole nanoseconds from the start of a run, as a trace has them.

    `busy` is the part of them in which the rank computes, and `ends` is when the last collective
    of each queue ends: they follow each other, beside what it computes and beside those of the
    other queue.  `slowdown` is how much longer all that cores do takes where ranks share them.
    """

    wired = 0
    count = 1  # times that all counts which is done

    def __init__(self, machine: Machine, slowdown: float = 1.0) -> None:
        self.machine, self.slowdown = machine, slowdown
        self.now = self.busy = 0
        self.ends = Counter()

    @property
    def widest(self) -> int:
        return self.machine.max_fused_head_dim

    @property
    def float8(self) -> bool:  # type: ignore[override]
        return E4M3 in self.machine.gemm

    def advance(self, length: int, busy: int, wired: int) -> None:
        """Let so many ns of a pass go by that is not run, of which the rank is busy, and waits for
        the card of its host, so many."""
        self.now += length
        self.busy += busy
        self.wired += wired

    @contextmanager
    def counting(self, times: int) -> Iterator[None]:
        self.count *= times
        try:
            yield
        finally:
            self.count //= times

    def work(self, seconds: float) -> None:
        length = _nanoseconds(self.count * self.slowdown * seconds)
        self.now, self.busy = self.now + length, self.busy + length

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        self.work(self.machine.product(m, n, k, dtype.name, batch))

    def kernel(self, name: str, nbytes: float) -> None:
        self.work(self.machine.kernel(name, nbytes))

    def fused(self, flop: float, nbytes: float, dtype: np.dtype) -> None:
        self.work(self.machine.fused(flop, nbytes, dtype.name))

    def copied(self, nbytes: float) -> int:
        """A device copies beside what it computes, one block after the other."""
        length = _nanoseconds(self.count * nbytes / self.machine.host_bandwidth)
        self.ends[_HOST] = max(self.now, self.ends[_HOST]) + length
        return self.ends[_HOST]

    def reach(self, end: int) -> None:
        self.now = max(self.now, end)

    def call(self, op: str, nbytes: float, members: Sequence[int]) -> int:
        return _nanoseconds(self.machine.call(op, nbytes, members))

    def post(self, op: str, nbytes: float, members: Sequence[int], axis: str) -> int:
        """When a collective along an axis ends that begins now, or when those before it in its
        queue have ended."""
        queue = queue_of(axis)
        self.ends[queue] = max(self.now, self.ends[queue]) + self.call(op, nbytes, members)
        return self.ends[queue]

    def send_done(self, nbytes: float, members: Sequence[int], last: int) -> int:
        """When a message has left that is sent now, or at `last`, when the one before has."""
        return max(self.now, last) + self.call("send", nbytes, members)

    def receive(self, nbytes: float, members: Sequence[int], arrival: int) -> None:
        """Wait for a message and take it."""
        self.now = max(self.now, arrival)

    def pass_on(self, nbytes: float, pair: Sequence[int], axis: str) -> int:
        """When messages arrive that all members of a group along an axis send now, or when the
        calls before them in their queue have ended; the slowest is that of a `pair`."""
        queue = queue_of(axis)
        self.ends[queue] = self.send_done(nbytes, pair, self.ends[queue])
        return self.ends[queue]

    def taken(self, nbytes: float, pair: Sequence[int], end: int, pending: Pending) -> Pending:
        """A `Pending` of such a message, which arrives at `end`."""

        def finish():
            self.receive(nbytes, pair, end)
            return pending.wait()

        return Pending(finish)

    def until(self, end: int, pending: Pending) -> Pending:
        """A `Pending` that is waited for until `end`."""

        def finish():
            self.now = max(self.now, end)
            return pending.wait()

        return Pending(finish)


class HostDrivenClock(Clock):
    """Where no device moves blocks: the rank's core does so when it makes the call.

    What goes to other hosts the card carries then, one call after the other, whatever the rank
    does; `wired` are the ns in which the rank waits for it.  Others may have its core then,
    so that these are not longer where ranks share cores.  What the last one posts is there
    at once, but those that wait for it have to wake up.
    """

    def __init__(self, machine: Machine, slowdown: float = 1.0) -> None:
        super().__init__(machine, slowdown)
        self.wired = self.since = self.done = 0

    def copied(self, nbytes: float) -> int:
        """A core copies itself; what a disk adds is not known."""
        self.kernel("offload", 2 * nbytes)
        return self.now

    def wake_up(self, time: int) -> int:
        """When a rank goes on that waits until `time`."""
        return time + _nanoseconds(self.slowdown * self.machine.wakeup_s)

    def post(self, op: str, nbytes: float, members: Sequence[int], axis: str) -> int:
        work, wired = legs(self.machine, op, nbytes, members)
        queue = queue_of(axis)
        self.work(work)
        self.ends[queue] = self._card_done(max(self.now, self.ends[queue]), wired)
        return self.wake_up(self.ends[queue])

    def _card_done(self, ready: int, seconds: float) -> int:
        """When the card has carried what is `ready` then and takes it so long.

        It is busy without a break from `since` on; the last call waits for it until `done`.
        """
        if seconds:
            begin = max(ready, self.ends[_CARD])
            self.since = begin if begin > self.ends[_CARD] else self.since
            ready = self.ends[_CARD] = begin + _nanoseconds(seconds)
        self.done = min(ready, self.ends[_CARD])
        return ready

    def until(self, end: int, pending: Pending) -> Pending:
        # A call is waited for through what it returns: it is the one that was posted last.
        begin, done, ended = self.since, self.done, super().until(end, pending)

        def finish():
            self.wired += max(0, done - max(self.now, begin))
            return ended.wait()

        return Pending(finish)

    def send_done(self, nbytes: float, members: Sequence[int], last: int) -> int:
        work, wired = legs(self.machine, "send", nbytes, members)
        self.work(work)
        return self._card_done(self.now, wired)

    def receive(self, nbytes: float, members: Sequence[int], arrival: int) -> None:
        work, wired = legs(self.machine, "recv", nbytes, members)
        if arrival > self.now:
            self.wired += min(arrival - self.now, _nanoseconds(wired))
            self.now = self.wake_up(arrival)
        self.work(work)


def clock_of(machine: Machine, slowdown: float = 1.0) -> Clock:
    """The Clock of a machine: HostDrivenClock where its ranks have no devices."""
    return (HostDrivenClock if machine.cores else Clock)(machine, slowdown)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class TimedCommunicator(AbstractCommunicator):
    """A communicator along an axis whose calls take the machine's time; all members call at the
    same time."""

    def __init__(self, rank: int, members: Sequence[int], pool: Pool, axis: str) -> None:
        super().__init__(rank, len(members), members, pool)
        self.clock, self.axis = pool.meter, axis

    def timed(self, op: str, block: Any, pending: Pending) -> Pending:
        nbytes = received_bytes(op, block.nbytes, self.size)
        return self.clock.until(self.clock.post(op, nbytes, self.members, self.axis), pending)

    def _all_gather(self, block):
        return self.timed("all_gather", block, super()._all_gather(block))

    def _reduce_scatter(self, block):
        return self.timed("reduce_scatter", block, super()._reduce_scatter(block))

    def _all_reduce(self, block, op):
        return self.timed("all_reduce", block, super()._all_reduce(block, op))

    def _broadcast(self, block, root):
        return self.timed("broadcast", block, super()._broadcast(block, root))

    def _reduce(self, block, root):
        return self.timed("reduce", block, super()._reduce(block, root))

    def _all_to_all(self, block):
        return self.timed("all_to_all", block, super()._all_to_all(block))


class ContextTimed(TimedCommunicator):
    """The communicator of the first rank along the context axis, whose messages are those of
    `context`.

    All members send as far at the same time, so that a message arrives when this rank's own does:
    when the slowest has.  Those posted together follow each other.
    """

    def __init__(self, members: Sequence[int], pool: Pool, context: Context) -> None:
        super().__init__(0, members, pool, CONTEXT)
        self.context, self.pairs, self.arrivals = context, {}, deque()

    def _send(self, block, peer):
        end = self.clock.pass_on(block.nbytes, self.slowest(peer), self.axis)
        self.arrivals.append(end)
        return self.clock.until(end, super()._send(block, peer))

    def _recv(self, shape, dtype, peer):
        pending, end = super()._recv(shape, dtype, peer), self.arrivals.popleft()
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        return self.clock.taken(nbytes, self.slowest(peer), end, pending)

    def slowest(self, peer: int) -> tuple[int, int]:
        """The pair of ranks with the slowest of the messages that all members send as this one
        does to `peer`."""
        if peer not in self.pairs:
            others = (self.context.peer(number, peer) for number in range(self.size))
            pairs = [(rank, self.members[other]) for rank, other in zip(self.members, others)]
            self.pairs[peer] = max(pairs, key=lambda pair: self.clock.call("send", _LONG, pair))
        return self.pairs[peer]


class PipelineTimed(TimedCommunicator):
    """A communicator with members on several stages, of which `stages` (member -> stage) are run.

    `peers` is the communicator of the stages, on threads: it carries times.  A message leaves when
    it is posted and those before it in flight have left, and a collective begins when the last
    stage has posted it.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        pool: Pool,
        peers: Any,
        stages: range | dict[int, int],
    ) -> None:
        axis = WORLD if isinstance(stages, dict) else "p"
        super().__init__(rank, members, pool, axis)
        self.peers, self.stages, self.sends_done = peers, stages, {}

    def timed(self, op: str, block: Any, pending: Pending) -> Pending:
        ends, now, queue = self.clock.ends, np.array([self.clock.now]), queue_of(self.axis)
        latest = int(self.peers.all_reduce(now, "max").wait()[0])
        ends[queue] = max(ends[queue], latest)
        return super().timed(op, block, pending)

    def _send(self, block, peer):
        end = self.clock.send_done(block.nbytes, self.pair(peer), self.sends_done.get(peer, 0))
        self.sends_done[peer] = end
        self.peers.send(np.array([end]), self.stages[peer])
        return self.clock.until(end, super()._send(block, peer))

    def _recv(self, shape, dtype, peer):
        arrival = self.peers.recv((1,), np.int64, self.stages[peer])
        pending = super()._recv(shape, dtype, peer)

        def finish():
            block = pending.wait()
            self.clock.receive(block.nbytes, self.pair(peer), int(arrival.wait()[0]))
            return block

        return Pending(finish)

    def pair(self, peer: int) -> tuple[int, int]:
        return self.members[self.rank], self.members[peer]


def representative(grid: Grid, pool: Pool, peers: Any, context: Context | None = None) -> Mesh:
    """The mesh of the first rank of a stage, whose number and neighbours `peers` knows; the meter
    of its `pool` is a Clock.  Sequences are cut by `context`, if they are."""
    column = grid.ranks_along("p", {})
    coords = grid.coords(column[peers.rank])
    comms = {
        axis: TimedCommunicator(0, members, pool, axis)
        for axis, members in groups_of(grid, coords).items()
    }
    if context and CONTEXT in comms:
        comms[CONTEXT] = ContextTimed(comms[CONTEXT].members, pool, context)
    if peers.size > 1:
        comms["p"] = PipelineTimed(peers.rank, column, pool, peers, range(len(column)))
    stages = {rank: stage for stage, rank in enumerate(column)}
    world = PipelineTimed(column[peers.rank], range(grid.size), pool, peers, stages)
    return Mesh(grid.sizes, coords, comms, world)
