"""All that a report says of a run, from its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.breakdown import (
    breakdown,
    copy_rows,
    imbalance_rows,
    memory_rows,
    rank_rows,
)
from hpc3d.analyze.metrics.bubble import bubble_rows
from hpc3d.analyze.metrics.collectives import bandwidth_rows, communication_matrix
from hpc3d.analyze.metrics.compare import (
    difference_rows,
    gain_rows,
    received_rows,
    run_row,
    scaling_rows,
)
from hpc3d.analyze.metrics.critical_path import critical_path, path_rows
from hpc3d.analyze.metrics.crossing import crossing_pair_rows, crossing_rows
from hpc3d.analyze.metrics.expert_loads import (
    ExpertLoads,
    cost_row,
    exchange_rows,
    expert_rows,
    loads_of,
    router_rows,
)
from hpc3d.analyze.metrics.loads import differing, notes
from hpc3d.analyze.metrics.mfu import efficiency_row
from hpc3d.analyze.metrics.parallel_layout import layout_of
from hpc3d.analyze.metrics.pipeline_step import (
    StepPasses,
    configuration,
    pipeline_of_step,
    runs_on,
)
from hpc3d.analyze.metrics.prediction import prediction_rows
from hpc3d.analyze.metrics.run_summary import about
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import (
    between_rows,
    comparison_rows,
    equal_curves,
    evaluation_rows,
    loss_rows,
    median_step,
    peak_rows,
    step_row,
    time_rows,
)
from hpc3d.analyze.metrics.stragglers import straggler_rows
from hpc3d.analyze.metrics.wait_states import calls_of, incomplete, wait_rows
from hpc3d.analyze.report.step_timeline import EVENTS, Timeline, other_steps, timeline
from hpc3d.plain import plain_in, plain_lines
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace

_NO_COMMON_TIME = (
    "the time on the wall, for each rank counted its own CPU time: tokens/s, FLOP/s and MFU,"
    " how runs scale and differ, waits, stragglers, the critical path, the rates of collectives,"
    " the timeline and the stages of a pipeline"
)
_DROPPED = "events of {ranks}: trust only the step, loss and memory tables, the others lack them"


@dataclass(frozen=True)
class RunAnalysis:
    """A run: what it was, its configuration (TOML), what its trace lacks and where it contradicts
    itself (a line each), and its tables by the names of run_tables.py.  All text of the
    trace is plain.

    Drawn are the timeline and the panels of the pipeline in `step`, and the bytes of a step from
    rank to rank, matrices by mesh axis, "" for all of them; and where there are experts their
    loads.  `others` are the timelines of other steps, if they were asked for.
    """

    label: str
    run_id: str
    about: dict
    config: str
    missing: list
    violations: list
    tables: dict
    step: int
    timeline: Timeline
    panels: list
    matrices: dict
    loads: ExpertLoads | None
    others: list = field(default_factory=list)


class Report(NamedTuple):
    """Runs, the tables that are over all of them, what one must know to compare them, a line each,
    that in which they differ, {group: {key: who has which value}}, and a line for each run whose
    losses are those of the first one."""

    runs: list
    tables: dict
    notes: list
    differing: dict
    curves: list


def compare(traces: Sequence[Trace], runs: Sequence[RunAnalysis]) -> Report:
    """The Report of open traces and their Runs; several are compared with the first one, but not
    their times if any are CPU times."""
    runs = _distinct(runs)
    timed = all(map(one_time, traces))
    tables = {"runs": comparison_rows(runs), "received": [], "scaling": [], "gains": []}
    tables["differences"] = []
    if len(runs) > 1:
        tables["received"] = received_rows([run.tables["time"] for run in runs], timed)
    if len(runs) > 1 and timed:
        steady = [*map(Steady, traces)]
        rows = [run_row(trace) | {"run": run.label} for trace, run in zip(steady, runs)]
        tables["scaling"], tables["gains"] = scaling_rows(rows), gain_rows(rows)
        tables["differences"] = [
            {"run": run.label} | row
            for trace, run in zip(steady[1:], runs[1:])
            for row in difference_rows(steady[0], trace)
        ]
    labels = [run.label for run in runs]
    differ = differing(traces, labels, [run.about for run in runs])
    found = tables, notes(traces, labels), differ, equal_curves(tables["runs"])
    return Report(runs, *plain_in(found))


def analyze_run(
    trace: Trace,
    peak: float | None = None,
    step: int | None = None,
    events: int = EVENTS,
    others: int = 0,
) -> RunAnalysis:
    """The RunAnalysis of an open trace.

    `peak` is the FLOP/s of one rank that MFU refers to, `step` the one whose timeline is drawn,
    of at most `events` events (None: that of the median time); the other steps have `others` of
    them together (0: they are not drawn).  ValueError if none was completed.
    """
    if not len(trace.steps):
        raise ValueError(f"{trace.path}: no step was completed; train for more steps")
    wrong = violations(trace)  # before calls_of, for each takes half of the memory
    steady = Steady(trace)
    step, calls = median_step(steady) if step is None else step, calls_of(steady)
    matrices, loads = _matrices(trace, calls), loads_of(trace)
    stages, panels = pipeline_of_step(trace, step)
    tables = {
        **_of_all_steps(trace),
        **_of_mean_step(steady, calls, peak, matrices, loads),
        "pipeline": stages,
        "bubble": _bubble(trace, step) if stages else [],
    }
    attrs, drawn, more = trace.attrs, None, []
    missing = [line for line in attrs["missing"].split("\n") if line]
    if one_time(trace):
        path = critical_path(trace, calls, step)
        tables |= _of_calls(calls, path)
        drawn = timeline(trace, calls, step, path, events, peak)
        more = other_steps(trace, calls, step, peak, others) if others else []
        missing += _doubts(calls, tables)
    else:
        missing.append(_NO_COMMON_TIME)
    missing += _dropped(trace)
    what = layout_of(trace).label, attrs["run_id"], about(steady)
    found = missing, wrong, tables
    drawn_of = step, drawn, panels, plain_in(matrices), loads, more
    return RunAnalysis(*plain_in(what), plain_lines(attrs["config"]), *plain_in(found), *drawn_of)


def _distinct(runs: Sequence[RunAnalysis]) -> list[RunAnalysis]:
    """The runs with their ids in those labels that several of them have, and with their places
    where this is one run twice."""
    labels = [run.label for run in runs]
    named = [
        f"{run.label}, {run.run_id}" if labels.count(run.label) > 1 else run.label for run in runs
    ]
    return [
        replace(run, label=f"{name}, {place}" if named.count(name) > 1 else name)
        for place, (run, name) in enumerate(zip(runs, named), 1)
    ]


def _dropped(trace):
    """A line for ranks whose events were not all kept."""
    if (dropped := np.flatnonzero(trace.ranks["dropped"])).size:
        yield _DROPPED.format(ranks=_ranks(dropped))


def _ranks(numbers):
    """Ranks as text, the first of many."""
    shown = ", ".join(map(str, numbers[:8].tolist()))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s'[: len(numbers) > 1]} {shown}{more}"


def _of_mean_step(steady, calls, peak, matrices, loads):
    """The tables of averages, and those of one time without rows."""
    return {
        **_of_time(steady, calls, peak),
        **_of_traffic(calls, matrices),
        **_of_experts(steady, loads, calls),
        **{name: [] for name in ("path", "waits", "stragglers", "collectives")},
    }


def _of_time(trace, calls, peak):
    time = time_rows(trace)
    return {
        "step": [step_row(trace, time)],
        "efficiency": [efficiency_row(trace, peak)],
        "prediction": prediction_rows(trace),
        "time": time,
        "layers": breakdown(trace, ("layer", "phase", "category")),
        "ranks": rank_rows(trace, calls),
        "imbalance": imbalance_rows(trace),
        "copies": copy_rows(trace),
    }


def _of_all_steps(trace):
    """The tables that are no averages."""
    return {
        "loss": loss_rows(trace),
        "evaluation": evaluation_rows(trace),
        "between": between_rows(trace),
        "memory": peak_rows(trace),
        "memory_ranks": memory_rows(trace),
    }


def _of_traffic(calls, matrices):
    """The tables of who receives what, which need no times."""
    return {
        "traffic": _pairs(matrices),
        "crossing": crossing_rows(calls),
        "crossing_pairs": crossing_pair_rows(calls),
    }


def _of_experts(steady, loads, calls):
    """The tables of mixtures of experts."""
    if loads is None:
        return {name: [] for name in ("expert_cost", "experts", "routers", "exchanges")}
    timed, averaged = one_time(steady), loads.of(steady.steps["step"])
    return {
        "expert_cost": [cost_row(steady, averaged, calls if timed else None)],
        "experts": expert_rows(averaged),
        "routers": router_rows(loads),
        "exchanges": exchange_rows(calls, timed),
    }


def _of_calls(calls, path):
    """The tables that compare the times of several ranks."""
    return {
        "waits": wait_rows(calls),
        "stragglers": straggler_rows(calls) if len(calls.row) else [],
        "path": path_rows(path, ("category", "phase", "axis", "op")),
        "collectives": bandwidth_rows(calls),
    }


def _matrices(trace, calls):
    """{axis: bytes [sender, receiver]} of the axes on which anything moved, "" for all."""
    axes = ["", *sorted({group.axis for group in trace.groups})]
    found = {axis: communication_matrix(calls, axis or None) for axis in axes}
    return {axis: matrix for axis, matrix in found.items() if matrix.any()}


def _pairs(matrices):
    """The matrices of the axes as rows."""
    keys = ("axis", "sender", "receiver", "bytes")
    return [
        dict(zip(keys, (axis, *pair, amount)))
        for axis, matrix in matrices.items()
        if axis
        for pair, amount in zip(np.argwhere(matrix).tolist(), matrix[matrix.nonzero()].tolist())
    ]


def _bubble(trace, step):
    """The parts of the stages' idle time; an asynchronous schedule has none."""
    if runs_on(configuration(trace)):
        return []
    return bubble_rows(StepPasses(trace).measured(step))


def _doubts(calls, tables):
    """What the waits may be wrong in."""
    cut, early = incomplete(calls), sum(row["violations"] for row in tables["waits"])
    worst = max((row["worst_s"] for row in tables["waits"]), default=0)
    if cut:
        yield f"{cut} collectives and messages: the call of a member, so their waits may be longer"
    if early:
        yield (
            f"clocks that agree: {early} calls ended before an arrival that they needed, by up to"
            f" {worst * 1e6:.0f} us"
        )
