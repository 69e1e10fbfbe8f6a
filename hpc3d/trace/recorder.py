"""Event recorder of one rank: a preallocated table with one packed row per event.

Within a step, no file is accessed.  Memory is allocated only if the table is full: its capacity is
then doubled, which happens once or twice per run.  Between steps, the table is written to a new
segment file if it is half full, or if more than `every_s` seconds have passed since the previous
segment file was written.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from hpc3d.arrays.pool import has_values
from hpc3d.comm.mesh import Scope
from hpc3d.trace.router_sums import RouterSums
from hpc3d.trace.schema import CATEGORY, EVENTS, MEMORY_KIND, PHASE, record_type
from hpc3d.trace.segment import TABLES, segment_path, write_segment
from hpc3d.trace.traced_communicator import COPY, OP_NUMBER, Traced

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.communicator import Communicator
    from hpc3d.trace.clock import Clocks, Sample
    from hpc3d.trace.router_sums import ExpertRow, RouterRow

_CODES = {"i8": "q", "i4": "i", "i2": "h", "u4": "I", "u2": "H", "u1": "B", "f8": "d"}
ROW = struct.Struct("<" + "".join(_CODES[column.type] for column in EVENTS))
COMPUTE, OPTIMIZER, WAIT, _IO, _MARKER = map(
    CATEGORY.index, ("compute", "optimizer", "wait", "io", "marker")
)
PHASE_NUMBER = {name: number for number, name in enumerate(PHASE)}
MOST = (1 << 30) // ROW.size  # maximum number of rows in a table (1 GiB per rank)
_NANOSECONDS = 1_000_000_000

Context = tuple[int, int, int, int, int]  # (phase, microbatch, stage, chunk, layer)


class Recorder:
    """Recorder of a rank's events, step results, memory use and expert loads.

    `header` is the header of the segments (hpc3d.trace.segment) without groups and strings.
    `clocks` synchronizes the hosts' clocks (hpc3d.trace.clock); `None` disables this.

    Training code sets `step`, `layer`, `phase` and the position in the pipeline. Their values are
    stored with every event. A communication call is stored with the values at the time when it was
    posted. The table starts with `capacity` rows and grows to at most `most` rows. Further events
    are dropped, and counted in `dropped`.
    """

    def __init__(
        self,
        run_dir: Path | str,
        header: dict[str, Any],
        capacity: int = 1 << 15,
        every_s: float = 30,
        clock: Callable[[], int] = time.monotonic_ns,
        most: int = MOST,
    ) -> None:
        self.clocks: Clocks | None = None
        self.run_dir, self.header, self.clock = run_dir, {**header, "groups": []}, clock
        self.rank, self.every_s = header["rank"], every_s
        self.capacity, self.most = capacity, most
        self.table = bytearray(capacity * ROW.size)
        self.count = self.dropped = self.segments = 0
        self.strings: dict[str, int] = {}
        # Rows of /steps, /memory and other tables that have not been written to a segment yet.
        self.steps: Any = []
        self.memory: list[tuple[int, ...]] = []
        self.samples: list[Sample] = []
        self.evaluations: list[tuple[float, ...]] = []
        self.validation: list[tuple[float, ...]] = []
        self.experts: list[ExpertRow] = []
        self.routers: list[RouterRow] = []
        self.router_sums = RouterSums()
        self.step, self.layer, self.phase = -1, -1, "other"
        self.part = "other"  # sub-block of the model; not stored with events
        self.at(0, 0, -1)
        self.blocked = 0  # time in ns spent in communication calls since the beginning of the step
        # latest time in ns at which a call was posted, an event ended, or the step began
        self.latest = 0
        self.flushed = self.started = clock()

    @property
    def phase(self) -> str:
        return PHASE[self.phase_number]

    @phase.setter
    def phase(self, name: str) -> None:
        self.phase_number = PHASE_NUMBER[name]

    def scope(
        self, layer: int | None = None, phase: str | None = None, part: str | None = None
    ) -> Scope:
        """Return a context manager that sets the layer, phase and part, unless they are `None`."""
        return Scope(self, layer, phase, part)

    def at(self, stage: int, chunk: int, microbatch: int) -> None:
        """Set the current pipeline stage, model chunk and microbatch (-1: none)."""
        self.stage, self.chunk, self.microbatch = stage, chunk, microbatch

    @property
    def context(self) -> Context:
        """Phase, microbatch, stage, model chunk and layer, which `put` stores with an event."""
        return self.phase_number, self.microbatch, self.stage, self.chunk, self.layer

    @property
    def communication(self) -> float:
        """Time in ns that this rank has spent in communication calls during the current step."""
        return self.blocked

    def name(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def span(
        self, name: str, op: str = "elementwise", flops: float = 0
    ) -> AbstractContextManager[Any]:
        """Return a context manager for a compute event, or an input event if `op` is "none"."""
        return Span(self, self.name(name), OP_NUMBER[op], flops)

    def copying(self, name: str, nbytes: int) -> AbstractContextManager[Any]:
        """Return a context manager that records an offload or fetch of `nbytes` bytes."""
        return CopySpan(self, self.name(name), COPY, nbytes)

    def waiting(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that records a wait for a copy of an offloaded array."""
        return CopySpan(self, self.name(name), WAIT, 0)

    def mark(self, name: str) -> None:
        """Record a marker, which is an event of zero duration."""
        self.put(self.clock(), 0, self.name(name), _MARKER, OP_NUMBER["none"], self.context)

    def routed(self, chosen: Array, kept: Array, losses: tuple[Any, Any]) -> None:
        """Add the token counts and router losses of the current layer to the rank's sums.

        The arguments are described in `RouterSums.add`.  Recomputed forward passes are skipped,
        because their tokens were already counted.  Abstract arrays are skipped, because they have
        no values.
        """
        if self.phase != "recompute" and has_values(chosen):
            self.router_sums.add(self.layer, chosen, kept, *losses)

    def put(
        self,
        start: int,
        duration: int,
        name: int,
        category: int,
        op: int,
        context: Context,
        group: int = -1,
        seq: int = -1,
        peer: int = -1,
        received: int = 0,
        count: int = 0,
        dtype: int = 0,
        flops: float = 0.0,
        posted: int | None = None,
        step: int | None = None,
        stream: int = 0,
    ) -> None:
        """Append a row for an event of `duration` ns that began at `start`.

        By default, the event belongs to the current step.
        """
        if not stream:
            self.latest = start + duration
        if self.count == self.capacity and not self.grow():
            self.dropped += 1
            return
        phase, microbatch, stage, chunk, layer = context
        # fmt: off
        ROW.pack_into(
            self.table, self.count * ROW.size,
            start, start, duration, start if posted is None else posted, name, category, phase, op,
            self.rank, self.step if step is None else step, microbatch, stage, chunk, layer,
            stream, group, seq, peer, received, count, dtype, flops, -1, 0,
        )
        # fmt: on
        self.count += 1

    def grow(self) -> bool:
        """Double the table size, to at most `most` rows; return False if it cannot grow."""
        more = min(self.capacity, self.most - self.capacity)
        if more > 0:
            self.table.extend(bytes(more * ROW.size))
            self.capacity += more
        return more > 0

    def wrap(self, comm: Communicator, axis: str) -> Traced:
        """Return a communicator that records the calls of `comm` as communication along `axis`."""
        self.header["groups"].append({"axis": axis, "members": comm.members})
        return Traced(comm, self, len(self.header["groups"]) - 1)

    def synchronize(self) -> None:
        """Synchronize the hosts' clocks; all ranks must call this method between two steps."""
        if self.clocks:
            self.samples += self.clocks.synchronize()

    def begin_step(self, number: int) -> None:
        self.step, self.blocked = number, 0
        self.started = self.latest = self.clock()

    def end_step(
        self,
        pool: Pool,
        tokens: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        forward_s: float,
        backward_s: float,
        skipped: bool = False,
    ) -> None:
        """End a step: record its results, its memory use by kind and its expert loads.

        A segment is written if one is due.
        """
        now = self.clock()
        # fmt: off
        self.steps.append((
            self.rank, self.step, self.started, now, tokens, loss, grad_norm, learning_rate,
            forward_s, backward_s, skipped,
        ))
        # fmt: on
        live = {**pool.live, "all": pool.held}
        for number, kind in enumerate(MEMORY_KIND):
            row = (self.rank, self.step, number, live.get(kind, 0), pool.peak[kind])
            self.memory.append(row)
        experts, routers = self.router_sums.take(self.rank, self.step)
        self.experts += experts
        self.routers += routers
        self.step = -1
        self._flush_if_due(now)

    def end_evaluation(
        self,
        step: int,
        loss: float,
        tokens: int,
        accuracy: float,
        seconds: float,
        texts: Sequence[tuple[float, ...]] = (),
    ) -> None:
        """End an evaluation after `step`: record its results on rank 0.

        If there are several texts, `texts` contains the loss, tokens and accuracy of each text. A
        segment is written if one is due.
        """
        if self.rank == 0:
            self.evaluations.append((step, loss, tokens, accuracy, seconds))
            self.validation += [(step, number, *each) for number, each in enumerate(texts)]
        self._flush_if_due(self.clock())

    def _flush_if_due(self, now: int) -> None:
        if 2 * self.count > self.capacity or now - self.flushed > self.every_s * _NANOSECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the recorded events to a segment file, and start the next segment."""
        path = segment_path(self.run_dir, self.rank, self.segments)
        header = {**self.header, "dropped": self.dropped}
        recorded = {
            "events": np.frombuffer(self.table, record_type(EVENTS), self.count),
            "steps": self.steps,
            "memory": self.memory,
            "samples": self.samples,
            "evaluation": self.evaluations,
            "experts": self.experts,
            "routers": self.routers,
            "validation": self.validation,
        }
        tables = [np.asarray(recorded[name], record_type(TABLES[name])) for name in TABLES]
        write_segment(path, header, list(self.strings), *tables)
        self.steps, self.memory, self.samples, self.count = [], [], [], 0
        self.evaluations, self.validation, self.experts, self.routers = [], [], [], []
        self.segments, self.flushed = self.segments + 1, self.clock()


class Span:
    """Context manager that records one compute, optimizer or input event."""

    __slots__ = ("flops", "name", "op", "recorder", "start")

    def __init__(self, recorder: Recorder, name: int, op: int, flops: float) -> None:
        self.recorder, self.name, self.op, self.flops = recorder, name, op, flops

    def __enter__(self) -> Self:
        self.start = self.recorder.clock()
        return self

    def __exit__(self, *exception: object) -> Literal[False]:
        recorder = self.recorder
        category = OPTIMIZER if recorder.phase == "optimizer" else COMPUTE if self.op else _IO
        duration = recorder.clock() - self.start
        context, flops = recorder.context, self.flops
        recorder.put(self.start, duration, self.name, category, self.op, context, flops=flops)
        return False


class CopySpan:
    """Context manager that records a transfer of offloaded data, or a wait for a transfer."""

    __slots__ = ("category", "name", "nbytes", "recorder", "start")

    def __init__(self, recorder: Recorder, name: int, category: int, nbytes: int) -> None:
        self.recorder, self.name, self.category = recorder, name, category
        self.nbytes = nbytes

    def __enter__(self) -> None:
        self.start = self.recorder.clock()

    def __exit__(self, *exception: object) -> None:
        recorder = self.recorder
        duration, context = recorder.clock() - self.start, recorder.context
        what = self.name, self.category, 0, context
        recorder.put(self.start, duration, *what, received=self.nbytes)
