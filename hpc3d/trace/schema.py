"""What a trace consists of: one definition for the recorder, the file, its reader and its page.

A table is a tuple of columns and a NumPy record type.  Enumerations are tuples of names: the value
stored is the index of the name.  `LAYOUT` says where in the file each table lies.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "graph",  # all that a CUDA graph replays
)
MEMORY_KIND = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "communication",
    "workspace",
    "all",  # of them together: what decides whether a run fits
    "offloaded",  # outside of the memory that these are in, and not among them
)
# Of a rank that computes on a device.
STREAM = ("host", "computation", "communication", "replicas", "offload")
DTYPE = ("none", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")

ENUMS = {"category": CATEGORY, "phase": PHASE, "op": OP, "kind": MEMORY_KIND, "dtype": DTYPE}

TEXT = "text"  # the type of columns of UTF-8 strings


class Column(NamedTuple):
    """One column: its NumPy type or TEXT, its unit and its meaning.

    `least` is the smallest value it may have, and `into` the table whose rows its values count.
    Numbers are finite, unless it is `optional`: then NaN stands for one that is not known.
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
        """The array of no values, as a reader gives it."""
        return np.empty(0, object if self.type == TEXT else self.type)


EVENTS = (
    Column("t_start", "i8", "ns", "start on the rank's own clock, raw"),
    Column("t_global", "i8", "ns", "start on rank 0's clock, corrected by /clock/model"),
    Column("dur", "i8", "ns", "duration on the rank's own clock", 0),
    Column("posted", "i8", "ns", "when a call was made, raw; t_start is when it was waited for"),
    Column("name", "u4", "index", "what was done", 0, "strings"),
    Column("category", "u1", "enum", "what the time went into"),
    Column("phase", "u1", "enum", "part of the training step"),
    Column("op", "u1", "enum", "operation"),
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step, -1 outside of steps", -1),
    Column("microbatch", "i4", "1", "microbatch of the step, -1 where it has no meaning", -1),
    Column("stage", "i2", "1", "pipeline stage, -1 where it has no meaning", -1),
    Column("chunk", "i2", "1", "model chunk of the stage, -1 where it has no meaning", -1),
    Column("layer", "i4", "1", "Transformer layer, -1 outside of the layers", -1),
    Column("stream", "i2", "1", "execution stream of the device, 0 on the CPU", 0),
    Column("group", "i4", "index", "ranks that communicate, -1 without", -1, "groups"),
    Column("seq", "i4", "1", "number of the call in its sequence, -1 for none", -1),
    Column("peer", "i4", "1", "rank in the mesh of the peer or root, -1 for none", -1, "ranks"),
    Column("bytes", "i8", "B", "what this rank must receive; of a send or a copy, its size", 0),
    Column("count", "i8", "1", "elements of the block that went in", 0),
    Column("dtype", "u1", "enum", "type of the elements"),
    Column("flops", "f8", "flop", "floating-point operations of the event", 0),
    Column("parent", "i8", "index", "event that encloses this one, -1 for none", -1, "events"),
    Column("flags", "u2", "bits", "reserved, 0"),
)

STEPS = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("t_start", "i8", "ns", "start on the rank's own clock, raw"),
    Column("t_end", "i8", "ns", "end on the rank's own clock, raw"),
    Column("tokens", "i8", "1", "tokens of the global batch", 0),
    Column("loss", "f8", "nat", "mean loss a token, NaN if unknown", optional=True),
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
    Column("skipped", "u1", "1", "1 where the update was skipped"),
)

MEMORY = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("kind", "u1", "enum", "what the arrays are for"),
    Column("bytes", "i8", "B", "live at the end of the step", 0),
    Column("peak", "i8", "B", "highest of the step", 0),
)

EVALUATION = (
    Column("step", "i4", "1", "training step that it came after", 0),
    Column("loss", "f8", "nat", "mean loss a token that counts, NaN if unknown", optional=True),
    Column("tokens", "i8", "1", "tokens that count", 0),
    Column("accuracy", "f8", "1", "share of them that are predicted right", optional=True),
    Column("seconds", "f8", "s", "what it took, on rank 0", 0),
)

