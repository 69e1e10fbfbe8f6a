"""A small trace with a different value in every column, written row by row."""

import numpy as np

from hpc3d.trace import schema
from hpc3d.trace.segment import segment_path, write_segment

RANKS = 4
SEGMENTS = 2
ROWS = 6
AHEAD = 7  # ns


def header(rank):
    """A 2 x 2 mesh: each rank lists its group along x, and then its group along y."""
    row, column = divmod(rank, 2)
    groups = [
        {"axis": "x", "members": [column, column + 2]},
        {"axis": "y", "members": [2 * row, 2 * row + 1]},
    ]
    return {
        "rank": rank,
        "world_size": RANKS,
        "axes": ["p", "x", "y"],
        "axis_sizes": [1, 2, 2],
        "coords": [0, row, column],
        "host": f"node{row}",
        "local_rank": column,
        "device": "cpu",
        "pid": 1000 + rank,
        "run_id": "run-1",
        "created_utc": "2025-01-02T03:04:05Z",
        "time_unit": "ns",
        "config": 'name = "small"\n[parallel]\nscheme = "2d"\n',
        "git": "0123abc",
        "mpi": "Open MPI 5",
        "version": "0.1.0",
        "dropped": 0,
        "groups": groups,
    }


def rows_of(rank, number):
    """Return the events of a segment as dicts: unsorted, with different names, the third nested.

    `count` is unique and identifies a row everywhere.
    """
    generator = np.random.default_rng([rank, number])
    starts = generator.permutation(ROWS) * 100 + number * 1000
    return [
        {
            "t_start": int(starts[i]),
            "t_global": int(starts[i]) + AHEAD * (rank >= 2),
            "dur": int(generator.integers(1, 90)),
            "posted": int(starts[i]) - 5,
            "name": f"event {generator.integers(3)} of rank {rank}",
            "category": i % 8,
            "phase": i % 7,
            "op": i % 16,
            "rank": rank,
            "step": number,
            "microbatch": i,
            "stage": -1,
            "chunk": 1,
            "layer": i - 1,
            "stream": 2,
            "group": i % 3 - 1,
            "seq": i,
            "peer": 3 - rank,
            "bytes": 2**40 + i,
            "count": (rank * SEGMENTS + number) * ROWS + i,
            "dtype": i % 8,
            "flops": 0.5 * i,
            "parent": (ROWS - 1 if i == 2 else -1),
            "flags": i,
        }
        for i in range(ROWS)
    ]


def records(columns, rows):
    table = np.zeros(len(rows), schema.record_type(columns))
    for i, row in enumerate(rows):
        for key, value in row.items():
            table[key][i] = value
    return table


def steps_of(rank, number):
    values = range(number * 10 + rank, number * 10 + rank + len(schema.STEPS))
    row = dict(zip((column.name for column in schema.STEPS), values, strict=True))
    return [{**row, "rank": rank, "step": number}]


def memory_of(rank, number):
    return [
        {"rank": rank, "step": number, "kind": kind, "bytes": rank + kind, "peak": 10 * rank}
        for kind in range(3)
    ]


def samples_of(rank, number):
    """Return the samples of rank 2, the first of its host, whose clock is behind by AHEAD."""
    middle = {"t_local": 500, "offset_ns": AHEAD, "rtt_ns": 10, "round": number + 1, "peer": 0}
    return [{**middle, "rank": 2}] if rank == 2 else []


def write(run, rank, number, changes=None):
    """Write a segment with its own table of names, in the order of its events."""
    rows = rows_of(rank, number)
    names = list(dict.fromkeys(row["name"] for row in rows))
    numbered = [{**row, "name": names.index(row["name"])} for row in rows]
    write_segment(
        segment_path(run, rank, number),
        header(rank) | (changes or {}),
        names,
        records(schema.EVENTS, numbered),
        records(schema.STEPS, steps_of(rank, number)),
        records(schema.MEMORY, memory_of(rank, number)),
        records(schema.CLOCK_SAMPLES, samples_of(rank, number)),
    )


def write_all(run):
    for rank in range(RANKS):
        for number in range(SEGMENTS):
            write(run, rank, number)
    return run


def expected_events():
    every = [row for rank in range(RANKS) for n in range(SEGMENTS) for row in rows_of(rank, n)]
    return sorted(every, key=lambda row: (row["rank"], row["t_start"]))
