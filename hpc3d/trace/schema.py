"""Schema of trace files, shared by the recorder, the writer, the reader and docs/trace.md.

A table is defined by a tuple of columns, which determines its NumPy record type.  Enumerations are
tuples of names: the stored value is the index of the name.  `LAYOUT` maps the path of each table
in the file to its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hpc3d.arrays.narrow import itemsize

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
    "evaluation",
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
    "graph",  # replay of a CUDA graph
)
MESSAGES = ("send", "recv")  # the point-to-point operations
MESSAGE_CODES = tuple(map(OP.index, MESSAGES))
SEND = OP.index("send")  # its bytes are sent, not received
MEMORY_KIND = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "communication",
    "workspace",
    "all",  # total of the kinds above; whether a run fits in memory depends on its peak
    "offloaded",  # offloaded arrays, which are not included in "all"
)
# Execution streams of a rank on a GPU; a rank on the CPU has only the first one.
STREAM = (
    "host",
    "computation",
    "communication",
    "replicas",
    "offload",
    "replica groups",
    "experts",
)
DTYPE = ("none", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")

ENUMS = {"category": CATEGORY, "phase": PHASE, "op": OP, "kind": MEMORY_KIND, "dtype": DTYPE}

TEXT = "text"  # type of UTF-8 string columns


class Column(NamedTuple):
    """Column of a table, with its NumPy type (or TEXT), unit and description.

    `least` is the smallest allowed value.  If the values are row indices, `into` names the table
    that contains the rows.  Values must be finite; if `optional` is true, NaN marks unknown
    values.
    """

    name: str
    type: str
    unit: str
    description: str
    least: int | None = None
    into: str = ""
    optional: bool = False

    @property
    def empty(self) -> np.ndarray:
        """Empty array with the dtype of this column."""
        return np.empty(0, object if self.type == TEXT else self.type)


EVENTS = (
    Column("t_start", "i8", "ns", "start time on the rank's own clock, uncorrected"),
    Column("t_global", "i8", "ns", "start time on rank 0's clock, computed with /clock/model"),
    Column("dur", "i8", "ns", "duration on the rank's own clock", 0),
    Column(
        "posted",
        "i8",
        "ns",
        "time when the call was posted, on the rank's own clock; the rank waits from t_start on",
    ),
    Column("name", "u4", "index", "name of the event", 0, "strings"),
    Column("category", "u1", "enum", "category of the event"),
    Column("phase", "u1", "enum", "phase of the training step"),
    Column("op", "u1", "enum", "operation"),
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step, -1 outside of steps", -1),
    Column("microbatch", "i4", "1", "microbatch index, -1 if not applicable", -1),
    Column("stage", "i2", "1", "pipeline stage, -1 if not applicable", -1),
    Column("chunk", "i2", "1", "model chunk of the stage, -1 if not applicable", -1),
    Column("layer", "i4", "1", "Transformer layer, -1 outside of the layers", -1),
    Column("stream", "i2", "1", "execution stream of the device, 0 on the CPU", 0),
    Column("group", "i4", "index", "group of communicating ranks, -1 for none", -1, "groups"),
    Column("seq", "i4", "1", "sequence number of the call, -1 for none", -1),
    Column("peer", "i4", "1", "mesh rank of the peer or root, -1 for none", -1, "ranks"),
    Column(
        "bytes",
        "i8",
        "B",
        "minimum bytes that the rank receives; for a send or copy, the bytes transferred",
        0,
    ),
    Column("count", "i8", "1", "number of elements in the input block", 0),
    Column("dtype", "u1", "enum", "data type of the elements"),
    Column("flops", "f8", "flop", "number of floating-point operations in the event", 0),
    Column("parent", "i8", "index", "enclosing event, -1 for none", -1, "events"),
    Column("flags", "u2", "bits", "reserved, always 0"),
)

STEPS = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("t_start", "i8", "ns", "start time on the rank's own clock, uncorrected"),
    Column("t_end", "i8", "ns", "end time on the rank's own clock, uncorrected"),
    Column("tokens", "i8", "1", "number of tokens in the global batch", 0),
    Column("loss", "f8", "nat", "mean loss per token, NaN if unknown", optional=True),
    Column(
        "grad_norm",
        "f8",
        "1",
        "global norm of the gradient before clipping, NaN if unknown",
        optional=True,
    ),
    Column("learning_rate", "f8", "1", "learning rate of the step, NaN if unknown", optional=True),
    Column("forward_s", "f8", "s", "forward time of the rank, NaN if unknown", 0, optional=True),
    Column("backward_s", "f8", "s", "backward time of the rank, NaN if unknown", 0, optional=True),
    Column("skipped", "u1", "1", "1 if the optimizer update was skipped, otherwise 0"),
)

MEMORY = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("kind", "u1", "enum", "memory kind (purpose of the arrays)"),
    Column("bytes", "i8", "B", "bytes allocated at the end of the step", 0),
    Column("peak", "i8", "B", "peak number of bytes allocated during the step", 0),
)

EVALUATION = (
    Column("step", "i4", "1", "training step before the evaluation", 0),
    Column("loss", "f8", "nat", "mean loss per target token, NaN if unknown", optional=True),
    Column("tokens", "i8", "1", "number of target tokens, or of samples of a PyTorch module", 0),
    Column(
        *("accuracy", "f8", "1"),
        "fraction of correctly predicted target tokens, NaN for a PyTorch module",
        optional=True,
    ),
    Column("seconds", "f8", "s", "duration on rank 0", 0),
)

VALIDATION = (
    Column("step", "i4", "1", "training step before the evaluation", 0),
    Column("text", "i4", "1", "index of the text in data.validation", 0),
    *(column for column in EVALUATION if column.name in ("loss", "tokens", "accuracy")),
)

EXPERTS = (
    Column("rank", "i4", "1", "mesh rank that stores the tokens", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("layer", "i4", "1", "Transformer layer", 0),
    Column("expert", "i4", "1", "expert of the layer", 0),
    Column("chosen", "i8", "1", "number of tokens routed to the expert", 0),
    Column(
        "kept", "i8", "1", "number of routed tokens within the capacity; the others are dropped", 0
    ),
)

ROUTERS = (
    Column("rank", "i4", "1", "mesh rank that stores the tokens", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("layer", "i4", "1", "Transformer layer", 0),
    Column(
        "balance_loss",
        "f8",
        "nat",
        "load-balancing loss, summed over the rank's tokens and scaled by model.balance_loss",
    ),
    Column(
        "z_loss",
        "f8",
        "nat",
        "router z-loss, summed over the rank's tokens and scaled by model.z_loss",
        0,
    ),
)

RANKS = (
    Column("rank", "i4", "1", "rank in the mesh, equal to the row index", 0, "ranks"),
    Column("host_id", "i4", "index", "name of the rank's host, -1 if unknown", -1, "strings"),
    Column("local_rank", "i4", "1", "index of the rank on its host, -1 if unknown", -1),
    Column("device", TEXT, "text", "compute device of the rank"),
    Column("pid", "i8", "1", "process id on the host, -1 if unknown", -1),
    Column("n_events", "i8", "1", "number of the rank's rows in /events", 0),
    Column(
        "dropped", "i8", "1", "number of events dropped because the rank's event table was full", 0
    ),
)
COORDS = Column("coords", "i4", "1", "mesh coordinates, shape [ranks, axes], -1 if unknown", -1)

GROUPS = (
    Column(
        "group_id",
        "i4",
        "index",
        "row index, referenced by /events/group",
        0,
        "groups",
    ),
    Column("axis", TEXT, "text", 'mesh axis or axes of the group, or "world"'),
    Column("size", "i4", "1", "number of members", 1),
    Column("offset", "i8", "index", "index of the group's first member in `members`", 0),
)
MEMBERS = Column("members", "i4", "1", "ranks of all groups, concatenated", 0, "ranks")

CLOCK_SAMPLES = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("t_local", "i8", "ns", "time of the exchange on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "the peer's clock minus the rank's own clock"),
    Column("rtt_ns", "i8", "ns", "round-trip time of the exchange", 0),
    Column("round", "i4", "1", "index of the synchronization", 0),
    Column(
        "peer",
        "i4",
        "1",
        "rank whose clock is read: the first rank of the parent host in the synchronization tree",
        0,
        "ranks",
    ),
)

CLOCK_MODEL = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("t0", "i8", "ns", "start of the segment on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "rank 0's clock minus the rank's own clock at t0"),
    Column("drift", "f8", "1", "change of the offset per unit of local time"),
    Column(
        "resid_p99_ns",
        "f8",
        "ns",
        "99th percentile, over all samples, of"
        " max(0, abs(measured offset - model offset) - rtt_ns / 2)",
        0,
    ),
)

CALIBRATION = (
    Column("bytes", "i8", "B", "bytes that a rank must receive in a call", 0),
    Column("t_min", "f8", "s", "shortest time of a call", 0),
    Column("t_median", "f8", "s", "median time of a call", 0),
    Column("t_p95", "f8", "s", "95th percentile of the call times", 0),
    Column("reps", "i8", "1", "number of timed calls", 1),
)

PREDICTION = (
    Column("step", "i4", "1", "training step, -1 for all steps", -1),
    Column(
        "quantity",
        TEXT,
        "text",
        "name of the predicted quantity, ending in its unit: _s, _bytes or _flop",
    ),
    Column("stage", "i2", "1", "pipeline stage, -1 for all stages", -1),
    Column("rank", "i4", "1", "rank in the mesh, -1 for all ranks", -1, "ranks"),
    Column("value", "f8", "SI", "predicted value"),
)

STRINGS = (Column("name", TEXT, "text", "unique name of an event or host"),)
RANK_PTR = Column(
    "rank_ptr",
    "i8",
    "index",
    "index of each rank's first row in /events; the last entry is the number of rows",
    0,
)


class TableSchema(NamedTuple):
    """HDF5 group of a trace file, with its description and columns."""

    description: str
    columns: tuple = ()


LAYOUT = {
    "/": TableSchema(
        "Events, communication and memory of the ranks of a training run; see docs/trace.md."
    ),
    "strings": TableSchema(
        "String table with the names of events and hosts. Other tables refer to it by row index.",
        STRINGS,
    ),
    "ranks": TableSchema("One row per rank.", (*RANKS, COORDS)),
    "groups": TableSchema("One row per group of communicating ranks.", (*GROUPS, MEMBERS)),
    "clock": TableSchema(
        "Measured and modeled offsets of the hosts' clocks relative to rank 0's clock."
    ),
    "clock/samples": TableSchema(
        "One row per message exchange that compares the clocks of two hosts. The error of the"
        " offset is at most half of the round-trip time.",
        CLOCK_SAMPLES,
    ),
    "clock/model": TableSchema(
        "One row per linear segment of a rank's clock model. For a time t on the rank's own clock,"
        " t_global = t + offset_ns + drift (t - t0). The segment with the largest t0 <= t applies;"
        " earlier times use the first one.",
        CLOCK_MODEL,
    ),
    "events": TableSchema(
        "One row per event of a rank, sorted by (rank, t_start). An enclosing event precedes the"
        " events that it encloses.",
        EVENTS,
    ),
    "index": TableSchema("Range of the rows of each rank in /events.", (RANK_PTR,)),
    "memory": TableSchema("One row per rank, completed step and memory kind.", MEMORY),
    "steps": TableSchema("One row per rank and completed step.", STEPS),
    "evaluation": TableSchema(
        "One row per evaluation on held-out text. The values are aggregated over all ranks."
        " The events of an evaluation have the phase evaluation and step -1. If there are several"
        " validation texts, the loss and the accuracy are means over the texts.",
        EVALUATION,
    ),
    "validation": TableSchema(
        "One row per evaluation and validation text, if there are several validation texts.",
        VALIDATION,
    ),
    "experts": TableSchema(
        "One row per completed step, mixture-of-experts layer, expert and rank that routes tokens."
        " Each token is routed on one rank, so the sum over ranks counts every token once.",
        EXPERTS,
    ),
    "routers": TableSchema(
        "One row per completed step, mixture-of-experts layer and rank that routes tokens, with"
        " the rank's contribution to the auxiliary router losses.",
        ROUTERS,
    ),
    "calibration": TableSchema(
        "Call times measured in isolation, with one HDF5 group per operation and mesh axis."
    ),
    "calibration/<op>": TableSchema(
        "Call times of one operation, with one HDF5 group per mesh axis."
    ),
    "calibration/<op>/<axis>": TableSchema(
        "One row per message size. The times are fitted by t = alpha + beta * bytes, with the"
        " attributes alpha in s and beta in s/B.",
        CALIBRATION,
    ),
    "prediction": TableSchema(
        "One row per quantity predicted for the run on the machine in the attribute machine.",
        PREDICTION,
    ),
}


class Attribute(NamedTuple):
    """Attribute of the root group. Readers reject files that lack a `required` attribute."""

    name: str
    type: type
    description: str
    required: bool = False


ATTRIBUTES = (
    Attribute("format", str, f'"{FORMAT}"', True),
    Attribute("version", int, f"{VERSION}; readers reject files with a higher version", True),
    Attribute("hpc3d_version", str, "version of the program"),
    Attribute("kind", str, '"measured" or "simulated"'),
    Attribute("run_id", str, "name of the run's folder", True),
    Attribute("created_utc", str, "start of the run, ISO 8601"),
    Attribute("world_size", int, "number of ranks", True),
    Attribute(
        "axes",
        str,
        "names of the mesh axes, in row-major order: the rank varies fastest along the last axis",
        True,
    ),
    Attribute(
        "axis_sizes",
        list,
        "number of ranks along each mesh axis; for the data axis d, whose size may differ between"
        " pipeline stages, the maximum",
        True,
    ),
    Attribute("time_unit", str, '"ns"'),
    Attribute("config", str, "resolved input file, TOML", True),
    Attribute("git", str, "revision of the source"),
    Attribute("mpi", str, "MPI library"),
    Attribute("device", str, "compute devices of the ranks"),
    Attribute("transport", str, "communication transport used along the mesh axes"),
    Attribute("cores", int, "number of usable CPU cores on rank 0's host, 0 if unknown"),
    Attribute("segments", int, "number of merged segment files"),
    Attribute(
        "complete", bool, "true if all configured steps are recorded without missing data", True
    ),
    Attribute("missing", str, "missing data, one item per line", True),
    Attribute("other_layout", str, "file with the earlier steps, if their layout was another one"),
)


def record_type(columns: Sequence[Column]) -> np.dtype:
    """Return the NumPy record type of a table."""
    return np.dtype([(column.name, column.type) for column in columns])


def item_sizes(labels: Mapping[int, str]) -> np.ndarray:
    """Return the number of bytes per element for each of the 256 type codes, 0 if unknown.

    `labels` maps type codes to names.
    """
    names = (labels.get(code, "") for code in range(256))
    return np.array([itemsize(name) if name in DTYPE else 0 for name in names])
