"""Segments of large runs, written by the program, with realistic times and values.

In slot i of a step, every rank executes entry i of ROUTINE, in the same millisecond: a product, a
collective along an axis, or a message to the next or from the previous rank on axis p.
"""

import numpy as np

from hpc3d.trace import schema
from hpc3d.trace.segment import segment_path, write_segment

FLUSHED = 1 << 14  # events after which a recorder writes a segment
SLOT = 1_000_000  # ns
ON_A_HOST = 8  # ranks
BLOCK = 3 << 14  # bytes
ROUTINE = (
    ("gemm", ""),
    ("all_gather", "x"),
    ("gemm", ""),
    ("reduce_scatter", "y"),
    ("norm", ""),
    ("send", "p"),
    ("recv", "p"),
    ("attention", ""),
    ("all_reduce", "d"),
    ("all_reduce", "world"),
)
OPS = np.array([schema.OP.index(op) for op, _ in ROUTINE])
AXES = ("p", "d", "x", "y")
GROUPS = (*AXES, "world")  # that each rank is in


def generate(folder, sizes, steps, events):
    """Write a run on a mesh of the sizes p, d, x and y, with `steps` steps of `events` events."""
    a_segment = max(1, FLUSHED // events)
    for rank in range(int(np.prod(sizes))):
        generator = np.random.default_rng(rank)
        for number, first in enumerate(range(0, steps, a_segment)):
            chosen = np.arange(first, min(first + a_segment, steps))
            tables = {
                "events": events_of(generator, rank, sizes, chosen, events),
                "steps": steps_of(rank, chosen, events),
                "memory": memory_of(rank, chosen),
                "samples": samples_of(rank, number),
                "evaluation": evaluations_of(rank, number),
                "experts": experts_of(rank, chosen),
                "routers": np.zeros(0, schema.record_type(schema.ROUTERS)),
                "validation": validation_of(rank, number),
            }
            path, names = segment_path(folder, rank, number), [op for op, _ in ROUTINE]
            write_segment(path, header(rank, sizes), names, *tables.values())


def experts_of(rank, steps):
    """Return the loads of two experts of a layer, without dropped tokens."""
    table = np.zeros(2 * len(steps), schema.record_type(schema.EXPERTS))
    table["rank"], table["step"] = rank, np.repeat(steps, 2)
    table["expert"], table["chosen"], table["kept"] = np.arange(2 * len(steps)) % 2, 8, 8
    return table


def header(rank, sizes):
    coords = np.unravel_index(rank, sizes)
    return {
        "rank": rank,
        "world_size": int(np.prod(sizes)),
        "axes": list(AXES),
        "axis_sizes": list(sizes),
        "coords": [int(coord) for coord in coords],
        "host": f"node{rank // ON_A_HOST}",
        "local_rank": rank % ON_A_HOST,
        "device": "cpu",
        "pid": 1000 + rank,
        "run_id": "large",
        "created_utc": "2025-01-02T03:04:05Z",
        "time_unit": "ns",
        "config": 'name = "large"\n',
        "git": "0123abc",
        "mpi": "Open MPI 5",
        "version": "0.1.0",
        "dropped": 0,
        "groups": [{"axis": axis, "members": line(rank, sizes, axis)} for axis in GROUPS],
    }


def line(rank, sizes, axis):
    """Return the ranks that differ from `rank` only along `axis`; all ranks for the world."""
    if axis == "world":
        return list(range(np.prod(sizes)))
    place = AXES.index(axis)
    along = np.moveaxis(np.arange(np.prod(sizes)).reshape(sizes), place, -1)
    return next(row.tolist() for row in along.reshape(-1, sizes[place]) if rank in row)


def events_of(generator, rank, sizes, steps, events):
    """Return the rows of some steps, sorted by time."""
    slot = np.tile(np.arange(events), len(steps))
    kind = slot % len(ROUTINE)
    table = np.zeros(len(slot), schema.record_type(schema.EVENTS))
    table["rank"], table["step"], table["name"] = rank, np.repeat(steps, events), kind
    table["op"], table["seq"], table["group"], table["peer"] = OPS[kind], -1, -1, -1
    table["parent"], table["phase"] = -1, slot * 3 // events
    table["layer"], table["microbatch"] = slot // 50, slot // 100
    begin = (table["step"] * events + slot) * SLOT
    table["t_start"] = begin + generator.integers(0, SLOT // 10, len(slot))
    table["dur"] = generator.integers(SLOT // 10, SLOT // 10 * 8, len(slot))
    table["posted"], table["t_global"] = table["t_start"], table["t_start"]
    table["flops"] = np.where(np.isin(kind, (0, 2)), 113246208.0, 0)
    for number, (op, axis) in enumerate(ROUTINE):
        if axis:
            call = np.flatnonzero(kind == number)
            _communicate(table, call, op, GROUPS.index(axis), line(rank, sizes, axis), rank)
            earlier = len(range(number, events, len(ROUTINE)))
            table["seq"][call] = table["step"][call] * earlier + slot[call] // len(ROUTINE)
    return table


def _communicate(table, rows, op, group, members, rank):
    place, size = members.index(rank), len(members)
    table["category"][rows], table["group"][rows] = schema.CATEGORY.index("comm"), group
    table["dtype"][rows], table["count"][rows] = schema.DTYPE.index("float32"), BLOCK // 4
    received = {
        "all_gather": BLOCK * (size - 1),
        "reduce_scatter": BLOCK * (size - 1) // size,
        "all_reduce": 2 * BLOCK * (size - 1) // size,
    }
    table["bytes"][rows] = received.get(op, BLOCK)
    if op in ("send", "recv"):
        step = 1 if op == "send" else -1
        table["peer"][rows] = members[(place + step) % size]


def steps_of(rank, steps, events):
    table = np.zeros(len(steps), schema.record_type(schema.STEPS))
    table["rank"], table["step"] = rank, steps
    table["t_start"], table["t_end"] = steps * events * SLOT, (steps + 1) * events * SLOT
    table["tokens"], table["loss"], table["grad_norm"] = 4096, 5.5 / (1 + steps), 1.5
    return table


def memory_of(rank, steps):
    kinds = len(schema.MEMORY_KIND)
    table = np.zeros(len(steps) * kinds, schema.record_type(schema.MEMORY))
    table["rank"], table["step"] = rank, np.repeat(steps, kinds)
    table["kind"] = np.tile(np.arange(kinds), len(steps))
    several = np.where(
        table["kind"] == schema.MEMORY_KIND.index("all"), schema.MEMORY_KIND.index("all"), 1
    )
    table["bytes"], table["peak"] = several << 20, several << 21
    return table


def samples_of(rank, number):
    """Return the clock samples of the first rank of a host, which match rank 0's clock."""
    first = rank > 0 and rank % ON_A_HOST == 0
    samples = [(rank, number * SLOT, 0.0, 1000, number + 1, 0)] if first else []
    return np.array(samples, schema.record_type(schema.CLOCK_SAMPLES))


def evaluations_of(rank, number):
    """Return two evaluations, which rank 0 has."""
    steps = [0, 1] if rank == number == 0 else []
    table = np.zeros(len(steps), schema.record_type(schema.EVALUATION))
    table["step"], table["loss"], table["accuracy"] = steps, 2.5, np.nan
    return table


def validation_of(rank, number):
    """Return the results of two texts in the first evaluation, which rank 0 has."""
    texts = [0, 1] if rank == number == 0 else []
    table = np.zeros(len(texts), schema.record_type(schema.VALIDATION))
    table["text"], table["loss"] = texts, 2.5
    return table
