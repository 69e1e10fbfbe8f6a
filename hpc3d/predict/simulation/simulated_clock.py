"""Simulated clock of a rank, advanced by the rank's array operations and communication calls.

The model, the optimizer and the engine run unchanged; the recorder reads the simulated clock. All
ranks along a tensor, data or context axis do the same work at the same time, so one rank
represents them, or one rank per class if blocks have owner ranks (owner_classes.py). In a ring, a
rank receives the message of its predecessor at the same time as its successor receives the rank's
own message. Pipeline stages send each other the completion times of their messages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.abstract import CostMeter
from hpc3d.comm.abstract_communicator import AbstractCommunicator
from hpc3d.comm.communicator import Pending, ready, received_bytes
from hpc3d.comm.mesh import CONTEXT, WORLD, Mesh, groups_of, queue_of
from hpc3d.model.context_attention import HeadExchange, RingAttention
from hpc3d.ops.float8 import E4M3
from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.machine.machine import AttentionPass
from hpc3d.predict.simulation.stage_turns import StageTurns

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.grid import Grid
    from hpc3d.model.context import Context
    from hpc3d.model.stage import PipelineStage
    from hpc3d.predict.machine.between_hosts import Legs
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.owner_classes import OwnerPeers
    from hpc3d.predict.simulation.stage_turns import StagePeers

_CARD, _HOST = "card", "host"  # keys of `ends`: the NIC, and copies to and from the host
_AHEAD = -(1 << 62)  # time in ns of the last launch of a host that is far ahead of the GPU
_LONG = 1e6  # message size, in bytes, used to find the pair of ranks with the slowest transfer


class Clock(CostMeter):
    """Simulated clock in integer nanoseconds from the start of a run, as in a trace.

    `busy` is the total compute time of the rank. `ends` maps each queue of collectives to the end
    time of its last collective. Collectives in a queue run one at a time, but overlap with
    computation and with other queues. All CPU times are multiplied by `slowdown`, which is greater
    than 1 if ranks share cores. Until time `occupied`, collectives use a part of the GPU, and
    kernels take longer by the factor `contention` of the machine. `host` is the time at which the
    host has launched its last kernel or call. A kernel starts when the host has launched it and
    the GPU is free, so the host runs ahead of the GPU until it waits for a result.
    """

    wired = 0
    count = 1  # factor by which all work is multiplied

    def __init__(self, machine: Machine, slowdown: float = 1.0) -> None:
        self.machine, self.slowdown = machine, slowdown
        self.launching = machine  # the machine outside of CUDA graphs
        self.now = self.busy = self.occupied = self.host = 0
        self.ends = Counter()
        self.known = machine.known

    @property
    def widest(self) -> int:
        return self.machine.max_fused_head_dim

    @property
    def float8(self) -> bool:  # type: ignore[override]
        return E4M3 in self.machine.gemm

    def advance(self, length: int, busy: int, wired: int) -> None:
        """Advance the clock by the duration of a replayed pass, `length` ns.

        During the pass, the rank computes for `busy` ns and waits for the NIC for `wired` ns.
        """
        self.now += length
        self.busy += busy
        self.wired += wired

    def contend(self, begin: int, busy: int, occupied: int) -> None:
        """Advance the clock by the time that a pass lost to earlier collectives.

        The pass began at time `begin`, ends now, and computed for `busy` ns, which are assumed to
        be spread evenly over the pass. The collectives run until time `occupied`.
        """
        if self.now > begin:
            lost = self._lost(self.now - begin, busy / (self.now - begin), occupied - begin)
            self.now, self.busy = self.now + lost, self.busy + lost

    def elapse(self, length: int, busy: int) -> int:
        """Advance the clock by local steps of `length` ns, which compute for `busy` ns.

        Returns the slowdown in ns caused by collectives in flight.
        """
        begin = self.now
        self.advance(length, 0, 0)
        self.host += length
        self.contend(begin, busy, self.occupied)
        return self.now - begin - length

    def synchronize(self) -> None:
        """Wait on the host until the GPU has completed all work."""
        self.host = max(self.host, self.now)

    def launched(self, host: int) -> None:
        """Advance the clock to the end of a pass that the host has launched in `host` ns."""
        self.host += host
        self.now = max(self.now, self.host)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for a pass that collectives and launches outside of it do not delay.

        At the end of the pass, the clock advances by the time that the pass loses to them.
        """
        begin, busy, occupied, host = self.now, self.busy, self.occupied, self.host
        self.occupied, self.host = 0, _AHEAD
        yield
        launches = self.host - _AHEAD
        self.contend(begin, self.busy - busy, occupied)
        self.occupied, self.host = max(occupied, self.occupied), host
        self.launched(launches)

    def _run(self, seconds: float) -> None:
        """Run a kernel of `seconds`, or several ones, when the host has launched it."""
        if self.machine.host_s:
            host = _nanoseconds(self.machine.host_s)
            first, others = self.host + host, _nanoseconds((self.count - 1) * seconds)
            self.host += self.count * host
            self.now = max(self.now, first, self.host - others)
        self.work(seconds)

    def _lost(self, length: int, computing: float, occupied: int) -> int:
        """Return the slowdown, in ns, of work that runs concurrently with collectives.

        The work takes `length` ns, of which the fraction `computing` is computation. Collectives
        run during its first `occupied` ns.
        """
        factor = 1 + (self.machine.contention - 1) * computing
        return round(min((factor - 1) * length, (1 - 1 / factor) * max(0, occupied)))

    @contextmanager
    def counting(self, times: int) -> Iterator[None]:
        self.count *= times
        try:
            yield
        finally:
            self.count //= times

    def begin_graph(self) -> None:
        """Launch a CUDA graph. Until its end, the host launches no kernels and posts no calls."""
        self._run(self.machine.launch_s)
        self.machine = self.launching.captured
        self.known = self.machine.known

    def end_graph(self) -> None:
        self.machine, self.known = self.launching, self.launching.known

    def work(self, seconds: float) -> None:
        length = _nanoseconds(self.count * self.slowdown * seconds)
        if self.occupied > self.now:
            length += self._lost(length, 1.0, self.occupied - self.now)
        self.now, self.busy = self.now + length, self.busy + length

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        case = m, n, k, dtype, batch
        if case not in self.known:
            self.known[case] = self.machine.product(m, n, k, dtype.name, batch)
        self._run(self.known[case])

    def kernel(self, name: str, nbytes: float) -> None:
        self._run(self.machine.kernel(name, nbytes))

    def attention(self, flop: float, nbytes: float, case: Any, backward: bool) -> None:
        form = AttentionPass(case.width, case.sequence, case.causal, backward)
        self._run(self.machine.fused_attention(flop, nbytes, case.dtype, form))

    def copied(self, nbytes: float) -> int:
        """Start a copy between device and host; return its end time in ns.

        Copies run one at a time and overlap with computation.
        """
        length = _nanoseconds(self.count * nbytes / self.machine.host_bandwidth)
        self.ends[_HOST] = max(self.now, self.ends[_HOST]) + length
        return self.ends[_HOST]

    def reach(self, end: int) -> None:
        self.now = max(self.now, end)

    def call(self, op: str, nbytes: float, members: Sequence[int]) -> int:
        case = op, nbytes, members
        if case not in self.known:
            self.known[case] = _nanoseconds(self.machine.call(op, nbytes, members))
        return self.known[case]

    def post(self, op: str, nbytes: float, members: Sequence[int], axis: str) -> int:
        """Post a collective along an axis; return its end time in ns.

        The collective begins as soon as the earlier collectives in its queue have ended.
        """
        queue = queue_of(axis)
        self.ends[queue] = max(self._posted(), self.ends[queue]) + self.call(op, nbytes, members)
        self.occupied = max(self.occupied, self.ends[queue])
        return self.ends[queue]

    def send_done(self, nbytes: float, members: Sequence[int], last: int) -> int:
        """Return the time in ns at which the transfer of a message ends.

        The transfer begins now or when the preceding transfer ends (`last`), whichever is later.
        """
        return max(self._posted(), last) + self.call("send", nbytes, members)

    def _posted(self) -> int:
        """Post a call on the host; return the time in ns at which the GPU can start it.

        The GPU computes meanwhile, unless the machine file does not model the host.
        """
        machine = self.machine
        if machine.host_s:
            self.host += _nanoseconds(machine.dispatch_s or machine.host_s)
            return max(self.now, self.host)
        if machine.dispatch_s:
            self.work(machine.dispatch_s)
        return self.now

    def receive(self, nbytes: float, members: Sequence[int], arrival: int) -> None:
        """Advance the clock to time `arrival`, at which a message arrives, and receive it."""
        self.reach(arrival)

    def pass_on(self, nbytes: float, pair: Sequence[int], axis: str) -> int:
        """Send a message from each member of a group to another member; return the arrival time.

        Times are in ns. The transfers begin when the earlier calls in the queue of the axis have
        ended. `pair` is the pair of ranks with the slowest transfer, which determines the arrival
        time.
        """
        queue = queue_of(axis)
        self.ends[queue] = self.send_done(nbytes, pair, self.ends[queue])
        return self.ends[queue]

    def taken(self, nbytes: float, pair: Sequence[int], end: int, pending: Pending) -> Pending:
        """Return a `Pending` whose `wait` receives a message that arrives at time `end`."""

        def finish():
            self.receive(nbytes, pair, end)
            return pending.wait()

        return Pending(finish)

    def until(self, end: int, pending: Pending) -> Pending:
        """Return a `Pending` whose `wait` advances the clock to at least `end`."""

        def finish():
            self.reach(end)
            return pending.wait()

        return Pending(finish)


