"""Export a simulated step as a trace file that `hpc3d.report` can read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d import __version__
from hpc3d.comm.communicator import received_bytes
from hpc3d.comm.mesh import CONTEXT, WORLD, groups_of
from hpc3d.config.load import to_toml
from hpc3d.pipeline.schedule import find
from hpc3d.predict.simulation.owner_classes import owner_classes
from hpc3d.trace.merge import merge
from hpc3d.trace.schema import (
    CLOCK_SAMPLES,
    DTYPE,
    MEMORY,
    MEMORY_KIND,
    MESSAGE_CODES,
    OP,
    STEPS,
    item_sizes,
    record_type,
)
from hpc3d.trace.segment import segment_path, write_segment

if TYPE_CHECKING:
    from hpc3d.comm.grid import Grid
    from hpc3d.config.input_file import Config
    from hpc3d.model.context import Context
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.simulator import StageRun

_MOST_RANKS, MOST_ROWS = 2048, 10_000_000  # maximum numbers of ranks and of events in a trace
_ITEM_SIZES = item_sizes(dict(enumerate(DTYPE)))


def write_trace(folder: Path, runs: Sequence[StageRun], config: Config, machine: Machine) -> Path:
    """Write FOLDER/trace.h5 with the events of every rank, and return its path.

    The events of a rank are derived from those of the simulated rank of its stage and class.
    Raises ValueError if the trace would have too many ranks or events, or if training steps
    overlap because the schedule is asynchronous.
    """
    if find(config.parallel.schedule).asynchronous:
        raise ValueError(
            f"parallel.schedule = {config.parallel.schedule}: training steps overlap, so a trace "
            "of one step cannot be written; remove --out"
        )
    grid = config.grid()
    total = sum(len(run.events) for run in runs) * grid.size // len(runs)
    if total > MOST_ROWS or grid.size > _MOST_RANKS:
        raise ValueError(
            f"a trace of {grid.size:,} ranks would have {total:,} events, but the limits are "
            f"{_MOST_RANKS:,} ranks and {MOST_ROWS:,} events; remove --out, or simulate fewer "
            "ranks or microbatches"
        )
    classes, own = owner_classes(config), config.splits["dense"].own.split()
    for rank in range(grid.size):
        coords = grid.coords(rank)
        stage = runs[coords["p"]].classes
        run = stage[classes.of_rank[rank]] if classes else stage[0]
        here, there = (_members(grid, each, run.axes) for each in (coords, grid.coords(run.rank)))
        header = _header_of(rank, coords, config, machine) | {"run_id": folder.name}
        header["groups"] = [{"axis": a, "members": m} for a, m in zip(run.axes, here)]
        tables = _tables_of(rank, run)
        for group, (axis, mine, others) in enumerate(zip(run.axes, here, there, strict=True)):
            if classes and axis in own:
                _set_roots(tables[0], group, rank, mine, [stage[n] for n in classes.of_rank[mine]])
            else:
                _turn_roots(tables[0], group, rank, mine, others)
        if CONTEXT in run.axes:
            group = run.axes.index(CONTEXT)
            _turn_peers(tables[0], group, here[group], coords[CONTEXT], config.context())
        write_segment(segment_path(folder, rank, 0), header, run.names, *tables)
    path = merge(folder)
    shutil.rmtree(segment_path(folder, 0, 0).parent)
    return path


def _members(grid: Grid, coords: Mapping[str, int], axes: Iterable[str]) -> list[list[int]]:
    """Return one list of ranks per axis: the members of the group that contains the rank at
    `coords`."""
    world = [*range(grid.size)]
    groups = {**groups_of(grid, coords), WORLD: world}
    return [[*(groups.get(axis) or grid.ranks_along(axis, coords))] for axis in axes]


def _header_of(
    rank: int, coords: Mapping[str, int], config: Config, machine: Machine
) -> dict[str, Any]:
    grid = config.grid()
    return {
        "kind": "simulated",
        "rank": rank,
        "world_size": grid.size,
        "axes": [*grid.sizes],
        "axis_sizes": [*grid.sizes.values()],
        "coords": [*coords.values()],
        "host": f"node{rank // machine.ranks_per_node}",
        "local_rank": rank % machine.ranks_per_node,
        "device": machine.name,
        "pid": -1,
        "dropped": 0,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "time_unit": "ns",
        "config": to_toml(config),
        "git": "",
        "mpi": "",
        "version": __version__,
    }


def _tables_of(rank: int, run: StageRun) -> tuple[np.ndarray, ...]:
    """Return the trace tables of a rank: events, steps, memory and clock samples.

    The tables are derived from `run`, the simulated rank of the same stage and class.
    """
    events = run.rows.copy()
    events["rank"], events["step"] = rank, np.where(run.rows["step"] == run.step[1], 0, -1)
    peers = np.isin(events["op"], MESSAGE_CODES) & (events["peer"] >= 0)
    events["peer"][peers] += rank - run.rank
    step = np.array([run.step], record_type(STEPS))
    memory = np.array(run.memory, record_type(MEMORY))
    for table in (step, memory):
        table["rank"], table["step"] = rank, 0
    for name in ("loss", "grad_norm", "learning_rate"):
        step[name] = np.nan
    return events, step, memory, np.zeros(0, record_type(CLOCK_SAMPLES))


def _turn_peers(
    events: np.ndarray, group: int, members: Sequence[int], number: int, context: Context
) -> None:
    """Correct, in place, the peers of the messages that a rank exchanges along the context axis.

    The rank is member `number` of `group`, and the simulated rank is the first member. On entry,
    each peer is the peer of the simulated rank, shifted by the difference between the two rank
    numbers.
    """
    messages = np.isin(events["op"], MESSAGE_CODES) & (events["peer"] >= 0)
    rows = np.flatnonzero((events["group"] == group) & messages)
    others = (events["peer"][rows] - members[number]) // (members[1] - members[0])
    events["peer"][rows] = [members[context.peer(number, int(other))] for other in others]


def _turn_roots(
    events: np.ndarray, group: int, rank: int, mine: Sequence[int], others: Sequence[int]
) -> None:
    """Correct, in place, the root and the received bytes of a group's broadcasts and reduces.

    `mine` lists the members of this rank's group, and `others` those of the simulated rank's
    group.
    """
    for op in ("broadcast", "reduce"):
        called = (events["group"] == group) & (events["op"] == OP.index(op))
        rows = np.flatnonzero(called & (events["seq"] >= 0))
        root = np.searchsorted(others, events["peer"][rows])
        nbytes = events["count"][rows] * _ITEM_SIZES[events["dtype"][rows]]
        events["peer"][rows] = np.array(mine)[root]
        events["bytes"][rows] = received_bytes(op, nbytes, len(mine), mine.index(rank), root)


def _set_roots(
    events: np.ndarray,
    group: int,
    rank: int,
    members: Sequence[int],
    runs: Sequence[StageRun],
) -> None:
    """Correct, in place, the owners in a group's broadcasts and reduces.

    `runs` lists the StageRun of the class of each member. The broadcast bytes need no correction,
    because the ranks of a class own the same kinds of blocks.
    """
    rows = _rooted(events, group)
    owners = [run.rows["peer"][_rooted(run.rows, group)] == run.rank for run in runs]
    root = np.argmax(owners, axis=0)
    events["peer"][rows] = np.array(members)[root]
    reduces = events["op"][rows] == OP.index("reduce")
    rows, root = rows[reduces], root[reduces]
    nbytes = events["count"][rows] * _ITEM_SIZES[events["dtype"][rows]]
    where = len(members), members.index(rank), root
    events["bytes"][rows] = received_bytes("reduce", nbytes, *where)


def _rooted(events: np.ndarray, group: int) -> np.ndarray:
    """Return the rows of a group's broadcasts and reduces, sorted by sequence number."""
    calls = np.isin(events["op"], [OP.index("broadcast"), OP.index("reduce")])
    rows = np.flatnonzero((events["group"] == group) & calls & (events["seq"] >= 0))
    return rows[np.argsort(events["seq"][rows])]


def prediction(runs: Sequence[StageRun], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the trace table /prediction, from the summary `found`.

    The table contains the step time and, for the first rank of each stage, the peak memory of each
    kind. `stage` and `rank` are -1 for values that do not belong to a single stage or rank.
    """
    rows = [("step_s", -1, -1, found["step_time_s"])]
    for stage, (run, peaks) in enumerate(zip(runs, found["memory"]["stages"], strict=True)):
        for kind in MEMORY_KIND:
            rows.append((f"peak_{kind}_bytes", stage, run.rank, peaks[kind]))
    quantity, stage, rank, value = map(list, zip(*rows))
    return {
        "step": [-1] * len(rows),
        "quantity": quantity,
        "stage": stage,
        "rank": rank,
        "value": [float(each) for each in value],
    }
