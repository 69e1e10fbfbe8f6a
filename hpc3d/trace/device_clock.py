"""Timestamps of CUDA events, converted to the clock of the host.

A timestamp is an event recorded in a stream without synchronization.  CUDA reports only the
elapsed time between two events (cudaEventElapsedTime).  A reference event is therefore recorded
while the device is idle, between two readings of the host clock.

    host      |before     |after          reference  (before + after) / 2
    device         |reference      |x     x          reference + rate (x - reference)

The error of the reference time is at most half of `after - before`, a few us.  The resolution of
events adds an error of 0.5 us.  CUDA returns elapsed times in float32, which adds an error of 6e-8
of the time since the reference, so a new reference is recorded at the beginning and at the end of
every step.  `rate` is the rate of the host clock relative to the device clock, measured between
the first and the latest reference.  Its error is 1e-5 after one second of a run, and decreases
afterwards.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda

_POOL = 1024  # number of events created before the first step
CHUNK = 64  # maximum number of timestamps resolved at once
# number of clock readings for the first reference, and maximum number of additional readings
_FIRST, _MOST = 16, 8
_MILLISECOND = 1_000_000  # ns
_LONG = 1e9  # minimum interval in ns between two references for measuring the rate


class Reference:
    """Event with a known host time, from which the times of later events are computed.

    `rate` is the host time in ns that elapses per ns of device time. `time` and `until` are the
    host times in ns of this reference and of the next reference.
    """

    __slots__ = ("event", "rate", "time", "until")

    def __init__(self, event: Any, time: int, rate: float) -> None:
        self.event, self.time, self.rate = event, time, rate
        self.until: int | None = None


class DeviceClock:
    """Converts the times of device events to host times in ns, on the clock read by `clock()`.

    Reference events are recorded in the compute stream of `device`.  `create()` creates an event,
    and `elapsed(event, later)` returns the time between two events in ms.  Events are reused
    through a pool.
    """

    def __init__(
        self,
        device: Cuda,
        create: Callable[[], Any],
        elapsed: Callable[[Any, Any], float],
        clock: Callable[[], int],
    ) -> None:
        self.device, self.create, self.elapsed, self.clock = device, create, elapsed, clock
        self.pool = [create() for _ in range(_POOL)]
        self.references: deque[Reference] = deque()
        self.timestamps: list[Timestamps] = []
        # Shortest duration of a `read`, and device time between the first and the latest
        # reference, both in ns.
        self.shortest, self.passed = float("inf"), 0.0
        self.compare(_FIRST)

    def compare(self, readings: int = 1) -> tuple[int, int]:
        """Synchronize with the device and record a new reference event.

        Returns the host times before and after the event. `read` is called at least `readings`
        times, and then up to _MOST more times, until the shortest reading takes at most twice
        as long as the shortest reading of all earlier calls. The shortest reading of this call
        provides the reference.
        """
        self.device.synchronize()
        best = self.read()
        for number in range(1, readings + _MOST):
            if number >= readings and best[0] <= 2 * self.shortest:
                break
            best, other = sorted([best, self.read()], key=lambda reading: reading[0])
            self.pool.append(other[-1])
        width, before, after, event = best
        self.shortest = min(self.shortest, width)
        self._refer(event, (before + after) // 2)
        return before, after

    def read(self) -> tuple[int, int, int, Any]:
        """Record an event and wait for its completion, between two readings of the host clock.

        Returns the time in ns between the readings, the two readings, and the event.
        """
        event = self.pool.pop() if self.pool else self.create()
        before = self.clock()
        self.device.compute.record(event)
        event.synchronize()
        after = self.clock()
        return after - before, before, after, event

    def _refer(self, event: Any, time: int) -> None:
        """Use `event` as the reference for later timestamps; `time` is its host time in ns."""
        if self.references:
            last = self.references[-1]
            self.passed += self.elapsed(last.event, event) * _MILLISECOND
            last.until = time
        else:
            self.begun = time
        rate = (time - self.begun) / self.passed if self.passed > _LONG else 1.0
        self.references.append(Reference(event, time, rate))
        for timestamps in self.timestamps:
            timestamps.refer(self.references[-1])
        used = [timestamps.references[0][0] for timestamps in self.timestamps]
        while len(self.references) > 1 and self.references[0] not in used:
            self.pool.append(self.references.popleft().event)


class Timestamps:
    """Timestamps of a stream, numbered from 0.

    `times` holds the host times in ns of the resolved timestamps, starting at number `first`.
    `events` holds the events of the unresolved timestamps.  `references` holds pairs (reference,
    number of the first timestamp that uses it).  Recording a timestamp also resolves old
    timestamps, so that no work accumulates until the end of a step.
    """

    def __init__(self, stream: Any, clock: DeviceClock) -> None:
        self.stream, self.clock = stream, clock
        self.events: deque[Any] = deque()
        self.times = array("q")
        self.references: deque[tuple[Reference, int]] = deque()
        self.first = self.count = 0
        self.refer(clock.references[-1])
        clock.timestamps.append(self)

    @property
    def known(self) -> int:
        """Number of the first unresolved timestamp."""
        return self.first + len(self.times)

    @property
    def last(self) -> Any:
        """Event of the most recent timestamp."""
        return self.events[-1]

    def refer(self, reference: Reference) -> None:
        """Set the reference for all timestamps recorded after this call."""
        if not self.events:
            self.references.clear()
        self.references.append((reference, self.count))

    def record(self) -> int:
        """Record a timestamp in the stream and return its number."""
        pool = self.clock.pool
        event = pool.pop() if pool else self.clock.create()
        self.stream.record(event)
        if not self.count % CHUNK:
            left = CHUNK
            while left and (resolved := self._resolve(left)):
                left -= resolved
        self.events.append(event)
        self.count += 1
        return self.count - 1

    def resolve(self) -> None:
        """Resolve all timestamps whose events have completed."""
        while self._resolve(CHUNK) or self._resolve(1):
            pass

    def _resolve(self, most: int) -> int:
        """Resolve up to `most` of the oldest timestamps; return the number resolved.

        Only timestamps with the same reference as the oldest timestamp are resolved. If the last
        of the selected events has not completed, no timestamp is resolved.
        """
        while len(self.references) > 1 and self.references[1][1] <= self.known:
            self.references.popleft()
        end = self.references[1][1] if len(self.references) > 1 else self.count
        count = min(most, end - self.known)
        if not count or not self.events[count - 1].done:
            return 0
        events = [self.events.popleft() for _ in range(count)]
        latest = self.times[-1:]
        self.times.extend(np.maximum.accumulate([*latest, *self.at(events)])[len(latest) :])
        self.clock.pool += events
        return count

    def at(self, events: Sequence[Any]) -> np.ndarray:
        """Return the host times of events in ns, computed from the oldest reference still in use.

        Events recorded in the compute stream before the next reference event also complete before
        that reference event. Their times are therefore capped at the time of that reference.
        """
        reference, elapsed = self.references[0][0], self.clock.elapsed
        passed = np.array([elapsed(reference.event, event) for event in events])
        times = reference.time + np.rint(reference.rate * _MILLISECOND * passed).astype("i8")
        until = reference.until if self.stream is self.clock.device.compute else None
        return times if until is None else np.minimum(times, until)

    def between(self, start: int, end: int) -> float:
        """Return the time in ns between two timestamps whose events have completed."""
        known = self.known
        if start < known <= end:
            self.resolve()
        elif start >= known:
            events = self.events[start - known], self.events[end - known]
            return self.clock.elapsed(*events) * _MILLISECOND
        return self.times[end - self.first] - self.times[start - self.first]

    def discard(self, number: int) -> None:
        """Discard all timestamps with numbers below `number`."""
        del self.times[: number - self.first]
        self.first = number
