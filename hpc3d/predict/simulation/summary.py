"""Summary of a simulated step: time, bubble, memory and communication.

With local updates, `step_time_s` and the values derived from it are means over the steps with and
without an agreement. `agreement` contains the interval `every` in steps, and the step time and the
communication of a step with an agreement. A step with a stale agreement contains all of its work,
and the part of its communication that does not overlap with the other steps. All other values
belong to a step without an agreement, unless the workers agree after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.mfu import model_flops
from hpc3d.comm.mesh import WORLD, groups_of
from hpc3d.predict.error_intervals import interval
from hpc3d.predict.simulation.count import COMM, moved_by
from hpc3d.predict.simulation.simulator import (
    agreement_of,
    agreement_seconds,
    step_length,
    vocabulary_of,
)
from hpc3d.predict.simulation.step_sections import sections, time_of
from hpc3d.trace.schema import (
    CATEGORY,
    DTYPE,
    MEMORY_KIND,
    MESSAGE_CODES,
    OP,
    item_sizes,
)

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config, ParallelConfig
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.simulator import StageRun

_COPY = CATEGORY.index("copy")
_ITEM_SIZES = item_sizes(dict(enumerate(DTYPE)))


def summary(runs: Sequence[StageRun], config: Config, machine: Machine) -> dict[str, Any]:
    """Summarize a simulated step in a dict for `--json`, in units of seconds, bytes and FLOPs.

    `memory` contains the peak memory of a rank by kind, for each stage and for the `worst` stage.
    Activations in flight are counted under the kind "activation"; gathered blocks and buffers,
    under "communication". The peaks include `tables`, the size of the token tables, and `logits`,
    the size of the logits of a microbatch. `total` is the sum of the peaks of all ranks. `bytes`
    contains the bytes that a rank of stage 0 receives, by axis and operation (see `moved`). `mfu`
    is the ratio of the model FLOPs, including the masked half of attention, to the peak of the
    machine. `hfu` is the same ratio for the executed FLOPs; chunked attention skips most of the
    masked half. `communication` is the exposed communication of the busiest stage as a fraction of
    the step. `sections` divides the step of each stage by part of the model and phase
    (step_sections.py), and `time` that of the busiest `stage`. If the machine file lists errors
    for this kind of layout, `interval` is the interval of the step time
    (`predict.error_intervals`).
    """
    extra = agreement_seconds(runs, config.parallel.local_steps)
    ranks, seconds = config.grid().size, step_length(runs) / 1e9 + extra
    divided = _divided(runs)
    flops = sum(each.ranks * each.sum_of("flop") for run in runs for each in run.classes)
    model = config.model
    needed = model_flops(model, config.train.batch, vocabulary_of(model))
    peak = ranks * machine.gemm[config.train.dtype].peak * seconds
    tokens = config.train.batch * model.sequence
    around = interval(config, machine, seconds)
    return {
        "machine": machine.name,
        "ranks": ranks,
        "step_time_s": seconds,
        "tokens_per_s": tokens / seconds,
        "bubble": bubble(runs),
        "communication": (divided["time"]["communication_s"] + extra) / seconds,
        "flop": float(flops),
        "mfu": float(needed / peak),
        "hfu": float(flops / peak),
        "memory": memory(runs, machine),
        "bytes": moved(runs[0]),
        **divided,
        **_agreement(runs, config.parallel),
    } | ({"interval": around} if around else {})


def _agreement(runs: Sequence[StageRun], parallel: ParallelConfig) -> dict[str, Any]:
    if not parallel.local_steps:
        return {}
    agreeing = agreement_of(runs)
    about = {"every": parallel.local_steps, "sync": parallel.sync}
    about |= {"step_s": step_length(agreeing) / 1e9, "bytes": moved(agreeing[0])}
    return {"agreement": about}


def _divided(runs: Sequence[StageRun]) -> dict[str, Any]:
    busiest = busiest_stage(runs)
    parts = [sections(run, step_length(runs)) for run in runs]
    return {"time": {"stage": busiest, **time_of(parts[busiest])}, "sections": parts}


def busiest_stage(runs: Sequence[StageRun]) -> int:
    """Return the stage that waits least for messages from other stages."""
    return min(range(len(runs)), key=lambda stage: waits_of(runs[stage])["p"])


def bubble(runs: Sequence[StageRun]) -> float:
    """Return the bubble rate (cost - work) / cost.

    `cost` is the time from the start of the first to the end of the last pass, and `work` is this
    time excluding waits for messages; both are maxima over stages (arXiv:2401.10241, section 5.3).
    Communication within a stage counts as work.
    """
    spans, works = zip(*map(_span_and_work, runs))
    return 1 - max(works) / max(spans)


def _span_and_work(run: StageRun) -> tuple[int, int]:
    """Return the time from the first to the last pass in ns, with and without message waits.

    Both times begin with the start of the first pass and end with the end of the last pass. They
    are 0 for a stage without layers, which only forwards messages.
    """
    begins, ends, messages = [], [], []
    for rows, shifts in run.events.kinds:
        chosen = (rows["microbatch"] >= 0) & (rows["category"] != _COPY)
        start, length, op = (rows[name][chosen] for name in ("t_start", "dur", "op"))
        message = np.isin(op, MESSAGE_CODES)
        if not message.all():
            begins.append(start[~message].min() + shifts.min())
            ends.append((start + length)[~message].max() + shifts.max())
        messages.append((start[message] + shifts[:, None], length[message]))
    begin, end = min(begins, default=0), max(ends, default=0)
    waits = sum((((start >= begin) & (start < end)) * length).sum() for start, length in messages)
    return int(end - begin), int(end - begin - waits)


def exposed(run: StageRun) -> float:
    """Return the fraction of a step that a rank spends in communication calls."""
    return waits_of(run).total() / (step_length([run]) / 1e9)


def waits_of(run: StageRun) -> Counter:
    """Return a dict that maps each axis to a stage's communication time in seconds."""
    spent, waits = Counter[int](), Counter[str]()
    for rows, shifts in run.events.kinds:
        calls = rows["category"] == COMM
        groups, lengths = rows["group"][calls], rows["dur"][calls]
        for group in np.unique(groups).tolist():
            spent[group] += len(shifts) * int(lengths[groups == group].sum())
    for group in sorted(spent):
        waits[run.axes[group]] += spent[group] / 1e9
    return waits


