"""Traces with known values: a few chosen rows, or millions of rows from formulas."""

import h5py
import numpy as np

from hpc3d import trace
from hpc3d.trace import schema

MS = 1_000_000
NOTHING = {"group": -1, "seq": -1, "peer": -1, "parent": -1, "layer": -1, "microbatch": -1}
ATTRIBUTES = {
    "format": schema.FORMAT,
    "version": schema.VERSION,
    "run_id": "synthetic",
    "axes": "x",
    "config": "",
    "complete": True,
    "missing": "",
}


def write(path, events, steps, groups, hosts, memory=(), **attributes):
    """Return an open trace with columns {name: array} of events and steps; missing ones are 0 or
    NOTHING. `groups` are pairs (axis, members), and `hosts` are the hosts of the ranks."""
    names, sizes = ["event", *dict.fromkeys(hosts)], [len(ranks) for _, ranks in groups]
    ranks = {"rank": range(len(hosts)), "host_id": [names.index(host) for host in hosts]}
    along = {"group_id": range(len(groups)), "axis": [axis for axis, _ in groups]}
    along |= {"size": sizes, "offset": np.cumsum([0, *sizes])[:-1]}
    tables = {
        "events": (schema.EVENTS, {**NOTHING, "t_global": events["t_start"], **events}),
        "steps": (schema.STEPS, {"tokens": 100, "forward_s": 0.1, "backward_s": 0.2, **steps}),
        "memory": (schema.MEMORY, columns(schema.MEMORY, memory)),
        "ranks": (schema.RANKS, {**ranks, "device": "cpu"}),
        "strings": (schema.STRINGS, {"name": names}),
        "groups": (schema.GROUPS, along),
    }
    with h5py.File(path, "w") as file:
        for name, (table, given) in tables.items():
            store(file.create_group(name), table, given)
        members = [rank for _, ranks in groups for rank in ranks]
        store(file["groups"], [schema.MEMBERS], {"members": members})
        file.attrs.update(ATTRIBUTES | {"world_size": len(hosts), "axis_sizes": [len(hosts)]})
        file.attrs.update(attributes)
    return trace.open(path)


def store(group, table, given):
    """Write columns of a table; missing columns are 0, and a number applies to all rows."""
    size = next(np.size(values) for values in given.values() if np.ndim(values))
    for column in table:
        values = given.get(column.name, 0)
        if column.unit == "enum":
            codes = {name: code for code, name in enumerate(schema.ENUMS[column.name])}
            kind = h5py.enum_dtype(codes, column.type)
        else:
            kind = h5py.string_dtype() if column.type == "text" else np.dtype(column.type)
        data = np.broadcast_to(np.asarray(values, object if column.type == "text" else None), size)
        how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if size > 1e5 else {}
        group.create_dataset(column.name, data=data.astype(kind), **how)


def columns(table, rows):
    """Convert rows {name: value} to {name: values}; missing values are 0."""
    return {each.name: [row.get(each.name, 0) for row in rows] for each in table}


def by_hand(path, rows, steps, groups=(), hosts=None, results=None, **attributes):
    """Return an open trace with the `rows` (from `row`), and `steps` {(rank, step): (start, end)}
    in ms, with `results` {column: values}. By default, each rank is on its own host; `hosts`
    overrides this."""
    rows = sorted(rows, key=lambda each: (each["rank"], each["t_start"]))
    events = {
        each.name: np.array([row.get(each.name, NOTHING.get(each.name, 0)) for row in rows])
        for each in schema.EVENTS
    }
    (rank, step), (start, end) = (
        np.reshape([*pairs], (-1, 2)).T for pairs in (steps, steps.values())
    )
    table = {"rank": rank, "step": step, "t_start": ns(start), "t_end": ns(end)}
    table |= results or {}
    members = [member for _, ranks in groups for member in ranks]
    hosts = hosts or [f"node{number}" for number in range(1 + max([*members, *rank]))]
    return write(path, events, table, groups, hosts, **attributes)


def row(rank, start, end, category="compute", posted=None, ahead=0, **values):
    """Return a row from start to end in ms on rank 0's clock; this rank's clock is `ahead`."""
    begin = ns(start + ahead)
    times = {
        "t_start": begin,
        "t_global": ns(start),
        "dur": ns(end) - ns(start),
        "posted": begin if posted is None else ns(posted + ahead),
    }
    what = {"phase": "forward", "op": "gemm", "category": category, **values}
    what |= {key: schema.ENUMS[key].index(what[key]) for key in schema.ENUMS if key in what}
    return {"rank": rank, "step": 0, **times, **what}


def call(rank, op, start, end, seq, group=0, **values):
    """Return a row of a communication call."""
    values = {"dtype": "float32", **values}
    return row(rank, start, end, "comm", op=op, seq=seq, group=group, **values)


def ns(ms):
    return np.rint(np.multiply(ms, MS)).astype(np.int64)


COMPUTE, SLOT, JITTER = 60_000, 100_000, 1_000  # ns


def large(path, side, steps, slots):
    """Return an open trace of side x side ranks, with `steps` steps of 2 `slots` rows each.

    In each time slot, a rank computes for COMPUTE plus `jitter`, and is then blocked until the end
    of the slot: alternately in an all-reduce along x and along y, except that in every eighth slot
    ranks with even numbers send to their neighbors.
    """
    ranks = side**2
    rank, step, slot = np.ogrid[:ranks, :steps, :slots]
    late = COMPUTE + jitter(rank, slot)
    begin = SLOT * (slot + (slots + 1) * step) + 0 * rank
    message, along_y = slot % 8 == 7, slot % 2 == 1
    odd = rank % 2 == 1
    number = {
        "message": slots // 8 * step + slot // 8,
        "x": (slots + 1) // 2 * step + slot // 2,
        "y": slots * step + slot,
    }
    op = np.where(message, np.where(odd, code("recv"), code("send")), code("all_reduce"))
    computing = {"op": code("gemm"), "t_start": begin, "dur": late, "posted": begin, "flops": 1e6}
    blocked = {
        "op": op,
        "category": schema.CATEGORY.index("comm"),
        "t_start": begin + late,
        "posted": begin + late,
        "dur": SLOT - late,
        "group": np.where(along_y & ~message, side + rank % side, rank // side),
        "seq": np.where(message, number["message"], np.where(along_y, number["y"], number["x"])),
        "peer": np.where(message, rank + 1 - 2 * odd, -1),
        "bytes": 1000,
        "count": 1000,
        "dtype": schema.DTYPE.index("float32"),
    }
    shape = ranks, steps, slots
    both = {"rank": rank, "step": step, "layer": slot // 8}
    events = {
        key: np.stack(
            [np.broadcast_to(half.get(key, NOTHING.get(key, 0)), shape) for half in halves], -1
        ).ravel()
        for halves in [({**both, **computing}, {**both, **blocked})]
        for key in {**both, **blocked, **computing}
    }
    start = np.broadcast_to(SLOT * (slots + 1) * step[..., 0], (ranks, steps)).ravel()
    table = {"rank": np.repeat(np.arange(ranks), steps), "step": np.tile(np.arange(steps), ranks)}
    table |= {"t_start": start, "t_end": start + SLOT * slots}
    places = np.arange(ranks).reshape(side, side)
    groups = [
        (axis, line.tolist()) for axis, way in (("x", places), ("y", places.T)) for line in way
    ]
    return write(path, events, table, groups, [f"node{number // 8}" for number in range(ranks)])


def jitter(rank, slot):
    return (rank * 7 + slot * 13) % 11 * JITTER


def code(op):
    return schema.OP.index(op)