class HostDrivenClock(Clock):
    """Clock of a machine without GPUs, on which CPU cores copy the data of communication calls.

    The NIC transfers data to other hosts, one call at a time, while the rank continues to compute.
    `wired` is the time in ns that the rank waits for the NIC. Core sharing does not lengthen this
    wait, because other ranks may use the core during it. A collective completes as soon as the
    last member has posted it, but waiting ranks need some time to wake up.
    """

    def __init__(self, machine: Machine, slowdown: float = 1.0) -> None:
        super().__init__(machine, slowdown)
        self.wired = self.since = self.done = 0

    def copied(self, nbytes: float) -> int:
        """Simulate an offload copy by a CPU core; return its end time in ns.

        The time to access a disk is not included.
        """
        self.kernel("offload", 2 * nbytes)
        return self.now

    def wake_up(self, time: int) -> int:
        """Return the time in ns at which a rank resumes if its wait ends at `time`."""
        return time + _nanoseconds(self.slowdown * self.machine.wakeup_s)

    def legs(self, op: str, nbytes: float, members: Sequence[int]) -> Legs:
        """Return the CPU and network time of a call in seconds."""
        case = "legs", op, nbytes, members
        if case not in self.known:
            self.known[case] = legs(self.machine, op, nbytes, members)
        return self.known[case]

    def post(self, op: str, nbytes: float, members: Sequence[int], axis: str) -> int:
        work, wired = self.legs(op, nbytes, members)
        queue = queue_of(axis)
        self.work(work)
        self.ends[queue] = self._card_done(max(self.now, self.ends[queue]), wired)
        return self.wake_up(self.ends[queue])

    def _card_done(self, ready: int, seconds: float) -> int:
        """Simulate a NIC transfer of `seconds`; return its end time in ns.

        The data are available at time `ready`. Sets `since`, the start of the NIC's current busy
        period, and `done`, the time at which the most recent call stops waiting for the NIC.
        """
        if seconds:
            begin = max(ready, self.ends[_CARD])
            self.since = begin if begin > self.ends[_CARD] else self.since
            ready = self.ends[_CARD] = begin + _nanoseconds(seconds)
        self.done = min(ready, self.ends[_CARD])
        return ready

    def until(self, end: int, pending: Pending) -> Pending:
        # A call's Pending is created right after the call is posted, so `since` and `done` still
        # describe this call.
        begin, done, ended = self.since, self.done, super().until(end, pending)

        def finish():
            self.wired += max(0, done - max(self.now, begin))
            return ended.wait()

        return Pending(finish)

    def send_done(self, nbytes: float, members: Sequence[int], last: int) -> int:
        work, wired = self.legs("send", nbytes, members)
        self.work(work)
        return self._card_done(self.now, wired)

    def receive(self, nbytes: float, members: Sequence[int], arrival: int) -> None:
        work, wired = self.legs("recv", nbytes, members)
        if arrival > self.now:
            self.wired += min(arrival - self.now, _nanoseconds(wired))
            self.now = self.wake_up(arrival)
        self.work(work)