def waits_within(waits: Mapping[str, float], stages: int) -> Counter:
    """Return the entries of `waits` for communication within one of the pipeline `stages`.

    With several stages, a call of all ranks ends when the last stage enters it, so that its time
    is mostly idle time.
    """
    across = ("p", WORLD) if stages > 1 else ("p",)
    return Counter({axis: time for axis, time in waits.items() if axis not in across})


def memory(runs: Sequence[StageRun], machine: Machine) -> dict[str, Any]:
    peaks = [
        {kind: run.peak.get(kind, 0) for kind in MEMORY_KIND}
        | {"tables": run.tables, "logits": run.logits}
        for run in runs
    ]
    worst = max(range(len(peaks)), key=lambda stage: peaks[stage]["all"])
    return {
        "stages": peaks,
        "worst": {"stage": worst, **peaks[worst]},
        "total": sum(each.ranks * each.peak["all"] for run in runs for each in run.classes),
        "fits": peaks[worst]["all"] <= machine.memory_gb * 1e9,
    }


def moved(run: StageRun) -> dict[str, dict[str, dict[str, int]]]:
    """Return the communication of a rank per step, by axis and operation.

    The result has the form {axis: {operation: {"calls": ..., "bytes": ...}}}. If blocks have owner
    ranks, ranks receive different numbers of bytes; the result is that of the simulated rank with
    the largest sum.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (axis, op), (calls, received) in sorted(_calls_and_bytes(run.top_receiver).items()):
        found.setdefault(axis, {})[op] = {"calls": calls, "bytes": received}
    return found


def _calls_and_bytes(run: StageRun) -> dict[tuple[str, str], tuple[int, int]]:
    """Return a dict that maps (axis, operation) to (number of calls, received bytes)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for rows, shifts in run.events.kinds:
        for key, counts in moved_by(rows, run.axes).items():
            calls, received = found.get(key, (0, 0))
            times = len(shifts)
            found[key] = calls + times * counts[0], received + times * counts[1]
    return found


def total_received(moved: Mapping[str, Mapping[str, Mapping[str, int]]], *axes: str) -> int:
    """Sum the received bytes in a result of `moved`, over all axes if none are given."""
    return sum(op["bytes"] for axis in axes or moved for op in moved.get(axis, {}).values())


def mean_received(run: StageRun, every: int) -> float:
    """Return the mean number of bytes that a rank of a stage receives per step.

    With local updates, the workers agree every `every` steps.
    """
    local = total_received(moved(run))
    if not run.agreement:
        return local
    return local + (total_received(moved(run.agreement)) - local) / every


def received_per_rank(runs: Sequence[StageRun], config: Config) -> float:
    """Return the bytes that a rank receives per step, averaged over all ranks and steps."""
    local = _received_per_rank(runs, config)
    if not runs[0].agreement:
        return local
    agreeing = _received_per_rank(agreement_of(runs), config)
    return local + (agreeing - local) / config.parallel.local_steps


def _received_per_rank(runs: Sequence[StageRun], config: Config) -> float:
    """Return the bytes that a rank receives in a step, averaged over all ranks.

    In a broadcast or a reduction to a root, one member of the group receives no data. The
    simulated rank of a class can be this member, so its own bytes are not the mean.
    """
    grid, received = config.grid(), 0.0
    sizes = {WORLD: grid.size} | {name: len(each) for name, each in groups_of(grid, {}).items()}
    for run in chain(*(each.classes for each in runs)):
        members = np.array([sizes.get(axis, 1) for axis in run.axes])
        owned = np.isin(run.axes, config.splits["dense"].own.split())
        for rows, shifts in run.events.kinds:
            calls = rows[(rows["category"] == COMM) & (rows["op"] != OP.index("send"))]
            block, size = calls["count"] * _ITEM_SIZES[calls["dtype"]], members[calls["group"]]
            broadcast = (calls["op"] == OP.index("broadcast")) & ~owned[calls["group"]]
            rooted = broadcast | (calls["op"] == OP.index("reduce"))
            found = np.where(rooted, block * (size - 1) / size, calls["bytes"])
            received += run.ranks * len(shifts) * float(found.sum())
    return received / grid.size
