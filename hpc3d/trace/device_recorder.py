"""Event recorder of a rank that computes on a device.

Spans are timed on the device, because the host launches kernels asynchronously.  A row of a device
stream initially holds the numbers of two timestamps (device_clock.py) in place of its start and
duration; `flush` replaces the numbers with times.  Recording never synchronizes the host with the
device within a step.

    stream 0, host             host activity, calls of the world communicator
    stream 1, computation      compute spans; `comm` rows: computation is waiting for a block
    stream 2, communication    calls in progress, with category `copy`
    stream 3, replicas         calls in progress along the data axis
    stream 4, offload          copies to and from the host
    stream 5, replica groups   calls in progress between groups of replicas (axis r)
    stream 6, experts          calls in progress along the expert-parallel axis

Calls on host arrays and spans with op "none" are recorded in stream 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.comm.mesh import WORLD, queue_of
from hpc3d.cuda.device import QUEUES, Cuda
from hpc3d.trace.device_clock import DeviceClock, Timestamps
from hpc3d.trace.recorder import COMPUTE, OPTIMIZER, WAIT, Recorder, Span
from hpc3d.trace.schema import CATEGORY, EVENTS, PHASE, STEPS, STREAM, record_type
from hpc3d.trace.traced_communicator import AT_ONCE, COMM, COPY, OP_NUMBER, Traced

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_ROWS = record_type(EVENTS)
_HOST = CATEGORY.index("host")
_COMPUTATION = STREAM.index("computation")
_QUEUED = dict(zip(QUEUES, map(STREAM.index, STREAM[2:])))
_PASSES = {
    "forward_s": ["forward"],
    "backward_s": ["backward", "backward_input", "backward_weight", "recompute"],
}

# Functions that push and pop an NVTX range.
_Ranges = tuple[Callable[[str], object], Callable[[], object]]


class DeviceRecorder(Recorder):
    """Event recorder for the compute stream and the communication queues of `device`.

    `timing` is CuPy's pair (Event, get_elapsed_time).  `ranges` is a pair of functions that push
    and pop an NVTX range, so that NVIDIA's profilers show the names of spans.  Work captured into
    a CUDA graph has no timestamps and is not recorded; its flops are counted when the graph is
    launched.
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
        self.compute = Timestamps(device.compute, self.device)
        queues = {
            _QUEUED[queue]: Timestamps(each, self.device) for queue, each in device.queues.items()
        }
        self.timestamps = {_COMPUTATION: self.compute} | queues
        # (begin, end) timestamps of the intervals of this step during which communication
        # calls blocked computation
        self.stalls: list[tuple[int, int]] = []
        self.outstanding: set[int] = set()  # timestamps of calls that are not yet complete
        self.flying, self.process = False, os.getpid()
        self.captured = 0.0  # flops of the work captured into a CUDA graph

    @property
    def communication(self) -> float:
        """Time in ns for which communication blocked computation in this step.

        Reading this property synchronizes the host with the device.
        """
        if self.stalls:
            self.device.compare()
        return self.blocked + sum(self.compute.between(*pair) for pair in self.stalls)

    @property
    def capturing(self) -> bool:
        """True while the compute stream is being captured into a CUDA graph."""
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
        """Return a communicator that records the calls of `comm`.

        Calls of the world communicator are recorded in the host stream.
        """
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
        """Context manager that records the enclosed calls as one row of a communication stream.

        The stream first waits for the latest event recorded in the compute stream.
        """
        if self.flying or self.capturing:
            yield
            return
        stamps = self.timestamps[stream]
        stamps.stream.wait_event(self.compute.last)
        context, start, self.flying = self.context, stamps.record(), True
        try:
            yield
        finally:
            self.flying = False
            what = self.name(op), COPY, OP_NUMBER.get(op, 0), context, group
            self.put(start, stamps.record(), *what, received=received, stream=stream)

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self.stalls.clear()
        before, after = self.device.compare()
        name = self.name("clock of the device")
        self.put(before, after - before, name, _HOST, OP_NUMBER["none"], self.context)

    def end_step(self, *results: Any) -> None:
        """Wait for the device to finish the step, and record its results."""
        self.device.compare()
        super().end_step(*results)

    def end_evaluation(self, *results: Any) -> None:
        """Wait for the device to finish the evaluation, and record its results."""
        self.device.compare()
        super().end_evaluation(*results)

    def flush(self) -> None:
        """Write the rows whose events have completed; keep the others for the next segment."""
        if os.getpid() == self.process:  # a forked child process cannot use the device
            for stamps in self.timestamps.values():
                stamps.resolve()
        rows = np.frombuffer(self.table, _ROWS, self.count).copy()
        late = np.zeros(len(rows), bool)
        for stream, stamps in self.timestamps.items():
            late |= (rows["stream"] == stream) & (rows["dur"] >= stamps.known)
        rows, later = rows[~late], rows[late]
        self._resolve_rows(rows)
        self.steps = _with_passes(self.steps, rows)
        self._fill(rows)
        super().flush()
        self._fill(later)
        self._discard(later)

    def _fill(self, rows: np.ndarray) -> None:
        self.table[: rows.nbytes], self.count = rows.tobytes(), len(rows)

    def _resolve_rows(self, rows: np.ndarray) -> None:
        """Replace the timestamp numbers in `rows` with host times."""
        for stream, stamps in self.timestamps.items():
            here, times = np.flatnonzero(rows["stream"] == stream), np.array(stamps.times)
            for column in ("t_start", "posted", "dur"):
                rows[column][here] = times[rows[column][here] - stamps.first]
            rows["t_global"][here] = rows["t_start"][here]
            rows["dur"][here] -= rows["t_start"][here]

    def _discard(self, later: np.ndarray) -> None:
        """Discard the timestamps that are no longer needed.

        Timestamps are needed by the rows `later`, which are not written yet, and by outstanding
        calls.
        """
        self.stalls.clear()
        for stream, stamps in self.timestamps.items():
            needed = later["posted"][later["stream"] == stream].tolist()
            calls = self.outstanding if stamps is self.compute else ()
            stamps.discard(min([*needed, *calls, stamps.known]))


