"""The two streams of a device: what it computes and what it sends, each in the order of the
program, and what one has to wait for of the other.

A call on the stream of communication follows all that was computed before it, and what is computed
after its wait follows it.  The host waits for neither.  An array that a call reads or writes lives
until that call has ended on the device, whenever Python drops it: memory that is freed would be
handed out again for the next thing to be computed, beside the call that still reads it.

    computation     x = ...  |record a             |wait b   y + ...
    communication            |wait a   all-gather  |record b
"""

from collections import deque
from contextlib import contextmanager


class Flight:
    """Calls that are under way together: their `arrays`, and the event at their end."""

    def __init__(self):
        self.arrays, self.done = [], None


class Traffic:
    """The calls of all communicators of a rank, in program order on one stream: NCCL's own must
    not overtake each other in another order on another rank.

    `device` has the streams `compute` and `sending`; `group` is NCCL's context in which calls are
    posted together.
    """

    def __init__(self, device, group):
        self.compute, self.sending, self.group = device.compute, device.sending, group
        self.flights, self.open = deque(), None

    def post(self, call, *arrays):
        """Make `call(stream=...)`, which reads and writes `arrays`; its Flight."""
        if self.open:
            return self.add(self.open, call, arrays)
        flight = self.add(self.begin(), call, arrays)
        self.end(flight)
        return flight

    @contextmanager
    def together(self):
        """The calls in this context are one: none waits for another."""
        self.open = flight = self.begin()
        with self.group():
            yield
        self.open = None
        self.end(flight)

    def land(self, flight):
        """Let all that is computed from now on follow a flight."""
        self.compute.wait_event(flight.done)

    def begin(self):
        self.sending.wait_event(self.compute.record())
        return Flight()

    def add(self, flight, call, arrays):
        flight.arrays += arrays
        call(stream=self.sending)
        return flight

    def end(self, flight):
        flight.done = self.sending.record()
        self.flights.append(flight)
        while self.flights and self.flights[0].done.done:
            self.flights.popleft()
