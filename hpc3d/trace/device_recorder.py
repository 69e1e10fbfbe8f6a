"""The recorder of a rank that computes on a device.

Its spans are what the device does, not the host, which only posts it and goes on.  So a row of a
stream is laid down with the numbers of two moments (device_clock.py) in place of its start and
its duration, and `flush` puts the times there.  Nothing waits for the device inside of a step.

    stream 0, host             what the host does by itself, calls of the whole world
    stream 1, computation      spans; `comm`: it stands still until a block is there
    stream 2, communication    calls as they run, of category `copy`
    stream 3, replicas         those along the data axis
    stream 4, offload          copies to the host and from there

A call on the host's arrays, and a span of no operation, are those of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.communicator import Pending
from hpc3d.comm.mesh import WORLD, queue_of
from hpc3d.cuda.device import QUEUES
from hpc3d.trace.device_clock import DeviceClock, Line
from hpc3d.trace.recorder import COMPUTE, OPTIMIZER, WAIT, Recorder, Span
from hpc3d.trace.schema import CATEGORY, EVENTS, PHASE, STEPS, STREAM, record_type
from hpc3d.trace.traced_communicator import AT_ONCE, COMM, COPY, OP_NUMBER, Traced

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.communicator import Communicator
    from hpc3d.cuda.device import Cuda
    from hpc3d.trace.recorder import Context

_ROWS = record_type(EVENTS)
_HOST = CATEGORY.index("host")
_COMPUTATION = STREAM.index("computation")
_QUEUED = dict(zip(QUEUES, map(STREAM.index, STREAM[2:])))
_PASSES = {
    "forward_s": ["forward"],
    "backward_s": ["backward", "backward_input", "backward_weight", "recompute"],
}

# What begins a range of NVTX, and what ends it.
_Ranges = tuple[Callable[[str], object], Callable[[], object]]


class DeviceRecorder(Recorder):
    """A Recorder of what `device` does on its stream `compute` and those of its `queues`.

    `timing` are CuPy's Event and get_elapsed_time; `ranges`, where NVIDIA's profilers are to show
    the names of spans, what begins a range of NVTX and what ends it.  What goes into a CUDA graph
    has no moments: it is not recorded, and its operations are those of the launch of the graph.
    """

    def __init__(
        self,
        run_dir: Path,
        header: dict[str, Any],
        device: Cuda,
        timing: tuple[Callable[[], Any], Callable[[Any, Any], float]],
        ranges: _Ranges | None = None,
        **how: Any,
    ) -> None:
        super().__init__(run_dir, header, **how)
        self.device, self.ranges = DeviceClock(device, *timing, self.clock), ranges
        self.compute = Line(device.compute, self.device)
        queues = {_QUEUED[queue]: Line(each, self.device) for queue, each in device.queues.items()}
        self.lines = {_COMPUTATION: self.compute} | queues
        self.stalls: list[
            tuple[int, int]
        ] = []  # pairs of moments between which computation stood still in this step
        self.outstanding: set[int] = set()  # moments of calls that were not waited for yet
        self.flying, self.process = False, os.getpid()
        self.captured = 0.0  # operations of what goes into a graph

    @property
    def communication(self) -> float:
        """Nanoseconds in which computation stood still for calls; waits for the device."""
        if self.stalls:
            self.device.compare()
        return self.blocked + sum(self.compute.between(*pair) for pair in self.stalls)

    @property
    def capturing(self) -> bool:
        """Whether what is posted now goes into a graph."""
        return self.compute.stream.is_capturing()

    def span(
        self, name: str, op: str = "elementwise", flops: float = 0
    ) -> AbstractContextManager[Any]:
        if self.capturing:
            self.captured += flops
            return nullcontext()
        if op == "graph":
            flops = self.captured
        kind = Span if op == "none" else DeviceSpan
        span = kind(self, self.name(name), OP_NUMBER[op], flops)
        return Ranged(self.ranges, name, span) if self.ranges else span

    def wrap(self, comm: Communicator, axis: str) -> Traced:
        """`comm` recorded; that of the world speaks of the host's arrays."""
        traced = super().wrap(comm, axis)
        if axis == WORLD:
            return traced
        return DeviceTraced(comm, self, traced.group, _QUEUED[queue_of(axis)])

    def copying(self, name: str, nbytes: int) -> AbstractContextManager[Any]:
        return self.flight(name, -1, _QUEUED["offload"], nbytes)

    def waiting(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.capturing else DeviceWait(self, self.name(name), 0, 0)

    @contextmanager
    def flight(self, op: str, group: int, stream: int, received: int = 0) -> Iterator[None]:
        """What is posted here is one row of a stream of communication, which begins when all has
        been computed up to the last moment, and the stream is free."""
        if self.flying or self.capturing:
            yield
            return
        line = self.lines[stream]
        line.stream.wait_event(self.compute.last)
        context, start, self.flying = self.context, line.mark(), True
        try:
            yield
        finally:
            self.flying = False
            what = self.name(op), COPY, OP_NUMBER.get(op, 0), context, group
            self.put(start, line.mark(), *what, received=received, stream=stream)

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self.stalls.clear()
        before, after = self.device.compare()
        name = self.name("clock of the device")
        self.put(before, after - before, name, _HOST, OP_NUMBER["none"], self.context)

    def end_step(self, *results: Any) -> None:
        """Close a step when the device has computed all of it."""
        self.device.compare()
        super().end_step(*results)

    def end_evaluation(self, *results: Any) -> None:
        """The same of an evaluation."""
        self.device.compare()
        super().end_evaluation(*results)

    def flush(self) -> None:
        """Write the rows whose moments are past; the others wait for the next segment."""
        if os.getpid() == self.process:  # a child that saves what there is has no device
            for line in self.lines.values():
                line.catch_up()
        rows = np.frombuffer(self.table, _ROWS, self.count).copy()
        late = np.zeros(len(rows), bool)
        for stream, line in self.lines.items():
            late |= (rows["stream"] == stream) & (rows["dur"] >= line.known)
        rows, later = rows[~late], rows[late]
        self._tell_times(rows)
        self.steps = _with_passes(self.steps, rows)
        self._lay(rows)
        super().flush()
        self._lay(later)
        self.forget(later)

    def _lay(self, rows: np.ndarray) -> None:
        """Let the table be these rows."""
        self.table[: rows.nbytes], self.count = rows.tobytes(), len(rows)

    def _tell_times(self, rows: np.ndarray) -> None:
        """Put times in place of the numbers of moments."""
        for stream, line in self.lines.items():
            here, times = np.flatnonzero(rows["stream"] == stream), np.array(line.times)
            for column in ("t_start", "posted", "dur"):
                rows[column][here] = times[rows[column][here] - line.first]
            rows["t_global"][here] = rows["t_start"][here]
            rows["dur"][here] -= rows["t_start"][here]

    def forget(self, later: np.ndarray) -> None:
        """The times that no row will ask for: neither those `later` nor that of a call."""
        self.stalls.clear()
        for stream, line in self.lines.items():
            needed = later["posted"][later["stream"] == stream].tolist()
            calls = self.outstanding if line is self.compute else ()
            line.forget(min([*needed, *calls, line.known]))


def _with_passes(steps: Any, rows: np.ndarray) -> np.ndarray:
    """The rows of steps with the seconds that the device spent in passes, not the host."""
    steps = np.array(steps, record_type(STEPS))
    place = np.searchsorted(steps["step"], rows["step"])
    inside = np.append(steps["step"], -1)[place] == rows["step"]
    inside &= (rows["stream"] == _COMPUTATION) & (rows["step"] >= 0)
    for column, phases in _PASSES.items():
        these = inside & np.isin(rows["phase"], [*map(PHASE.index, phases)])
        spent = np.bincount(place[these], rows["dur"][these] * 1e-9, len(steps))
        steps[column] = spent[: len(steps)]
    return steps


class DeviceSpan(Span):
    """The context of one event of computation."""

    __slots__ = ()
    recorder: DeviceRecorder

    @property
    def category(self) -> int:
        return OPTIMIZER if self.recorder.phase == "optimizer" else COMPUTE

    def __enter__(self):
        self.start = self.recorder.compute.mark()
        return self

    def __exit__(self, *exception):
        recorder = self.recorder
        what = self.name, self.category, self.op, recorder.context
        end = recorder.compute.mark()
        recorder.put(self.start, end, *what, flops=self.flops, stream=_COMPUTATION)
        return False


class DeviceWait(DeviceSpan):
    """The context of a wait of computation."""

    __slots__ = ()
    category = WAIT


class Ranged:
    """A span that is a range of NVTX, too."""

    __slots__ = ("name", "ranges", "span")

    def __init__(self, ranges: _Ranges, name: str, span: Span) -> None:
        self.ranges, self.name, self.span = ranges, name, span

    def __enter__(self):
        push, _ = self.ranges
        push(self.name)
        return self.span.__enter__()

    def __exit__(self, *exception):
        _, pop = self.ranges
        self.span.__exit__(*exception)
        pop()
        return False


class DeviceTraced(Traced):
    """A communicator whose blocks are on a device.

    The row of category comm is the time in which computation stands still for the block, `posted`
    when it came to the call.  The call as it runs is a row of `stream`, one for all that are made
    together.  A call that kept the host, and so perhaps the device, from what
    comes next is a row of category copy of computation, too.
    """

    recorder: DeviceRecorder

    def __init__(
        self, comm: Communicator, recorder: DeviceRecorder, group: int, stream: int
    ) -> None:
        super().__init__(comm, recorder, group)
        self.grouped, self.stream = self._departing, stream

    @contextmanager
    def _departing(self) -> Iterator[None]:
        """The communicator's `group`, as one flight."""
        if not self.recorder.capturing:
            self.recorder.compute.mark()
        with self.recorder.flight("together", self.group, self.stream), self.comm.grouped():
            yield

    def call(self, op: str, block: Array, peer: int, post: Callable[[], Pending]) -> Pending:
        recorder, line = self.recorder, self.recorder.compute
        if recorder.capturing:
            return post()
        seq = self.number(op, peer)
        context, step, called = recorder.context, recorder.step, recorder.clock()
        posted = line.mark()
        recorder.outstanding.add(posted)
        with recorder.flight(op, self.group, self.stream):
            pending = post()
        free = recorder.clock()
        left = line.mark() if free - called > AT_ONCE else None
        count, what = line.count, (recorder.name(op), OP_NUMBER[op])

        def finish():
            begin = posted
            if line.count > count or recorder.clock() - free > AT_ONCE:
                self._hold(posted, left, what, context, step)
                begin = line.mark()
            result = pending.wait()
            end = line.mark()
            recorder.outstanding.remove(posted)
            recorder.stalls.append((begin, end))
            name, number = what
            about = self.about(op, seq, peer, block, result)
            about |= {"posted": posted, "stream": _COMPUTATION}
            recorder.put(begin, end, name, COMM, number, context, **about)
            return result

        return Pending(finish)

    def _hold(
        self, posted: int, left: int | None, what: tuple[int, int], context: Context, step: int
    ) -> None:
        """The row of a call that took the host its time, until the moment `left`."""
        if left is None:
            return
        recorder, (name, number) = self.recorder, what
        recorder.stalls.append((posted, left))
        place = context, self.group
        recorder.put(posted, left, name, COPY, number, *place, step=step, stream=_COMPUTATION)
