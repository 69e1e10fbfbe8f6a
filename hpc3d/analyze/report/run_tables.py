"""The tables of a run, in the order of a report: headings, units, and where the numbers are
from."""

from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    count,
    integer,
    layer,
    microseconds,
    milliseconds,
    number,
    percent,
    prefixed,
    ratio,
)
from hpc3d.trace.schema import MEMORY_KIND

RANK = ColumnSpec("rank", "rank", number)
HOST = ColumnSpec("host", "host")
STAGE = ColumnSpec("stage", "stage", number)
PHASE = ColumnSpec("phase", "phase")
AXIS = ColumnSpec("axis", "axis")
OP = ColumnSpec("op", "operation")
CATEGORY = ColumnSpec("category", "category")
SECONDS = ColumnSpec("seconds", "time [ms]", milliseconds)
SHARE = ColumnSpec("share", "share", percent)

STEP = TableSpec(
    "step",
    "Step",
    (
        ColumnSpec("steps", "steps", integer),
        ColumnSpec("first", "from", integer),
        ColumnSpec("last", "to", integer),
        ColumnSpec("step_s_min", "min [ms]", milliseconds),
        ColumnSpec("step_s_25", "25 % [ms]", milliseconds),
        ColumnSpec("step_s_median", "median [ms]", milliseconds),
        ColumnSpec("step_s_75", "75 % [ms]", milliseconds),
        ColumnSpec("step_s_max", "max [ms]", milliseconds),
        ColumnSpec("forward_s", "forward [ms]", milliseconds),
        ColumnSpec("backward_s", "backward [ms]", milliseconds),
        ColumnSpec("tokens_per_s", "tokens/s", prefixed),
        ColumnSpec("communication_share", "communication", percent),
    ),
)
EFFICIENCY = TableSpec(
    "efficiency",
    "Arithmetic",
    (
        ColumnSpec("model_flop", "model [FLOP]", prefixed),
        ColumnSpec("recorded_flop", "recorded [FLOP]", prefixed),
        ColumnSpec("flop_per_s", "model [FLOP/s]", prefixed),
        ColumnSpec("recorded_flop_per_s", "recorded [FLOP/s]", prefixed),
        ColumnSpec("mfu", "MFU", percent),
        ColumnSpec("hfu", "HFU", percent),
    ),
)
TIME = TableSpec(
    "time",
    "Time of a step",
    (
        CATEGORY,
        PHASE,
        AXIS,
        OP,
        SECONDS,
        SHARE,
        ColumnSpec("calls", "calls", count),
        ColumnSpec("bytes", "received [B]", prefixed),
        ColumnSpec("flop_per_s", "rate [FLOP/s]", prefixed),
    ),
)
BETWEEN = TableSpec(
    "between",
    "Time between steps",
    (
        ColumnSpec("name", "what"),
        CATEGORY,
        ColumnSpec("times", "times", count),
        ColumnSpec("mean_s", "mean [ms]", milliseconds),
        ColumnSpec("longest_s", "longest [ms]", milliseconds),
        SECONDS._replace(heading="in all [ms]"),
    ),
)
LAYERS = TableSpec(
    "layers",
    "Time by layer",
    (ColumnSpec("layer", "layer", layer), PHASE, CATEGORY, SECONDS, SHARE),
    rows_shown=10,
)
RANKS = TableSpec(
    "ranks",
    "Time by rank",
    (
        RANK,
        HOST,
        STAGE,
        ColumnSpec("step_s", "step [ms]", milliseconds),
        ColumnSpec("compute_s", "compute [ms]", milliseconds),
        ColumnSpec("wait_s", "wait [ms]", milliseconds),
        ColumnSpec("transfer_s", "transfer [ms]", milliseconds),
        ColumnSpec("exposed_s", "exposed [ms]", milliseconds),
        ColumnSpec("copy_s", "copy [ms]", milliseconds),
        ColumnSpec("other_s", "other [ms]", milliseconds),
        ColumnSpec("unrecorded_s", "unrecorded [ms]", milliseconds),
        ColumnSpec("outstanding_s", "a call outstanding [ms]", milliseconds),
    ),
    rows_shown=8,
)
IMBALANCE = TableSpec(
    "imbalance",
    "Imbalance of computation",
    (
        PHASE,
        ColumnSpec("mean_s", "mean [ms]", milliseconds),
        ColumnSpec("max_s", "max [ms]", milliseconds),
        ColumnSpec("imbalance", "max / mean", ratio),
        ColumnSpec("rank", "on rank", number),
    ),
)
WAITS = TableSpec(
    "waits",
    "Waiting and transfer",
    (
        AXIS,
        OP,
        ColumnSpec("calls", "calls", count),
        ColumnSpec("blocked_s", "blocked [ms]", milliseconds),
        ColumnSpec("wait_s", "wait [ms]", milliseconds),
        ColumnSpec("transfer_s", "transfer [ms]", milliseconds),
        ColumnSpec("violations", "violations", integer),
        ColumnSpec("worst_s", "worst [us]", microseconds),
    ),
)
STRAGGLERS = TableSpec(
    "stragglers",
    "Who is waited for",
    (
        RANK,
        HOST,
        ColumnSpec("meetings", "meetings", integer),
        ColumnSpec("last", "arrives last", integer),
        ColumnSpec("imposed_s", "others wait for it [ms]", milliseconds),
        ColumnSpec("wait_s", "waits itself [ms]", milliseconds),
        ColumnSpec("work_s", "works [ms]", milliseconds),
        ColumnSpec("straggler", "straggler"),
    ),
    rows_shown=5,
)
PATH = TableSpec(
    "path",
    "Critical path",
    (CATEGORY, PHASE, AXIS, OP, SECONDS, SHARE),
    rows_shown=10,
)
COLLECTIVES = TableSpec(
    "collectives",
    "Collectives and messages",
    (
        AXIS,
        OP,
        ColumnSpec("members", "members", integer),
        ColumnSpec("size", "size [B]", integer),
        ColumnSpec("count", "count", integer),
        ColumnSpec("seconds", "median [us]", microseconds),
        ColumnSpec("algbw", "algbw [B/s]", prefixed),
        ColumnSpec("busbw", "busbw [B/s]", prefixed),
        ColumnSpec("later", "waited for later", percent),
    ),
    rows_shown=12,
)
TRAFFIC = TableSpec(
    "traffic",
    "Bytes from rank to rank",
    (
        AXIS,
        ColumnSpec("sender", "sender", number),
        ColumnSpec("receiver", "receiver", number),
        ColumnSpec("bytes", "bytes [B]", prefixed),
    ),
    rows_shown=-1,
)
CROSSING = TableSpec(
    "crossing",
    "Between hosts",
    (
        HOST,
        ColumnSpec("ranks", "ranks", integer),
        ColumnSpec("calls", "calls", count),
        ColumnSpec("bytes", "received [B]", prefixed),
        ColumnSpec("crossing", "from other hosts [B]", prefixed),
        ColumnSpec("on_cards", "on cards [B]", prefixed),
    ),
    rows_shown=8,
)
CROSSING_PAIRS = TableSpec(
    "crossing_pairs",
    "Bytes from host to host",
    (
        ColumnSpec("sender_host", "sender"),
        ColumnSpec("receiver_host", "receiver"),
        ColumnSpec("bytes", "bytes [B]", prefixed),
    ),
    rows_shown=-1,
)
PIPELINE = TableSpec(
    "pipeline",
    "Pipeline",
    (
        STAGE,
        ColumnSpec("ranks", "ranks", integer),
        ColumnSpec("passes", "passes", integer),
        ColumnSpec("forward_s", "F [ms]", milliseconds),
        ColumnSpec("backward_s", "BW [ms]", milliseconds),
        ColumnSpec("input_s", "B [ms]", milliseconds),
        ColumnSpec("weight_s", "W [ms]", milliseconds),
        ColumnSpec("idle_share", "idle", percent),
        ColumnSpec("idle_share_simulated", "idle, simulated", percent),
        ColumnSpec("in_flight", "in flight", integer),
        ColumnSpec("in_flight_simulated", "in flight, simulated", integer),
    ),
)
BUBBLE = TableSpec(
    "bubble",
    "Bubble",
    (
        STAGE,
        ColumnSpec("span_s", "all passes [ms]", milliseconds),
        ColumnSpec("idle_s", "idle [ms]", milliseconds),
        ColumnSpec("warmup_s", "warm-up [ms]", milliseconds),
        ColumnSpec("steady_s", "steady [ms]", milliseconds),
        ColumnSpec("drain_s", "drain [ms]", milliseconds),
    ),
)
MEMORY = TableSpec(
    "memory",
    "Memory",
    (
        ColumnSpec("kind", "kind"),
        ColumnSpec("peak", "highest peak [B]", prefixed),
        RANK._replace(heading="on rank"),
    ),
)
MEMORY_RANKS = TableSpec(
    "memory_ranks",
    "Memory by rank",
    (
        ColumnSpec("rank", "rank", number),
        *(ColumnSpec(kind, f"{kind} [B]", prefixed) for kind in MEMORY_KIND),
    ),
    rows_shown=-1,
)
PREDICTION = TableSpec(
    "prediction",
    "Prediction",
    (
        ColumnSpec("quantity", "quantity"),
        STAGE,
        RANK,
        ColumnSpec("predicted", "predicted", prefixed),
        ColumnSpec("measured", "measured", prefixed),
        ColumnSpec("ratio", "predicted / measured", ratio),
    ),
)
LOSS = TableSpec(
    "loss",
    "Loss",
    (
        ColumnSpec("step", "step", integer),
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("grad_norm", "norm of the gradient", "{:.4f}".format),
    ),
    rows_shown=-1,
)

OF_A_RUN = (
    *(STEP, EFFICIENCY, PREDICTION, LOSS),
    *(TIME, BETWEEN, LAYERS, RANKS, IMBALANCE),
    *(WAITS, STRAGGLERS, PATH),
    *(COLLECTIVES, TRAFFIC, CROSSING, CROSSING_PAIRS),
    *(PIPELINE, BUBBLE),
    *(MEMORY, MEMORY_RANKS),
)
