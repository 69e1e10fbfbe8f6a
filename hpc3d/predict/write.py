"""A simulated step as a trace file, which `hpc3d.report` reads like a measured one."""

from datetime import UTC, datetime
from itertools import product
from math import prod

import numpy as np

from hpc3d import __version__
from hpc3d.cluster.shapes import line
from hpc3d.config import to_toml
from hpc3d.trace.events import CLOCK_SAMPLES, MEMORY, MEMORY_KIND, OP, STEPS, record_type
from hpc3d.trace.merge import merge
from hpc3d.trace.segment import segment_path, write_segment

MOST_ROWS = 10_000_000  # of the events of all ranks together
MESSAGES = [OP.index("send"), OP.index("recv")]
BROADCAST, TOKEN = OP.index("broadcast"), np.dtype(np.int32).itemsize


def write_trace(folder, runs, config, machine, git=""):
    """Write FOLDER/trace.h5 with the events of every rank, from those of one of each stage.

    ValueError if these would be more than MOST_ROWS.
    """
    sizes = config.mesh.sizes()
    total = sum(len(run.rows) for run in runs) * prod(sizes.values()) // len(runs)
    if total > MOST_ROWS:
        raise ValueError(
            f"a trace of all ranks would have {total:,} events, more than {MOST_ROWS:,}: leave "
            "--out away, or simulate fewer ranks or microbatches"
        )
    for rank, place in enumerate(product(*map(range, sizes.values()))):
        coords = dict(zip(sizes, place, strict=True))
        run = runs[coords["p"]]
        header = header_of(rank, coords, run, config, machine) | {
            "run_id": folder.name,
            "git": git,
        }
        path = segment_path(folder, rank, 0)
        write_segment(path, header, run.names, *tables_of(rank, run))
    return merge(folder)


def header_of(rank, coords, run, config, machine):
    sizes = config.mesh.sizes()
    ranks = range(prod(sizes.values()))
    members = [ranks if axis == "world" else line(sizes, coords, axis) for axis in run.axes]
    return {
        "kind": "simulated",
        "rank": rank,
        "world_size": len(ranks),
        "axes": [*sizes],
        "axis_sizes": [*sizes.values()],
        "coords": [*coords.values()],
        "host": f"node{rank // machine.ranks_per_node}",
        "local_rank": rank % machine.ranks_per_node,
        "device": machine.name,
        "pid": -1,
        "dropped": 0,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "time_unit": "ns",
        "config": to_toml(config),
        "mpi": "",
        "version": __version__,
        "groups": [{"axis": axis, "members": [*ranks]} for axis, ranks in zip(run.axes, members)],
    }


def tables_of(rank, run):
    """Events, steps, memory and samples of a rank that does what `run` did."""
    events = run.rows.copy()
    events["rank"], events["step"] = rank, 0
    peers = np.isin(events["op"], MESSAGES) & (events["peer"] >= 0)
    events["peer"][peers] += rank - run.rank
    batch = (events["op"] == BROADCAST) & (events["peer"] != rank)
    events["bytes"][batch] = events["count"][batch] * TOKEN
    step = np.array([run.step], record_type(STEPS))
    memory = np.array(run.memory, record_type(MEMORY))
    for table in (step, memory):
        table["rank"], table["step"] = rank, 0
    for name in ("loss", "grad_norm", "learning_rate"):
        step[name] = np.nan
    return events, step, memory, np.zeros(0, record_type(CLOCK_SAMPLES))


def prediction(runs, found):
    """The columns of /prediction for a summary: of the step, and of the first rank of each stage;
    -1 for what is of no one stage or rank."""
    rows = [("step_s", -1, -1, found["step_time_s"])]
    for stage, (run, peaks) in enumerate(zip(runs, found["memory"]["stages"], strict=True)):
        for kind in (*MEMORY_KIND, "all"):
            rows.append((f"peak_{kind}_bytes", stage, run.rank, peaks[kind]))
    quantity, stage, rank, value = map(list, zip(*rows))
    return {
        "step": [-1] * len(rows),
        "quantity": quantity,
        "stage": stage,
        "rank": rank,
        "value": [float(each) for each in value],
    }