def _with_passes(steps: Any, rows: np.ndarray) -> np.ndarray:
    """Return the rows of /steps, adding forward and backward times computed from `rows`."""
    steps = np.array(steps, record_type(STEPS))
    index = np.searchsorted(steps["step"], rows["step"])
    inside = np.append(steps["step"], -1)[index] == rows["step"]
    inside &= (rows["stream"] == _COMPUTATION) & (rows["step"] >= 0)
    for column, phases in _PASSES.items():
        these = inside & np.isin(rows["phase"], [*map(PHASE.index, phases)])
        spent = np.bincount(index[these], rows["dur"][these] * 1e-9, len(steps))
        steps[column] = spent[: len(steps)]
    return steps


class DeviceSpan(Span):
    """Context manager that records one compute event on the device."""

    __slots__ = ()
    recorder: DeviceRecorder

    @property
    def category(self) -> int:
        return OPTIMIZER if self.recorder.phase == "optimizer" else COMPUTE

    def __enter__(self):
        self.start = self.recorder.compute.record()
        return self

    def __exit__(self, *exception):
        recorder = self.recorder
        what = self.name, self.category, self.op, recorder.context
        end = recorder.compute.record()
        recorder.put(self.start, end, *what, flops=self.flops, stream=_COMPUTATION)
        return False


class DeviceWait(DeviceSpan):
    """Context manager that records an interval during which the compute stream waits."""

    __slots__ = ()
    category = WAIT


class Ranged:
    """Span wrapped in an NVTX range of the same name."""

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
    """Communicator that records its calls on blocks in device memory.

    Each call adds a row of category comm to the computation stream. This row spans the time during
    which computation waits for the result of the call; `posted` is the time of the call. Another
    row, in `stream`, spans the execution of the call; grouped calls share this row. If a call
    blocked the host, and may thus have delayed the device, a row of category copy is added to the
    computation stream.
    """

    recorder: DeviceRecorder

    def __init__(
        self, comm: Communicator, recorder: DeviceRecorder, group: int, stream: int
    ) -> None:
        super().__init__(comm, recorder, group)
        self.grouped, self.stream = self._departing, stream

    @contextmanager
    def _departing(self) -> Iterator[None]:
        """Context manager that groups the enclosed calls and records them as one row."""
        if not self.recorder.capturing:
            self.recorder.compute.record()
        with self.recorder.flight("together", self.group, self.stream), self.comm.grouped():
            yield

    def call(self, op: str, block: Array, peer: int, post: Callable[[], Pending]) -> Pending:
        recorder, stamps = self.recorder, self.recorder.compute
        if recorder.capturing:
            return post()
        seq = self.number(op, peer)
        context, step, called = recorder.context, recorder.step, recorder.clock()
        posted = stamps.record()
        recorder.outstanding.add(posted)
        with recorder.flight(op, self.group, self.stream):
            pending = post()
        free = recorder.clock()
        left = stamps.record() if free - called > AT_ONCE else None
        count, name, number = stamps.count, recorder.name(op), OP_NUMBER[op]
        data = block.nbytes, block.size, block.dtype

        def finish():
            begin = posted
            if stamps.count > count or recorder.clock() - free > AT_ONCE:
                if left is not None:
                    recorder.stalls.append((posted, left))
                    where = context, self.group
                    what = name, COPY, number
                    recorder.put(posted, left, *what, *where, step=step, stream=_COMPUTATION)
                begin = stamps.record()
            result = pending.wait()
            end = stamps.record()
            recorder.outstanding.remove(posted)
            recorder.stalls.append((begin, end))
            about = self.about(op, seq, peer, data, result)
            about |= {"posted": posted, "stream": _COMPUTATION}
            recorder.put(begin, end, name, COMM, number, context, **about)
            return result

        return Pending(finish)
