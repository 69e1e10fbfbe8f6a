"""A device with simulated times that computes nothing. Its streams run concurrently with each
other and with the host. Its clock has a limited resolution and drifts."""

import time
from collections import deque
from contextlib import contextmanager

import numpy as np

from hpc3d.comm.comm_stream import CommStream
from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.cuda.device import QUEUES

TICK = 500  # ns of what events tell
POST, REACH, WAKE = 1_000, 2_000, 3_000  # ns to post, until an idle stream begins, to wake up


class Simulated:
    """Simulated host time, which advances with work and waits; `lag` is extra ns of each wait."""

    def __init__(self):
        self.now, self.lag = 7_000_000_000, deque()

    def __call__(self):
        self.now += 50
        return self.now

    def skip(self, duration):
        self.now += duration

    def until(self, moment):
        late = self.lag.popleft() if self.lag else 0
        self.now = max(self.now, moment) + WAKE + late


class Real:
    """Real time of this host."""

    def __call__(self):
        return time.monotonic_ns()

    def skip(self, duration):
        pass

    def until(self, moment):
        while time.monotonic_ns() < moment:
            time.sleep(0)


class Event:
    def __init__(self, device):
        self.device, self.time = device, None
        device.created += 1

    @property
    def done(self):
        return self.time <= self.device.host()

    def synchronize(self):
        self.device.waits += 1
        self.device.host.until(self.time)


class Stream:
    """Stream that runs posted operations in order; `free` is the end of the last one."""

    def __init__(self, device):
        self.device, self.free, self.grouped, self.captures = device, 0, False, False

    def work(self, duration, start=0):
        """Post work of `duration` ns; return its start and end."""
        self.device.host.skip(POST)
        start = max(start, self.free, self.device.host() + REACH)
        self.free = start + duration
        return start, self.free

    def record(self, event=None):
        assert not self.grouped, "an event inside of a group"
        assert not (event and self.captures), "nobody may ask for an event of a graph"
        event = event or Event(self.device)
        _, event.time = self.work(0)
        return event

    def is_capturing(self):
        return self.captures

    def wait_event(self, event):
        self.device.host.skip(POST)
        self.free = max(self.free, event.time)


class TimedDevice:
    """Device whose clock is faster than the host's clock by the factor `drift`."""

    def __init__(self, host, drift=0.0):
        self.host, self.drift, self.created, self.waits = host, drift, 0, 0
        self.compute = Stream(self)
        self.queues = {queue: Stream(self) for queue in QUEUES}

    def synchronize(self):
        self.waits += 1
        self.host.until(self.compute.free)

    @property
    def timing(self):
        return lambda: Event(self), self.elapsed

    def elapsed(self, first, second):
        """Return the ms between two past events in float32, like cudaEventElapsedTime."""
        now = self.host()
        assert first.time <= second.time <= now, "not ready, or in the wrong order"
        ticks = [int(each.time * (1 + self.drift)) // TICK for each in (first, second)]
        return float(np.float32((ticks[1] - ticks[0]) * TICK / 1e6))


class Comm(Communicator):
    """Communicator whose calls run on the communication stream of the device, each for `lasts` ns
    after all members have arrived; `meet(start)` returns the last arrival. `host` is the host time
    of a call. `ran` lists the executed calls with their times."""

    def __init__(self, device, rank=0, size=2, lasts=100_000, meet=int, host=0, queue="blocks"):
        super().__init__(rank, size)
        self.device, self.traffic = device, CommStream(device, self.group, queue)
        self.stream = device.queues[queue]
        self.lasts, self.meet, self.host, self.ran = lasts, meet, host, []

    @contextmanager
    def group(self):
        """Calls posted in this context run as one call at its end."""
        self.stream.grouped, before = True, self.stream.free
        yield
        self.stream.grouped = False
        self.ran.append(self.stream.work(self.lasts, before))

    def fly(self, result, *arrays):
        self.device.host.skip(self.host)

        def call(stream):
            if not stream.grouped:
                start = self.meet(max(stream.free, self.device.host() + POST + REACH))
                self.ran.append(stream.work(self.lasts, start))

        flight = self.traffic.post(call, *arrays)

        def finish():
            self.traffic.finish(flight)
            return result

        return Pending(finish)

    def grouped(self):
        return self.traffic.grouped()

    def _all_gather(self, block):
        return self.fly(np.concatenate([block] * self.size), block)

    def _all_reduce(self, block, op):
        return self.fly(block, block)

    def _send(self, block, peer):
        return self.fly(block, block)

    def _recv(self, shape, dtype, peer):
        return self.fly(np.zeros(shape, dtype))
