"""Analysis of runs from their traces. The results contain all data that a report shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hpc3d.analyze.attempts import Attempts
from hpc3d.analyze.metrics import breakdown, expert_loads
from hpc3d.analyze.metrics.collectives import bandwidth_rows, communication_matrix
from hpc3d.analyze.metrics.columns import hosts, require_steps
from hpc3d.analyze.metrics.compare import (
    difference_rows,
    pass_seconds,
    received_rows,
    run_row,
)
from hpc3d.analyze.metrics.critical_path import critical_path, path_rows
from hpc3d.analyze.metrics.crossing import host_pair_rows, host_traffic_rows
from hpc3d.analyze.metrics.loads import (
    data_of,
    differing,
    load_of,
    notes,
    shared_warnings,
    training_of,
)
from hpc3d.analyze.metrics.mfu import efficiency_row
from hpc3d.analyze.metrics.parallel_layout import layout_of
from hpc3d.analyze.metrics.pipeline_step import configuration, pipeline_of_step
from hpc3d.analyze.metrics.prediction import prediction_rows
from hpc3d.analyze.metrics.run_summary import about, other_cpu_share
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import (
    between_rows,
    comparison_rows,
    median_step,
    peak_rows,
    slowest_seconds,
    step_row,
    time_rows,
)
from hpc3d.analyze.metrics.stragglers import straggler_rows
from hpc3d.analyze.metrics.wait_states import calls_of, incomplete, wait_rows
from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.analyze.report.step_timeline import Timeline, other_steps, timeline
from hpc3d.analyze.run_comparison import (
    SeedGroup,
    comparison_verdict,
    distinct_labels,
    early_ends,
    gain_rows,
    loss_references,
    repeated_seeds,
    scaling_table,
    seed_groups,
    seed_rows,
    speed_rows,
    with_references,
)
from hpc3d.config.resolve import violated
from hpc3d.console.sanitize import counted, sanitized, sanitized_lines, sanitized_tree
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.reader import Trace
from hpc3d.trace.trace_config import one_time

_NO_COMMON_TIME = (
    "wall-clock times: each rank measured its own CPU time (trace.clock), so tokens/s, FLOP/s,"
    " MFU, scaling, differences between runs, waits, stragglers, the critical path, the rates of"
    " collectives, the timeline and the pipeline stages are not available"
)


@dataclass(frozen=True)
class RunAnalysis:
    """Analysis of one run. All text from the trace is sanitized.

    Attributes
    ----------
    about
        Header of the report, as a dict from title to text.
    config
        Configuration in TOML format.
    missing, violations
        Descriptions of missing data and of inconsistent data in the trace, one per line.
    tables
        Dict from table name (run_tables.py) to the rows of the table.
    step
        Training step shown in the timeline and the pipeline chart.
    matrices
        Dict from mesh axis to the bytes sent per step, shape [sender, receiver]. The key "" holds
        the sum over all axes.
    loads
        Expert loads, or None if the model has no experts.
    others
        Timelines of other steps, if requested.
    layout
        Layers and blocks of each rank, or None if the configuration is unknown or trains a PyTorch
        module.
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
    loads: expert_loads.ExpertLoads | None
    others: list = field(default_factory=list)
    layout: RankBlocks | None = None

    def problems(self) -> Iterator[str]:
        """Yield at most one line each on missing data, inconsistent data, and an invalid loss."""
        lines = {"missing in the trace": self.missing, "inconsistent trace": self.violations}
        for title, found in lines.items():
            if found:
                others = counted(len(found) - 1, "more message")
                more = f" ({others}: see the report)" if len(found) > 1 else ""
                yield f"{title}: {found[0]}{more}"
        *earlier, last = self.tables["loss"]
        if last["loss"] is None and any(row["loss"] is not None for row in earlier):
            yield f"the loss after step {last['step']} is not finite"


class Report(NamedTuple):
    """Analyses of several runs and their comparison.

    Attributes
    ----------
    tables
        Tables that compare the runs.
    notes
        Warnings about the comparability of the runs, one line per warning.
    differing
        Differences between the runs: differing[group][key] lists the values and their runs.
    verdict
        One line of text per run, or per group of runs that differ only in the seed: its step time
        and losses, compared with the first run or with a run of the same model size.
    groups
        Groups of runs that differ only in the seed, with sanitized labels.
    """

    runs: list
    tables: dict
    notes: list
    differing: dict
    verdict: list
    groups: list[SeedGroup]


