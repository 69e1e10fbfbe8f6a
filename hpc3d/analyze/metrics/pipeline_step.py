"""Comparison of the measured pipeline passes of a training step with the ideal schedule.

As in hpc3d.pipeline.timeline, the row of a stage is a list of passes (start, end, instruction).
Times are in seconds since the start of the first pass on any stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.bubble import BACKWARD, bubble_rows, pipeline_bubble
from hpc3d.analyze.metrics.columns import overlapped, with_label
from hpc3d.analyze.metrics.pass_spans import PassSpan, spans
from hpc3d.config.input_file import Config
from hpc3d.config.load import stored
from hpc3d.pipeline.engine import PHASE
from hpc3d.pipeline.instruction import COMPUTE, Instruction, is_pair
from hpc3d.pipeline.schedule import SCHEDULES, instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, Row, bubble, timeline
from hpc3d.trace.reader import Trace
from hpc3d.trace.schema import MESSAGES
from hpc3d.trace.trace_config import one_time

_Row = dict[str, Any]
_PASS_KEYS = ("stage", "step", "microbatch", "chunk")
_PASS = np.dtype([(name, "i8") for name in ("op", *_PASS_KEYS, "start", "end")])
_TIMES = {"F": "forward_s", "BW": "backward_s", "B": "input_s", "W": "weight_s"}


def pipeline_of_step(
    trace: Trace, step: int
) -> tuple[list[_Row], list[_Row], list[_Row], list[tuple[str, list[list[PassSpan]]]]]:
    """Return three tables of a step and its Gantt chart panels.

    The first table describes the passes of each stage, the second table its idle time, and the
    third table has one row with the pipeline bubble (bubble.py). The last two are empty for an
    asynchronous schedule and for a single stage, which has no bubble. One panel shows the measured
    passes and the other the simulated passes. All results are empty if the run has a single stage
    and a single microbatch, or if the trace contains CPU times, which have no common clock.
    """
    config = configuration(trace)
    if not config or config.mesh.p * config.parallel.microbatches == 1:
        return [], [], [], []
    passes = StepPasses(trace)
    rows = passes.measured(step)
    if not one_time(trace) or not any(rows):
        return [], [], [], []
    overlapping = _is_asynchronous(config)
    shown = _between(passes.rows(), _pairs(rows)) if overlapping else rows
    ideal = simulated(config, step, rows)
    table = _stage_rows(passes, step, idle_shares(shown), ideal)
    if overlapping or config.mesh.p == 1:
        return table, [], [], _panels(config, step, shown, ideal)
    total = {
        "step": step,
        "bubble": pipeline_bubble(trace, step),
        "bubble_ideal": bubble(ideal.rows) if ideal else None,
        "idle_share": fmean(idle_shares(rows).values()),
    }
    return table, bubble_rows(rows), [total], _panels(config, step, shown, ideal)


def configuration(trace: Trace) -> Config | None:
    """Return the configuration of a run, or None if the trace has no valid configuration."""
    return valid_config(trace.attrs["config"])


def valid_config(text: str) -> Config | None:
    """Parse the stored configuration of a run. Returns None if `text` is empty or invalid."""
    if not text.strip():
        return None
    try:
        config = stored(text)
        _ = config.splits  # raises an error if the loop dimensions are invalid
    except (ValueError, TypeError):
        return None
    return config


def _is_asynchronous(config: Config) -> bool:
    """Return True if the schedule is asynchronous, i.e. passes of different steps overlap."""
    schedule = SCHEDULES.get(config.parallel.schedule)
    return bool(schedule and schedule.asynchronous)


def _between(rows: Sequence[Row], chosen: Collection[tuple[int, Instruction]]) -> list[Row]:
    """Return the passes within the time interval spanned by the `chosen` passes.

    Passes are clipped to this interval, and times are relative to the start of the interval.
    `chosen` contains pairs (stage, instruction).
    """
    times = [
        (start, end)
        for stage, row in enumerate(rows)
        for start, end, what in row
        if (stage, what) in chosen
    ]
    first, last = min(start for start, _ in times), max(end for _, end in times)
    return [
        [
            (max(start, first) - first, min(end, last) - first, what)
            for start, end, what in row
            if what.op in COMPUTE and end > first and start < last
        ]
        for row in rows
    ]


def _pairs(rows: Sequence[Row]) -> set[tuple[int, Instruction]]:
    return {(stage, what) for stage, row in enumerate(rows) for *_, what in row}


# Measured passes


class StepPasses:
    """Measured pipeline passes of a run, taken from the lowest-numbered rank of each stage.

    One rank represents its stage, because all ranks of a stage run the same passes almost
    simultaneously. `ranks[stage]` is the number of ranks of a stage. A pass extends from the start
    of its first event to the end of its last event. The time of two alternating passes is divided
    in proportion to these durations. Messages are excluded, because a receive is
    posted long before the pass that waits for the message.
    """

    def __init__(self, trace: Trace) -> None:
        self.ranks, events = _events_of_passes(trace)
        self.table = _merged(events)

    def measured(self, step: int) -> list[Row]:
        """Return the timeline of a training step, one row per stage."""
        return self.rows(self.table["step"] == step)

    def rows(self, chosen: slice | np.ndarray = slice(None)) -> list[Row]:
        """Return the timeline of the `chosen` passes (all by default), with one row per stage."""
        table, rows = self.table[chosen], [[] for _ in range(1 + max(self.ranks, default=-1))]
        zero = table["start"].min(initial=2**62)
        for op, stage, _, mb, chunk, start, end in table.tolist():
            span = (start - zero) * 1e-9, (end - zero) * 1e-9
            rows[stage].append((*span, Instruction(COMPUTE[op], mb, chunk)))
        return [_divided(row) for row in rows]

    def in_flight(self, step: int) -> dict[int, int]:
        """Return the maximum number of forward passes in flight on each stage during a step.

        The forward pass of a microbatch through a model chunk is in flight from its start to the
        end of the corresponding B or BW pass.
        """
        peaks = {}
        for stage, row in enumerate(self.measured(step)):
            earlier = (self.table["stage"] == stage) & (self.table["step"] < step)
            count = Counter(COMPUTE[op] for op in self.table["op"][earlier].tolist())
            before = count["F"] - count["B"] - count["BW"]
            enter = [(start, 1) for start, _, what in row if what.op == "F"]
            leave = [(end, -1) for _, end, what in row if what.op in BACKWARD]
            changes = [change for _, change in sorted(enter + leave)]
            peaks[stage] = max(accumulate(changes, initial=before))
        return peaks


def _divided(row: Row) -> Row:
    """Divide the time of each pair of alternating passes in proportion to their durations."""
    row = [*row]
    for number in range(len(row) - 1):
        (start, end, forward), (begin, last, backward) = row[number : number + 2]
        if begin < end and is_pair((forward, backward)):
            lengths, last = (end - start, last - begin), max(end, last)
            middle = start + (last - start) * lengths[0] / sum(lengths)
            row[number : number + 2] = (start, middle, forward), (middle, last, backward)
    return row


def _events_of_passes(trace):
    """Return a dict that maps each stage to its number of ranks, and an array of events.

    The array has one _PASS record for each event of a pass on the first rank of each stage.
    """
    events = trace.events
    columns = {name: events[name].astype("i8") for name in _PASS_KEYS} | {"op": _ops(events)}
    inside = np.all([values >= 0 for values in columns.values()], axis=0)
    inside = np.flatnonzero(inside & ~overlapped(trace))
    stage_rank = (columns["stage"][inside] << 32) + events["rank"][inside]
    pairs = np.unique(stage_rank)
    stages, first, counts = np.unique(pairs >> 32, return_index=True, return_counts=True)
    inside = inside[np.isin(stage_rank, pairs[first])]
    table = np.empty(len(inside), _PASS)
    for name, values in columns.items():
        table[name] = values[inside]
    table["start"] = events["t_global"][inside]
    table["end"] = table["start"] + events["dur"][inside]
    return dict(zip(stages.tolist(), counts.tolist())), table


def _ops(events):
    """Return the kind of pass to which each event belongs, as an index into COMPUTE (-1: no pass).

    Recomputation belongs to the subsequent backward pass.
    """
    ops = {PHASE[op]: index for index, op in enumerate(COMPUTE)}
    op_of_phase = np.full(256, -1)
    for code, label in events.labels("phase").items():
        op_of_phase[code] = ops.get(label, -1)
    found = op_of_phase[events["phase"]]
    found[with_label(events, "op", MESSAGES)] = -1
    again = np.flatnonzero(with_label(events, "phase", ["recompute"]))
    backward = np.flatnonzero(np.isin(found, [COMPUTE.index(op) for op in BACKWARD]))
    after = np.searchsorted(backward, again)
    found[again] = np.append(found[backward], -1)[after]
    return found


def _merged(events):
    """Merge the events of each pass into one record. The records are sorted by start time."""
    keys = [events[name] for name in ("op", *_PASS_KEYS)]
    code = np.ravel_multi_index(keys, [1 + key.max(initial=0) for key in keys])
    order = np.argsort(code, kind="stable")
    first = np.flatnonzero(np.diff(code[order], prepend=-1))
    passes = events[order][first]
    passes["start"] = np.minimum.reduceat(events["start"][order], first)
    passes["end"] = np.maximum.reduceat(events["end"][order], first)
    return passes[np.argsort(passes["start"], kind="stable")]


# Simulated passes


class Ideal(NamedTuple):
    """Simulated pipeline schedule of a step under ideal conditions.

    Attributes
    ----------
    rows
        Passes of each stage.
    cost
        Times of the forward and backward passes of one microbatch through one stage.
    in_flight
        Maximum number of forward passes in flight on each stage.
    """

    rows: list
    cost: Cost
    in_flight: dict


def simulated(config: Config, step: int, rows: Sequence[Row]) -> Ideal | None:
    """Simulate the schedule of a step with instantaneous messages and identical stages.

    The time of each kind of pass is the measured median per stage and chunk, averaged over all
    stages and chunks. Effects that are not modeled, such as unbalanced stages, appear as
    differences between the measured and the simulated rows. An asynchronous schedule is simulated
    from the first training step on. The result is `None` if the schedule (for example, a CSV file)
    has been removed or changed since the run.
    """
    parallel, stages = config.parallel, config.mesh.p
    # The first stage is p-1 microbatches, and thus fewer than p steps, ahead of the last stage.
    steps = min(config.train.steps, step + 1 + stages) if _is_asynchronous(config) else 1
    try:
        passes, placement = instruction_streams(
            parallel.schedule or "", stages, parallel.microbatches, parallel.chunks, steps
        )
        cost = _mean_cost(rows, parallel.chunks)
        clock = timeline(passes, placement, cost)
    except ValueError:
        return None
    if not _pairs(rows) <= _pairs(clock):
        return None
    peaks = {stage: in_flight(stream).activations for stage, stream in enumerate(passes)}
    return Ideal(_between(clock, _pairs(rows)), cost, peaks)


def _mean_cost(rows, chunks):
    """Return the mean time of each kind of pass per microbatch and stage, summed over chunks.

    In the resulting `Cost`, `backward` is the time of the input-gradient pass (B), or of the full
    backward pass (BW) if the schedule does not split it.
    """
    seconds, medians = defaultdict(list), defaultdict(list)
    for stage, row in enumerate(rows):
        for start, end, (op, _, chunk) in row:
            seconds[op, stage, chunk].append(end - start)
    for (op, _, _), times in seconds.items():
        medians[op].append(median(times))
    mean = {op: chunks * fmean(times) for op, times in medians.items()}
    return Cost(mean.get("F", 0.0), mean.get("B", mean.get("BW", 0.0)), mean.get("W", 0.0))


# Table and figure of a step


def _stage_rows(
    passes: StepPasses, step: int, idle: Mapping[int, float], ideal: Ideal | None
) -> list[dict[str, Any]]:
    """Return the table of a step with one row per stage.

    The columns are the numbers of ranks and passes, the seconds in each kind of pass, the idle
    share, and the maximum number of forward passes in flight. If `ideal` is `None`, the values of
    the simulated columns are `None`.
    """
    rows, peaks = passes.measured(step), passes.in_flight(step)
    idle_ideal = idle_shares(ideal.rows) if ideal else {}
    return [
        {
            "step": step,
            "stage": stage,
            "ranks": ranks,
            "passes": len(rows[stage]),
            **{name: _seconds(rows[stage], op) for op, name in _TIMES.items()},
            "idle_share": idle[stage],
            "idle_share_simulated": idle_ideal.get(stage),
            "in_flight": peaks[stage],
            "in_flight_simulated": ideal.in_flight.get(stage) if ideal else None,
        }
        for stage, ranks in passes.ranks.items()
    ]


def _seconds(row, op):
    """Return the total time in s of the passes of kind `op`, or `None` if there are none."""
    times = [end - start for start, end, what in row if what.op == op]
    return sum(times) if times else None


def idle_shares(rows: Sequence[Row]) -> dict[int, float]:
    """Return the fraction of time that each stage is idle.

    The idle time is divided by the time from the start of the first pass on any stage to the end
    of the last pass on any stage.
    """
    start = min(row[0][0] for row in rows if row)
    end = max(each[1] for row in rows for each in row)
    busy = [sum(end - start for start, end, _ in row) for row in rows]
    return {stage: 1 - time / (end - start or 1) for stage, time in enumerate(busy)}


def _panels(
    config: Config, step: int, rows: Sequence[Row], ideal: Ideal | None
) -> list[tuple[str, list[list[PassSpan]]]]:
    schedule = config.parallel.schedule
    found = [(f"measured: schedule {schedule}, step {step}, {_mean_idle(rows)}", spans(rows))]
    if ideal:
        times = ideal.cost.share(config.parallel.chunks).seconds()
        present = {what.op for row in ideal.rows for *_, what in row}
        text = ", ".join(f"{op} {times[op] * 1e3:.3g} ms" for op in COMPUTE if op in present)
        title = f"simulated: mean pass times on all stages ({text}), instantaneous messages"
        found.append((f"{title}, {_mean_idle(ideal.rows)}", spans(ideal.rows)))
    return found


def _mean_idle(rows):
    return f"idle {fmean(idle_shares(rows).values()):.1%}"