def clock_of(machine: Machine, slowdown: float = 1.0) -> Clock:
    """Return a Clock if the ranks of the machine have GPUs, and a HostDrivenClock otherwise."""
    return (HostDrivenClock if machine.cores else Clock)(machine, slowdown)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class TimedCommunicator(AbstractCommunicator):
    """Communicator along a mesh axis whose calls advance the simulated clock.

    All members are assumed to make each call at the same time. If blocks have owner ranks,
    `owners` synchronizes the classes of ranks (owner_classes.py). The time
    of a call is that of a call among the `timed_members`.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        pool: Pool,
        axis: str,
        owners: OwnerPeers | None = None,
    ) -> None:
        super().__init__(rank, len(members), members, pool)
        self.clock, self.axis, self.owners = pool.meter, axis, owners
        self.timed_members = self.members

    def rows_at(self, block: Any, root: int) -> int:
        if not self.owners:
            return super().rows_at(block, root)
        owner = self.owners.classes.of_rank[self.members[root]]
        return self.owners.values(self.axis, len(block))[owner]

    def timed(self, op: str, block: Any, pending: Pending) -> Pending:
        if self.owners:
            ends, queue = self.clock.ends, queue_of(self.axis)
            begin = max(self.clock.now, ends[queue])
            ends[queue] = max(self.owners.values(self.axis, begin).values())
        nbytes = received_bytes(op, block.nbytes, self.size)
        return self.clock.until(
            self.clock.post(op, nbytes, self.timed_members, self.axis), pending
        )

    def _all_gather(self, block):
        return self.timed("all_gather", block, super()._all_gather(block))

    def _reduce_scatter(self, block):
        return self.timed("reduce_scatter", block, super()._reduce_scatter(block))

    def _all_reduce(self, block, op):
        return self.timed("all_reduce", block, super()._all_reduce(block, op))

    def _broadcast(self, block, root):
        whole = super()._broadcast(block, root).wait()
        return self.timed("broadcast", whole, ready(whole))

    def _reduce(self, block, root):
        return self.timed("reduce", block, super()._reduce(block, root))

    def _all_to_all(self, block):
        return self.timed("all_to_all", block, super()._all_to_all(block))


class ContextTimed(TimedCommunicator):
    """Communicator of the first rank along the context axis.

    `context` defines the peers of all members. All members send at the same time, and their
    messages arrive when the slowest transfer has ended. Messages that are posted together are sent
    sequentially.
    """

    def __init__(
        self,
        members: Sequence[int],
        pool: Pool,
        context: Context,
        owners: OwnerPeers | None = None,
    ) -> None:
        super().__init__(0, members, pool, CONTEXT, owners)
        self.context, self.arrivals = context, deque()

    def _send(self, block, peer):
        end = self.clock.pass_on(block.nbytes, self.slowest(peer), self.axis)
        self.arrivals.append(end)
        return self.clock.until(end, super()._send(block, peer))

    def _recv(self, shape, dtype, peer):
        pending, end = super()._recv(shape, dtype, peer), self.arrivals.popleft()
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        return self.clock.taken(nbytes, self.slowest(peer), end, pending)

    def slowest(self, peer: int) -> tuple[int, int]:
        """Return the pair of ranks with the slowest transfer when this rank sends to `peer`."""
        known, case = self.clock.known, ("slowest", self.context, self.members, peer)
        if case not in known:
            others = (self.context.peer(number, peer) for number in range(self.size))
            pairs = [(rank, self.members[other]) for rank, other in zip(self.members, others)]
            known[case] = max(pairs, key=lambda pair: self.clock.call("send", _LONG, pair))
        return known[case]


class PipelineTimed(TimedCommunicator):
    """Communicator across pipeline stages, whose calls advance the simulated clock.

    `stages` maps each member to its simulated stage, and `peers` exchanges times with the other
    simulated stages. The transfer of a message begins when it has been posted and all earlier
    transfers have ended. A collective begins when the last stage has posted it.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        pool: Pool,
        peers: StagePeers,
        stages: range | dict[int, int],
        owners: OwnerPeers | None = None,
    ) -> None:
        axis = WORLD if isinstance(stages, dict) else "p"
        super().__init__(rank, members, pool, axis, owners)
        self.peers, self.stages, self.sends_done = peers, stages, Counter()

    def timed(self, op: str, block: Any, pending: Pending) -> Pending:
        if self.axis == WORLD:  # on the host
            self.clock.synchronize()
        ends, queue = self.clock.ends, queue_of(self.axis)
        ends[queue] = max(ends[queue], self.peers.latest(self.clock.now))
        return super().timed(op, block, pending)

    def _send(self, block, peer):
        end = self.clock.send_done(block.nbytes, self.pair(peer), self.sends_done[peer])
        self.sends_done[peer] = end
        self.peers.send(end, self.stages[peer])
        return self.clock.until(end, super()._send(block, peer))

    def _recv(self, shape, dtype, peer):
        arrival = self.peers.recv(self.stages[peer])
        pending = super()._recv(shape, dtype, peer)

        def finish():
            block = pending.wait()
            self.clock.receive(block.nbytes, self.pair(peer), arrival())
            return block

        return Pending(finish)

    def pair(self, peer: int) -> tuple[int, int]:
        return self.timed_members[self.rank], self.timed_members[peer]