def compare(traces: Sequence[Trace], runs: Sequence[RunAnalysis]) -> Report:
    """Return a report that compares all runs with the first run.

    `traces` are the open traces of `runs`. Times are not compared if any trace contains CPU times.
    """
    names = [run.label for run in runs]
    labels = sanitized_tree(distinct_labels(traces, names, [run.run_id for run in runs]))
    runs = [replace(run, label=label) for run, label in zip(runs, labels)]
    timed, steady = all(map(one_time, traces)), [*map(Steady, traces)]
    rows = [run_row(trace) | {"run": label} for trace, label in zip(steady, labels)]
    groups, speeds = seed_groups(traces, labels, names), []
    data, training = ([*map(each, traces)] for each in (data_of, training_of))
    groups = with_references(groups, rows, data, training)
    tables = {"runs": comparison_rows(runs, loss_references(groups))}
    tables |= {name: [] for name in ("received", "scaling", "gains", "differences", "seeds")}
    if len(runs) > 1:
        tables["received"] = received_rows([run.tables["time"] for run in runs], timed)
        tables["seeds"] = seed_rows(tables["runs"], groups)
    if len(runs) > 1 and timed:
        seconds = [*map(slowest_seconds, steady)]
        times = {"step_s": seconds, "average_step_s": [*map(pass_seconds, steady)]}
        busy, loads = ([*map(each, traces)] for each in (other_cpu_share, load_of))
        speeds = speed_rows(rows, seconds, groups, busy, loads)
        tables["scaling"] = scaling_table(rows, groups, speeds)
        tables["gains"] = gain_rows(tables["scaling"], groups, times)
        tables["differences"] = [
            {"run": label} | row
            for trace, label in zip(steady[1:], labels[1:])
            for row in difference_rows(steady[0], trace)
        ]
    named = {group.label: group.runs for group in groups}
    differ = differing(traces, named, [run.about for run in runs])
    verdict = [*comparison_verdict(speeds, tables["runs"], groups)]
    limits = [*_of_runs(runs, tables["runs"]), *notes(traces, named)]
    limits += repeated_seeds(groups, labels)
    texts = tables, limits, differ, verdict
    groups = [group._replace(label=sanitized(group.label)) for group in groups]
    return Report(runs, *sanitized_tree(texts), groups)


def _of_runs(runs, rows):
    """Return the warnings about single runs that a comparison repeats, one line per warning."""
    lasts = [max((row["step"] for row in run.tables["loss"]), default=None) for run in runs]
    ends = early_ends(rows, lasts) if len(runs) > 1 else ()
    return shared_warnings({run.label: [*run.problems(), *end] for run, end in zip(runs, ends)})


def analyze_run(
    trace: Trace, peak: float | None = None, step: int | None = None, others: int = 0
) -> RunAnalysis:
    """Analyze an open trace. Raises ValueError if no step was completed.

    `peak` is the peak FLOP/s of one rank, which is required for MFU and HFU. The timeline shows
    step `step`; the default is the step with the median duration. The timelines of the other steps
    have about `others` events in total; 0 omits these timelines.
    """
    require_steps(trace)
    wrong = violations(trace)  # computed before calls_of to reduce peak memory
    steady, attempts = Steady(trace), Attempts(trace)
    step, calls = median_step(steady) if step is None else step, calls_of(steady)
    matrices, loads = _matrices(trace, calls), expert_loads.loads_of(trace)
    stages, bubble, total, panels = pipeline_of_step(trace, step)
    tables = {
        **_of_all_steps(trace, attempts),
        **_of_mean_step(steady, calls, peak, matrices, loads),
        "pipeline": stages,
        "bubble": bubble,
        "pipeline_bubble": total,
    }
    attrs, drawn, more = trace.attrs, None, []
    missing = [line for line in attrs["missing"].split("\n") if line]
    if one_time(trace):
        path = critical_path(trace, calls, step)
        tables |= _of_calls(calls, path)
        drawn = timeline(trace, calls, step, path, peak=peak)
        more = other_steps(trace, calls, step, peak, others) if others else []
        missing += _wait_warnings(calls, tables)
    else:
        missing.append(_NO_COMMON_TIME)
    missing += _dropped(trace)
    header, config = about(steady, len(tables["loss"])), configuration(trace)
    label = (config and config.run.label) or layout_of(trace).label
    head = sanitized_tree((label, attrs["run_id"], header))
    found = sanitized_tree((missing, wrong, tables))
    drawn_of = step, drawn, panels, sanitized_tree(matrices), loads, more, _blocks(trace)
    return RunAnalysis(*head, sanitized_lines(attrs["config"]), *found, *drawn_of)


