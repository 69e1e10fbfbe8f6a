"""The columns of a trace: one definition for the recorder, the file and its documentation.

Each table is a NumPy record type; `COLUMNS` gives every column's unit and meaning.  Enumerations
are tuples: the value stored is the index of the name.
"""

from typing import NamedTuple

import numpy as np

FORMAT = "hpc3d-trace"
VERSION = 1

CATEGORY = ("compute", "comm", "wait", "copy", "optimizer", "io", "host", "marker")
PHASE = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recompute",
    "optimizer",
    "other",
)
OP = (
    "none",
    "gemm",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "attention",
    "norm",
    "elementwise",
    "lookup",
    "loss",
)
MEMORY_KIND = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "communication",
    "workspace",
)
DTYPE = ("none", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")

ENUMS = {"category": CATEGORY, "phase": PHASE, "op": OP, "kind": MEMORY_KIND, "dtype": DTYPE}


class Column(NamedTuple):
    """One column: its NumPy type, unit and meaning."""

    name: str
    type: str
    unit: str
    description: str


EVENTS = (
    Column("t_start", "i8", "ns", "start on the rank's own clock, raw"),
    Column("t_global", "i8", "ns", "start on rank 0's clock, corrected by /clock/model"),
    Column("dur", "i8", "ns", "duration on the rank's own clock"),
    Column("posted", "i8", "ns", "when a call was made, raw; t_start is when it was waited for"),
    Column("name", "u4", "index", "index into /strings/name"),
    Column("category", "u1", "enum", "what the time went into"),
    Column("phase", "u1", "enum", "part of the training step"),
    Column("op", "u1", "enum", "operation"),
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("step", "i4", "1", "training step, -1 outside of steps"),
    Column("microbatch", "i4", "1", "microbatch of the step, -1 where it has no meaning"),
    Column("stage", "i2", "1", "pipeline stage"),
    Column("chunk", "i2", "1", "model chunk of the stage"),
    Column("layer", "i4", "1", "Transformer layer, -1 outside of the layers"),
    Column("stream", "i2", "1", "execution stream of the device, 0 on the CPU"),
    Column("group", "i4", "index", "index into /groups, -1 where there is no group"),
    Column("seq", "i4", "1", "counter of the collectives of the group, -1 for none"),
    Column("peer", "i4", "1", "rank of the peer or root, -1 for none"),
    Column("bytes", "i8", "B", "bytes that this rank must receive (bandwidth-optimal algorithm)"),
    Column("count", "i8", "1", "elements of the block that went in"),
    Column("dtype", "u1", "enum", "type of the elements"),
    Column("flops", "f8", "flop", "floating-point operations of the event"),
    Column("parent", "i8", "index", "event that encloses this one, -1 for none"),
    Column("flags", "u2", "bits", "reserved, 0"),
)

STEPS = (
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("step", "i4", "1", "training step"),
    Column("t_start", "i8", "ns", "start on the rank's own clock, raw"),
    Column("t_end", "i8", "ns", "end on the rank's own clock, raw"),
    Column("tokens", "i8", "1", "tokens of the global batch"),
    Column("loss", "f8", "nat", "mean loss a token"),
    Column("grad_norm", "f8", "1", "global norm of the gradient before clipping"),
    Column("learning_rate", "f8", "1", "learning rate of the step"),
    Column("forward_s", "f8", "s", "forward time of the rank"),
    Column("backward_s", "f8", "s", "backward time of the rank"),
    Column("skipped", "u1", "1", "1 where the update was skipped"),
)

MEMORY = (
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("step", "i4", "1", "training step"),
    Column("kind", "u1", "enum", "what the arrays are for"),
    Column("bytes", "i8", "B", "live at the end of the step"),
    Column("peak", "i8", "B", "highest of the step"),
)

RANKS = (
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("host_id", "i4", "index", "index into /strings/name: the rank's host, -1 if unknown"),
    Column("local_rank", "i4", "1", "rank on the host, -1 if unknown"),
    Column("device", "text", "text", "device the rank computes on"),
    Column("pid", "i8", "1", "process id on the host, -1 if unknown"),
    Column("n_events", "i8", "1", "rows of the rank in /events"),
    Column("dropped", "i8", "1", "events that found the rank's buffer full"),
)

GROUPS = (
    Column("group_id", "i4", "index", "row of this table, the value of /events/group"),
    Column("axis", "text", "text", "mesh axis or axes that the group lies along"),
    Column("size", "i4", "1", "members of the group"),
    Column("offset", "i8", "index", "first of its members in /groups/members"),
)

CLOCK_SAMPLES = (
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("t_local", "i8", "ns", "time of the exchange on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "the peer's clock minus the rank's own"),
    Column("rtt_ns", "i8", "ns", "round-trip time of the exchange"),
    Column("round", "i4", "1", "counter of the synchronisations"),
    Column("peer", "i4", "1", "rank that was asked: rank 0, or one nearer to it in the tree"),
)

# t_global = t + offset_ns + drift * (t - t0)
CLOCK_MODEL = (
    Column("rank", "i4", "1", "rank in the mesh"),
    Column("t0", "i8", "ns", "origin of the model on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "rank 0's clock minus the rank's own at t0"),
    Column("drift", "f8", "1", "change of the offset a unit of time"),
    Column("resid_p99_ns", "f8", "ns", "99th percentile of the samples' distance from the model"),
)

STRINGS = (Column("name", "text", "text", "names of events and hosts"),)
MEMBERS = Column("members", "i4", "1", "ranks of all groups, one group after the other")
COORDS = Column("coords", "i4", "1", "coordinates [ranks, axes] in the mesh, -1 if unknown")
RANK_PTR = Column("rank_ptr", "i8", "index", "rank r owns rows rank_ptr[r] to rank_ptr[r + 1]")


def record_type(columns):
    """The NumPy record type of a table."""
    return np.dtype([(column.name, column.type) for column in columns])