def representative(
    grid: Grid,
    pool: Pool,
    peers: StagePeers | OwnerPeers | None = None,
    context: Context | None = None,
    owners: OwnerPeers | None = None,
) -> Mesh:
    """Return the mesh of the first rank of a stage, which represents all ranks of the stage.

    `peers` exchanges times with the other simulated stages; by default, only the first stage is
    simulated. `pool.meter`, the cost meter, must be a Clock. `context` describes how sequences are
    sharded in context parallelism. If `owners` is given, the mesh is that of the first rank of its
    class instead. The calls of all classes take as long as those of the first rank of the stage.
    The memory of the mesh does not depend on the number of ranks along an axis.
    """
    peers = peers or StageTurns(1).peers(0)
    column = grid.ranks_along("p", grid.coords(owners.first) if owners else {})
    rank = column[peers.rank]
    coords = grid.coords(rank)
    comms = {
        axis: TimedCommunicator(members.index(rank), members, pool, axis, owners)
        for axis, members in groups_of(grid, coords).items()
    }
    if context and CONTEXT in comms:
        comms[CONTEXT] = ContextTimed(comms[CONTEXT].members, pool, context, owners)
    if peers.size > 1:
        comms["p"] = PipelineTimed(peers.rank, column, pool, peers, range(len(column)), owners)
    first = groups_of(grid, grid.coords(grid.ranks_along("p", {})[peers.rank]))
    for axis, comm in comms.items():
        comm.timed_members = first[axis]
    stages = {member: stage for stage, member in enumerate(column)}
    world = PipelineTimed(rank, range(grid.size), pool, peers, stages, owners)
    return Mesh(grid.sizes, coords, comms, world)


def with_most_scores(stages: Iterable[PipelineStage]) -> None:
    """Give a representative rank the attention work of the busiest rank along the context axis.

    The windows of the first tokens of a sequence are cut off, so that the last ring position has
    the most work.
    """
    for block in chain.from_iterable(stage.blocks for stage in stages):
        attention = block.attention
        core = attention.core if isinstance(attention, HeadExchange) else attention
        if isinstance(core, RingAttention) and core.window:
            core.stand_for(core.context.rings - 1)