def _blocks(trace: Trace) -> RankBlocks | None:
    config, named = configuration(trace), hosts(trace)
    if config is None or config.torch.factory or not config.model.vocabulary:
        return None
    if config.grid().size != len(named) or violated(config, len(named)):
        return None
    places = [*dict.fromkeys(named.values())]
    known = [places.index(named[rank]) for rank in sorted(named)] if None not in places else []
    return RankBlocks(config, known)


def _dropped(trace):
    """If any ranks dropped events, yield one line that lists the first eight of these ranks."""
    if dropped := np.flatnonzero(trace.ranks["dropped"]).tolist():
        ranks = f"rank{'s'[: len(dropped) > 1]} {', '.join(map(str, dropped[:8]))}"
        ranks += f" and {len(dropped) - 8} more" if len(dropped) > 8 else ""
        yield f"dropped events of {ranks}, so only the step, loss and memory tables are valid"


def _of_mean_step(steady, calls, peak, matrices, loads):
    """Return the tables that contain averages over steps.

    Tables that require a clock shared by all ranks are returned empty; see `_of_calls`.
    """
    time = time_rows(steady)
    return {
        "step": [step_row(steady, time)],
        "efficiency": [efficiency_row(steady, peak)],
        "prediction": prediction_rows(steady),
        "time": time,
        "layers": breakdown.breakdown(steady, ("layer", "phase", "category")),
        "ranks": breakdown.rank_rows(steady, calls),
        "imbalance": breakdown.imbalance_rows(steady),
        "copies": breakdown.copy_rows(steady),
        "traffic": _pairs(matrices),
        "crossing": host_traffic_rows(calls),
        "crossing_pairs": host_pair_rows(calls),
        **_of_experts(steady, loads, calls),
        **{name: [] for name in ("path", "waits", "stragglers", "collectives")},
    }


def _of_all_steps(trace, attempts):
    evaluations = attempts.evaluations()
    texts = [(row, text) for row in evaluations for text in row.pop("texts")]
    return {
        "attempts": attempts.table(),
        "loss": attempts.losses(),
        "evaluation": evaluations,
        "validation": [text | {"attempt": row["attempt"]} for row, text in texts],
        "between": between_rows(trace),
        "memory": peak_rows(trace),
        "memory_ranks": breakdown.memory_rows(trace),
    }


def _of_experts(steady, loads, calls):
    if loads is None:
        return {name: [] for name in ("expert_cost", "experts", "routers", "exchanges")}
    timed, averaged = one_time(steady), loads.of(steady.steps["step"])
    return {
        "expert_cost": [expert_loads.cost_row(steady, averaged, calls if timed else None)],
        "experts": expert_loads.expert_rows(averaged),
        "routers": expert_loads.router_rows(loads),
        "exchanges": expert_loads.exchange_rows(calls, timed),
    }


def _of_calls(calls, path):
    """Return the tables that compare times across ranks and therefore require a common clock."""
    simulated = calls.trace.attrs.get("kind") == "simulated"  # equally fast ranks
    return {
        "waits": wait_rows(calls),
        "stragglers": straggler_rows(calls) if len(calls.row) and not simulated else [],
        "path": path_rows(path, ("category", "phase", "axis", "op")),
        "collectives": bandwidth_rows(calls),
    }


def _matrices(trace, calls):
    """Return a dict from mesh axis to the bytes sent per step, shape [sender, receiver].

    The key "" holds the sum over all axes. Axes without traffic are omitted.
    """
    axes = ["", *sorted({group.axis for group in trace.groups})]
    found = {axis: communication_matrix(calls, axis or None) for axis in axes}
    return {axis: matrix for axis, matrix in found.items() if matrix.any()}


def _pairs(matrices):
    """Return one row per mesh axis and pair of ranks, with the bytes sent per step."""
    keys = ("axis", "sender", "receiver", "bytes")
    return [
        dict(zip(keys, (axis, *pair, amount)))
        for axis, matrix in matrices.items()
        if axis
        for pair, amount in zip(np.argwhere(matrix).tolist(), matrix[matrix.nonzero()].tolist())
    ]


def _wait_warnings(calls, tables):
    partial, early = incomplete(calls), sum(row["violations"] for row in tables["waits"])
    worst = max((row["worst_s"] for row in tables["waits"]), default=0)
    if partial:
        yield (
            f"calls of some ranks in {partial} collectives and messages; waits in these may have"
            " been longer than reported"
        )
    if early:
        yield (
            f"synchronized clocks: {counted(early, 'call')} ended up to {worst * 1e6:.0f} us "
            "before a required member arrived"
        )
