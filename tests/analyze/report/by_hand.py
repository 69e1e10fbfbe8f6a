"""A run of four ranks with known values, and its report."""

import json

import numpy as np

from hpc3d import report
from hpc3d.trace import schema
from hpc3d.trace.segment import segment_path, write_segment

US = 1000  # ns
MS = 1000 * US
NAN = float("nan")

HOST, COMPUTE, COMM, WAIT = (schema.CATEGORY.index(c) for c in ("host", "compute", "comm", "wait"))
FLOAT = schema.DTYPE.index("float32")
FORWARD, BACKWARD = (schema.PHASE.index(phase) for phase in ("forward", "backward"))
GEMM, GATHER, SCATTER = (schema.OP.index(op) for op in ("gemm", "all_gather", "reduce_scatter"))


def event(category, phase, op, start, dur, **values):
    where = {
        "category": category,
        "phase": phase,
        "op": op,
        "t_start": start * US,
        "dur": dur * US,
    }
    return {"group": -1, "seq": -1, "peer": -1, "parent": -1, **where, **values}


def meets(group, number):
    """Return the columns of the `number`-th call of its group, on blocks of 250 floats."""
    return {"group": group, "seq": number, "count": 250, "dtype": FLOAT}


def events_of(rank, step):
    """Return 0.6 ms of a forward pass with 2 nested events, and the backward pass; 10 ms in total.

    The reduce-scatter is only in step 2, and the warm-up only in step 0.
    """
    events = [
        event(HOST, FORWARD, 0, 0, 600),
        event(COMPUTE, FORWARD, GEMM, 10, 300, flops=6e5, parent=0),
        event(COMM, FORWARD, GATHER, 400, 100 + 10 * rank, bytes=4000, parent=0, **meets(0, step)),
        event(COMPUTE, BACKWARD, GEMM, 610, 200, flops=4e5),
        event(COMPUTE, BACKWARD, GEMM, 810, 200, flops=4e5),
        event(WAIT, BACKWARD, SCATTER, 1010, 20, group=1),
    ]
    if step == 0:
        events.append(event(COMPUTE, BACKWARD, GEMM, 2000, 6000, flops=1e9))
    if step == 2:
        events.append(event(COMM, BACKWARD, SCATTER, 1040, 50, bytes=1000, **meets(1, 0)))
    return [{**row, "step": step, "t_start": row["t_start"] + 10 * step * MS} for row in events]


def uncounted(rank):
    """Return events before the first step and in the incomplete step."""
    rest = {"bytes": 77777, "flops": 1e9}
    return [
        event(COMPUTE, FORWARD, GEMM, -20000, 9000, step=-1, **rest),
        event(COMM, FORWARD, GATHER, 30000, 9000, step=3, **meets(0, 3), **rest),
    ]


def steps_of(rank, losses):
    """Steps take 9, 1 and 2 ms, plus 0.1 ms per rank; only the last rank knows the loss."""
    return [
        {
            "step": step,
            "t_start": 10 * step * MS,
            "t_end": 10 * step * MS + (step or 9) * MS + rank * 100 * US,
            "tokens": 1800,
            "loss": loss if rank == 3 else NAN,
            "grad_norm": 1.5,
            "forward_s": 0.001 * (rank + 1),
            "backward_s": NAN if rank == 3 else 0.002,
        }
        for step, loss in enumerate(losses)
    ]


def memory_of(rank):
    kinds = {"parameter": 100 + rank, "activation": 5000 - rank}
    return [
        {"kind": schema.MEMORY_KIND.index(kind), "bytes": 1, "peak": peak - 50 * (step == 1)}
        for kind, peak in kinds.items()
        for step in range(2)
    ]


def records(columns, rank, rows):
    table = np.zeros(len(rows), schema.record_type(columns))
    for i, row in enumerate(rows):
        for key, value in row.items():
            table[key][i] = value
    table["rank"] = rank
    if columns is schema.EVENTS:
        table["posted"] = table["t_start"]
    return table


def write_run(run, scheme="3d", losses=(4.0, 3.5, 3.25), keys=""):
    """Write a run. `keys` are lines of its configuration before the first section."""
    for rank in range(4):
        events = uncounted(rank)
        for step in range(3):
            shift = len(events)
            events += [
                {**row, "parent": row["parent"] + shift * (row["parent"] >= 0)}
                for row in events_of(rank, step)
            ]
        write_segment(
            segment_path(run, rank, 0),
            {
                "rank": rank,
                "world_size": 4,
                "axes": ["p", "x", "y"],
                "axis_sizes": [1, 2, 2],
                "coords": [0, *divmod(rank, 2)],
                "host": "node0",
                "local_rank": rank,
                "device": "cpu",
                "pid": rank,
                "run_id": run.name,
                "created_utc": "2025-01-02T03:04:05Z",
                "time_unit": "ns",
                "config": f'{keys}[parallel]\nscheme = "{scheme}"\n' if scheme else "",
                "git": "0123abc",
                "mpi": "Open MPI 5",
                "version": "0.1.0",
                "dropped": 0,
                "groups": [
                    {"axis": "x", "members": [rank % 2, rank % 2 + 2]},
                    {"axis": "y", "members": [rank // 2 * 2, rank // 2 * 2 + 1]},
                ],
            },
            ["event"],
            records(schema.EVENTS, rank, events),
            records(schema.STEPS, rank, steps_of(rank, losses)),
            records(schema.MEMORY, rank, memory_of(rank)),
            records(schema.CLOCK_SAMPLES, rank, []),
        )
    return run


def reported(capsys, *arguments):
    """Return the JSON object in the last line."""
    assert report.main([*map(str, arguments), "--json", "--tables"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def limits(found):
    """Return the warnings of a comparison, except those about missing or inconsistent events."""
    events = ": missing in the trace: ", ": inconsistent trace: "
    return [line for line in found["notes"] if not any(each in line for each in events)]


CUT_OFF = [f"rank {rank}: the end of step 3" for rank in range(4)]
WITHOUT_RANK_1 = [
    "rank 1: no segment",
    CUT_OFF[0],
    *CUT_OFF[2:],
    "calls of some ranks in 5 collectives and messages; waits in these may have been longer than"
    " reported",
]
