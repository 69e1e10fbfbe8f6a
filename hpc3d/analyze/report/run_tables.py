"""The tables of a run, in the order of a report: headings, units, and where the numbers are
from."""

from hpc3d.analyze.report.table_format import (
    Field,
    Sheet,
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

RANK = Field("rank", "rank", number)
HOST = Field("host", "host")
STAGE = Field("stage", "stage", number)
PHASE = Field("phase", "phase")
AXIS = Field("axis", "axis")
OP = Field("op", "operation")
CATEGORY = Field("category", "category")
SECONDS = Field("seconds", "time [ms]", milliseconds)
SHARE = Field("share", "share", percent)

STEP = Sheet(
    "step",
    "Step",
    (
        Field("steps", "steps", integer),
        Field("first", "from", integer),
        Field("last", "to", integer),
        Field("step_s_min", "min [ms]", milliseconds),
        Field("step_s_25", "25 % [ms]", milliseconds),
        Field("step_s_median", "median [ms]", milliseconds),
        Field("step_s_75", "75 % [ms]", milliseconds),
        Field("step_s_max", "max [ms]", milliseconds),
        Field("forward_s", "forward [ms]", milliseconds),
        Field("backward_s", "backward [ms]", milliseconds),
        Field("tokens_per_s", "tokens/s", prefixed),
        Field("communication_share", "communication", percent),
    ),
)
EFFICIENCY = Sheet(
    "efficiency",
    "Arithmetic",
    (
        Field("model_flop", "model [FLOP]", prefixed),
        Field("recorded_flop", "recorded [FLOP]", prefixed),
        Field("flop_per_s", "model [FLOP/s]", prefixed),
        Field("recorded_flop_per_s", "recorded [FLOP/s]", prefixed),
        Field("mfu", "MFU", percent),
        Field("hfu", "HFU", percent),
    ),
)
TIME = Sheet(
    "time",
    "Time of a step",
    (
        CATEGORY,
        PHASE,
        AXIS,
        OP,
        SECONDS,
        SHARE,
        Field("calls", "calls", count),
        Field("bytes", "received [B]", prefixed),
        Field("flop_per_s", "rate [FLOP/s]", prefixed),
    ),
)
BETWEEN = Sheet(
    "between",
    "Time between steps",
    (
        Field("name", "what"),
        CATEGORY,
        Field("times", "times", count),
        Field("mean_s", "mean [ms]", milliseconds),
        Field("longest_s", "longest [ms]", milliseconds),
        SECONDS._replace(heading="in all [ms]"),
    ),
)
LAYERS = Sheet(
    "layers",
    "Time by layer",
    (Field("layer", "layer", layer), PHASE, CATEGORY, SECONDS, SHARE),
    brief=10,
)
RANKS = Sheet(
    "ranks",
    "Time by rank",
    (
        RANK,
        HOST,
        STAGE,
        Field("step_s", "step [ms]", milliseconds),
        Field("compute_s", "compute [ms]", milliseconds),
        Field("wait_s", "wait [ms]", milliseconds),
        Field("transfer_s", "transfer [ms]", milliseconds),
        Field("exposed_s", "exposed [ms]", milliseconds),
        Field("copy_s", "copy [ms]", milliseconds),
        Field("other_s", "other [ms]", milliseconds),
        Field("unrecorded_s", "unrecorded [ms]", milliseconds),
        Field("outstanding_s", "a call outstanding [ms]", milliseconds),
    ),
    brief=8,
)
IMBALANCE = Sheet(
    "imbalance",
    "Imbalance of computation",
    (
        PHASE,
        Field("mean_s", "mean [ms]", milliseconds),
        Field("max_s", "max [ms]", milliseconds),
        Field("imbalance", "max / mean", ratio),
        Field("rank", "on rank", number),
    ),
)
WAITS = Sheet(
    "waits",
    "Waiting and transfer",
    (
        AXIS,
        OP,
        Field("calls", "calls", count),
        Field("blocked_s", "blocked [ms]", milliseconds),
        Field("wait_s", "wait [ms]", milliseconds),
        Field("transfer_s", "transfer [ms]", milliseconds),
        Field("violations", "violations", integer),
        Field("worst_s", "worst [us]", microseconds),
    ),
)
STRAGGLERS = Sheet(
    "stragglers",
    "Who is waited for",
    (
        RANK,
        HOST,
        Field("meetings", "meetings", integer),
        Field("last", "arrives last", integer),
        Field("imposed_s", "others wait for it [ms]", milliseconds),
        Field("wait_s", "waits itself [ms]", milliseconds),
        Field("work_s", "works [ms]", milliseconds),
        Field("straggler", "straggler"),
    ),
    brief=5,
)
PATH = Sheet(
    "path",
    "Critical path",
    (CATEGORY, PHASE, AXIS, OP, SECONDS, SHARE),
    brief=10,
)
COLLECTIVES = Sheet(
    "collectives",
    "Collectives and messages",
    (
        AXIS,
        OP,
        Field("members", "members", integer),
        Field("size", "size [B]", integer),
        Field("count", "count", integer),
        Field("seconds", "median [us]", microseconds),
        Field("algbw", "algbw [B/s]", prefixed),
        Field("busbw", "busbw [B/s]", prefixed),
        Field("later", "waited for later", percent),
    ),
    brief=12,
)
TRAFFIC = Sheet(
    "traffic",
    "Bytes from rank to rank",
    (
        AXIS,
        Field("sender", "sender", number),
        Field("receiver", "receiver", number),
        Field("bytes", "bytes [B]", prefixed),
    ),
    brief=-1,
)
CROSSING = Sheet(
    "crossing",
    "Between hosts",
    (
        HOST,
        Field("ranks", "ranks", integer),
        Field("calls", "calls", count),
        Field("bytes", "received [B]", prefixed),
        Field("crossing", "from other hosts [B]", prefixed),
        Field("on_cards", "on cards [B]", prefixed),
    ),
    brief=8,
)
CROSSING_PAIRS = Sheet(
    "crossing_pairs",
    "Bytes from host to host",
    (
        Field("sender_host", "sender"),
        Field("receiver_host", "receiver"),
        Field("bytes", "bytes [B]", prefixed),
    ),
    brief=-1,
)
PIPELINE = Sheet(
    "pipeline",
    "Pipeline",
    (
        STAGE,
        Field("ranks", "ranks", integer),
        Field("passes", "passes", integer),
        Field("forward_s", "F [ms]", milliseconds),
        Field("backward_s", "BW [ms]", milliseconds),
        Field("input_s", "B [ms]", milliseconds),
        Field("weight_s", "W [ms]", milliseconds),
        Field("idle_share", "idle", percent),
        Field("idle_share_simulated", "idle, simulated", percent),
        Field("in_flight", "in flight", integer),
        Field("in_flight_simulated", "in flight, simulated", integer),
    ),
)
BUBBLE = Sheet(
    "bubble",
    "Bubble",
    (
        STAGE,
        Field("span_s", "all passes [ms]", milliseconds),
        Field("idle_s", "idle [ms]", milliseconds),
        Field("warmup_s", "warm-up [ms]", milliseconds),
        Field("steady_s", "steady [ms]", milliseconds),
        Field("drain_s", "drain [ms]", milliseconds),
    ),
)
MEMORY = Sheet(
    "memory",
    "Memory",
    (
        Field("kind", "kind"),
        Field("peak", "highest peak [B]", prefixed),
        RANK._replace(heading="on rank"),
    ),
)
MEMORY_RANKS = Sheet(
    "memory_ranks",
    "Memory by rank",
    (
        Field("rank", "rank", number),
        *(Field(kind, f"{kind} [B]", prefixed) for kind in MEMORY_KIND),
    ),
    brief=-1,
)
PREDICTION = Sheet(
    "prediction",
    "Prediction",
    (
        Field("quantity", "quantity"),
        STAGE,
        RANK,
        Field("predicted", "predicted", prefixed),
        Field("measured", "measured", prefixed),
        Field("ratio", "predicted / measured", ratio),
    ),
)
LOSS = Sheet(
    "loss",
    "Loss",
    (
        Field("step", "step", integer),
        Field("loss", "loss [nat]", "{:.6f}".format),
        Field("grad_norm", "norm of the gradient", "{:.4f}".format),
    ),
    brief=-1,
)

OF_A_RUN = (
    *(STEP, EFFICIENCY, PREDICTION, LOSS),
    *(TIME, BETWEEN, LAYERS, RANKS, IMBALANCE),
    *(WAITS, STRAGGLERS, PATH),
    *(COLLECTIVES, TRAFFIC, CROSSING, CROSSING_PAIRS),
    *(PIPELINE, BUBBLE),
    *(MEMORY, MEMORY_RANKS),
)
