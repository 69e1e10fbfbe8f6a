"""Virtual time for ranks on threads: traces do not depend on the load of the machine.

Each rank has its own clock. It advances when it is read, when a test advances it, and when the
rank waits for a message. A rank receives a block no earlier than the sender's call.
"""

import random
from functools import partial

from hpc3d.comm.communicator import Pending

START = 7_000_000_000  # ns
COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("broadcast", "reduce"),
)
MESSAGES = ("send", "recv")


class Clock:
    """Clock of a rank in ns; each reading advances it by 0.1 to 2 us, drawn for each rank."""

    def __init__(self, rank=0, start=START):
        self.now, self.random = start, random.Random(rank)

    def __call__(self):
        self.advance(self.random.randrange(100, 2000))
        return self.now

    def advance(self, duration):
        self.now += int(duration)

    def until(self, moment):
        self.now = max(self.now, moment)


class Network:
    """Arrival times of all ranks at their calls; wraps the communicators of each rank.

    A collective ends for all members `lasts` ns (by operation) after the last arrival, and not
    before the rank's previous collective in the group has ended. A message arrives `latency` ns
    after it was sent.
    """

    def __init__(self, **lasts):
        self.arrivals, self.lasts = {}, lasts

    def wrap(self, comm, axis, clock):
        return Timed(comm, axis, clock, self)

    def latency(self, clock):
        """Return the latency in ns of a message to the rank with this clock."""
        return 0


class Timed:
    """Communicator of hpc3d.comm.threads whose waits take virtual time."""

    def __init__(self, comm, axis, clock, network):
        self.comm, self.clock, self.network = comm, clock, network
        self.group, self.numbers, self.free = (axis, comm.members), {}, 0

    def __getattr__(self, name):
        value = getattr(self.comm, name)
        if name in COLLECTIVES:
            return partial(self.meet, name, value)
        return partial(getattr(self, f"_{name}"), value) if name in MESSAGES else value

    def arrive(self, *what):
        """Record that this rank makes its next call of this kind; return the key of the call."""
        number = self.numbers[what] = self.numbers.get(what, -1) + 1
        key = self.group, *what, number
        self.network.arrivals.setdefault(key, {})[self.comm.rank] = self.clock.now
        return key

    def meet(self, op, post, *arguments):
        key = self.arrive("collective")
        pending = post(*arguments)  # returns when all members have arrived
        last = max(self.network.arrivals[key].values())
        self.free = max(last, self.free) + self.network.lasts.get(op, 0)
        return self.at(pending, self.free)

    def _send(self, post, block, peer):
        self.arrive(self.comm.rank, peer)
        return post(block, peer)

    def _recv(self, post, shape, dtype, peer):
        what = peer, self.comm.rank
        number = self.numbers[what] = self.numbers.get(what, -1) + 1
        pending = post(shape, dtype, peer)

        def finish():
            block = pending.wait()
            sent = self.network.arrivals[self.group, *what, number][peer]
            self.clock.until(sent + self.network.latency(self.clock))
            return block

        return Pending(finish)

    def at(self, pending, moment):
        def finish():
            block = pending.wait()
            self.clock.until(moment)
            return block

        return Pending(finish)