EXPERTS = (
    Column("rank", "i4", "1", "rank in the mesh where the tokens are", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("layer", "i4", "1", "Transformer layer", 0),
    Column("expert", "i4", "1", "expert of the layer", 0),
    Column("chosen", "i8", "1", "choices of tokens that fell on it", 0),
    Column("kept", "i8", "1", "those of them that found a slot; the others are dropped", 0),
)

ROUTERS = (
    Column("rank", "i4", "1", "rank in the mesh where the tokens are", 0, "ranks"),
    Column("step", "i4", "1", "training step", 0),
    Column("layer", "i4", "1", "Transformer layer", 0),
    Column("balance_loss", "f8", "nat", "sum over its tokens, times model.balance_loss"),
    Column("z_loss", "f8", "nat", "sum over its tokens, times model.z_loss", 0),
)

RANKS = (
    Column("rank", "i4", "1", "rank in the mesh: the number of the row", 0, "ranks"),
    Column("host_id", "i4", "index", "name of the rank's host, -1 if unknown", -1, "strings"),
    Column("local_rank", "i4", "1", "rank on the host, -1 if unknown", -1),
    Column("device", TEXT, "text", "device the rank computes on"),
    Column("pid", "i8", "1", "process id on the host, -1 if unknown", -1),
    Column("n_events", "i8", "1", "rows of the rank in /events", 0),
    Column("dropped", "i8", "1", "events that found the rank's table full", 0),
)
COORDS = Column("coords", "i4", "1", "coordinates [ranks, axes] in the mesh, -1 if unknown", -1)

GROUPS = (
    Column(
        "group_id", "i4", "index", "number of the row, the value of /events/group", 0, "groups"
    ),
    Column("axis", TEXT, "text", "mesh axis or axes that the group lies along, or world"),
    Column("size", "i4", "1", "members of the group", 1),
    Column("offset", "i8", "index", "where in members the group begins", 0),
)
MEMBERS = Column(
    "members", "i4", "1", "ranks of all groups, one group after the other", 0, "ranks"
)

CLOCK_SAMPLES = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("t_local", "i8", "ns", "time of the exchange on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "the peer's clock minus the rank's own"),
    Column("rtt_ns", "i8", "ns", "round-trip time of the exchange", 0),
    Column("round", "i4", "1", "counter of the synchronisations", 0),
    Column(
        "peer", "i4", "1", "rank that was asked: 0, or one nearer to it in the tree", 0, "ranks"
    ),
)

CLOCK_MODEL = (
    Column("rank", "i4", "1", "rank in the mesh", 0, "ranks"),
    Column("t0", "i8", "ns", "origin of the model on the rank's own clock"),
    Column("offset_ns", "f8", "ns", "rank 0's clock minus the rank's own at t0"),
    Column("drift", "f8", "1", "change of the offset a unit of time"),
    Column("resid_p99_ns", "f8", "ns", "99th percentile of the samples' distance from it", 0),
)

CALIBRATION = (
    Column("bytes", "i8", "B", "what a rank must receive in a call", 0),
    Column("t_min", "f8", "s", "shortest time of a call", 0),
    Column("t_median", "f8", "s", "median time of a call", 0),
    Column("t_p95", "f8", "s", "95th percentile of the times", 0),
    Column("reps", "i8", "1", "calls that were timed", 1),
)

PREDICTION = (
    Column("step", "i4", "1", "training step, -1 for any", -1),
    Column("quantity", TEXT, "text", "what is predicted; ends in its SI unit: _s, _bytes, _flop"),
    Column("stage", "i2", "1", "pipeline stage, -1 for the whole", -1),
    Column("rank", "i4", "1", "rank in the mesh, -1 for all of them", -1, "ranks"),
    Column("value", "f8", "SI", "the predicted value"),
)

STRINGS = (Column("name", TEXT, "text", "a name; no other row has it"),)
RANK_PTR = Column("rank_ptr", "i8", "index", "rank r owns rows rank_ptr[r] to rank_ptr[r + 1]", 0)


class TableSchema(NamedTuple):
    """A group of the file: what it holds, and its datasets."""

    description: str
    columns: tuple = ()


LAYOUT = {
    "/": TableSchema(
        "What the ranks of a training run did, and what it cost; docs/trace.md explains it."
    ),
    "strings": TableSchema("Names of events and of hosts, which other tables count.", STRINGS),
    "ranks": TableSchema("One row per rank.", (*RANKS, COORDS)),
    "groups": TableSchema("One row per group of ranks that communicate.", (*GROUPS, MEMBERS)),
    "clock": TableSchema("How far the hosts' clocks are from that of rank 0."),
    "clock/samples": TableSchema(
        "One row per exchange between the clocks of two hosts, which bounds their offset by half"
        " of its round trip.",
        CLOCK_SAMPLES,
    ),
    "clock/model": TableSchema(
        "One row per piece of a rank's clock: t_global = t + offset_ns + drift (t - t0) for the"
        " last t0 <= t, and before them all for the first.",
        CLOCK_MODEL,
    ),
    "events": TableSchema(
        "One row per thing that a rank did, sorted by (rank, t_start); one that encloses others"
        " comes before them.",
        EVENTS,
    ),
    "index": TableSchema("Where in /events the rows of a rank are.", (RANK_PTR,)),
    "memory": TableSchema("One row per rank, completed step and kind of arrays.", MEMORY),
    "steps": TableSchema("One row per rank and completed step.", STEPS),
    "evaluation": TableSchema(
        "One row per evaluation on text that is not trained on, for all ranks together; its events"
        " are of no step and of phase evaluation.",
        EVALUATION,
    ),
    "experts": TableSchema(
        "One row per completed step, layer with a mixture of experts, expert, and rank that"
        " routes: each token is routed on one rank, so rows add up to those of all tokens.",
        EXPERTS,
    ),
    "routers": TableSchema(
        "One row per completed step, layer with a mixture of experts, and rank that routes: its"
        " part of what the router adds to the summed loss.",
        ROUTERS,
    ),
    "calibration": TableSchema(
        "What calls cost by themselves, one group per operation and mesh axis."
    ),
    "calibration/<op>": TableSchema("Calls of one operation, one group per mesh axis."),
    "calibration/<op>/<axis>": TableSchema(
        "One row per size of a call; its attributes fit a line to them: t = alpha + beta bytes,"
        " alpha in s and beta in s/B.",
        CALIBRATION,
    ),
    "prediction": TableSchema(
        "One row per quantity that a model of the run predicts.", PREDICTION
    ),
}


class Attribute(NamedTuple):
    """An attribute of the root; a file without one that is `required` is damaged."""

    name: str
    type: type
    description: str
    required: bool = False


ATTRIBUTES = (
    Attribute("format", str, f'"{FORMAT}"', True),
    Attribute("version", int, f"{VERSION}; a reader refuses a file with a higher one", True),
    Attribute("hpc3d_version", str, "version of the program"),
    Attribute("kind", str, '"measured" or "simulated"'),
    Attribute("run_id", str, "name of the run's folder", True),
    Attribute("created_utc", str, "when the run began, ISO 8601"),
    Attribute("world_size", int, "number of ranks", True),
    Attribute("axes", str, "mesh axes, the last varies fastest from rank to rank", True),
    Attribute("axis_sizes", list, "their sizes (d: that of the largest pipeline stage)", True),
    Attribute("time_unit", str, '"ns"'),
    Attribute("config", str, "the resolved input file, TOML", True),
    Attribute("git", str, "revision of the source"),
    Attribute("mpi", str, "MPI library"),
    Attribute("device", str, "devices that the ranks compute on"),
    Attribute("transport", str, "the way that ranks talk along the axes of the mesh"),
    Attribute("cores", int, "CPU cores of rank 0's host that the run may use, 0 if unknown"),
    Attribute("segments", int, "files of the ranks that were merged into this one"),
    Attribute("complete", bool, "whether all that the run was to do is here", True),
    Attribute("missing", str, "what is not, a line each", True),
)


def record_type(columns: Sequence[Column]) -> np.dtype:
    """The NumPy record type of a table."""
    return np.dtype([(column.name, column.type) for column in columns])
