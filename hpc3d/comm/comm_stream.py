"""The streams of a device: what it computes and what it sends, each in the order of the program,
and the dependencies between the two.

A call on a stream of communication follows all that was computed before it, and what is computed
after its wait follows it.  The host waits for neither.  An array that a call reads or writes lives
until something follows the call, whenever Python drops it: memory that is freed is handed out
again for the next thing to be computed, which must not run beside a call that still reads it.

    computation     x = ...  |record a             |wait b   y + ...
    communication            |wait a   all-gather  |record b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.cuda.device import Cuda


class AsyncCall:
    """Calls that are under way together: their `arrays` on the device, those that the host has
    `host_buffers` them, and the event at their end."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.host_buffers: list[np.ndarray] = []
        self.done: Any = None


class CommStream:
    """The calls of a rank's communicators in one queue (hpc3d.comm.mesh), in program order on
    one stream: they must not overtake each other in another order on another rank.

    `device` has the stream `compute` and those of its `queues`; `group` is NCCL's context in which
    calls are posted together.
    """

    def __init__(
        self, device: Cuda, group: Callable[[], AbstractContextManager], queue: str = "blocks"
    ) -> None:
        self.compute, self.sending, self.group = device.compute, device.queues[queue], group
        self.flights: deque[AsyncCall] = deque()
        self.open: AsyncCall | None = None

    def post(
        self, call: Callable[..., object], *arrays: Array, host_buffers: Sequence[np.ndarray] = ()
    ) -> AsyncCall:
        """Make `call(stream=...)`, which reads and writes `arrays` of the device and those that
        are `host_buffers` by the host; its AsyncCall."""
        if self.open:
            return self.add(self.open, call, arrays, host_buffers)
        flight = self.add(self.begin(), call, arrays, host_buffers)
        self.end(flight)
        return flight

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """The calls in this context are one: none waits for another."""
        self.open = flight = self.begin()
        try:
            with self.group():
                yield
        finally:
            self.open = None
        self.end(flight)

    def finish(self, flight: AsyncCall) -> None:
        """Let all that is computed from now on follow a flight: memory of the device, which is
        used again in that order only, may be free now; what the host lent is not."""
        self.compute.wait_event(flight.done)
        flight.arrays.clear()

    def begin(self) -> AsyncCall:
        self.sending.wait_event(self.compute.record())
        return AsyncCall()

    def add(
        self,
        flight: AsyncCall,
        call: Callable[..., object],
        arrays: Iterable[Array],
        host_buffers: Sequence[np.ndarray],
    ) -> AsyncCall:
        flight.arrays += arrays
        flight.host_buffers += host_buffers
        call(stream=self.sending)
        return flight

    def end(self, flight: AsyncCall) -> None:
        """Nobody may ask for the events of a graph that is being captured; all of its calls must
        be waited for."""
        flight.done = self.sending.record()
        if self.sending.is_capturing():
            return
        self.flights.append(flight)
        while self.flights and self.flights[0].done.done:
            self.flights.popleft()
