"""Specifications of the tables of a run, in report order: titles, columns, headings and units."""

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

_RANK = ColumnSpec("rank", "rank", number)
_HOST = ColumnSpec("host", "host")
_STAGE = ColumnSpec("stage", "stage", number)
PHASE = ColumnSpec("phase", "phase")
AXIS = ColumnSpec("axis", "axis")
OP = ColumnSpec("op", "operation")
CATEGORY = ColumnSpec("category", "category")
_SECONDS = ColumnSpec("seconds", "time [ms]", milliseconds)
_SHARE = ColumnSpec("share", "share", percent)
_DROPPED = ColumnSpec("dropped", "dropped", percent)
_UNUSED = ColumnSpec("empty", "unused capacity", percent)

_STEP = TableSpec(
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
_EFFICIENCY = TableSpec(
    "efficiency",
    "Efficiency",
    (
        ColumnSpec("model_flop", "model [FLOP]", prefixed),
        ColumnSpec("recorded_flop", "recorded [FLOP]", prefixed),
        ColumnSpec("flop_per_s", "model [FLOP/s]", prefixed),
        ColumnSpec("recorded_flop_per_s", "recorded [FLOP/s]", prefixed),
        ColumnSpec("mfu", "MFU", percent),
        ColumnSpec("hfu", "HFU", percent),
    ),
)
_TIME = TableSpec(
    "time",
    "Step time",
    (
        CATEGORY,
        PHASE,
        AXIS,
        OP,
        _SECONDS,
        _SHARE,
        ColumnSpec("calls", "calls", count),
        ColumnSpec("bytes", "received [B]", prefixed),
        ColumnSpec("flop_per_s", "rate [FLOP/s]", prefixed),
    ),
)
_BETWEEN = TableSpec(
    "between",
    "Time between steps",
    (
        ColumnSpec("name", "activity"),
        CATEGORY,
        ColumnSpec("times", "count", count),
        ColumnSpec("mean_s", "mean [ms]", milliseconds),
        ColumnSpec("longest_s", "longest [ms]", milliseconds),
        _SECONDS._replace(heading="total [ms]"),
    ),
)
_LAYERS = TableSpec(
    "layers",
    "Time by layer",
    (ColumnSpec("layer", "layer", layer), PHASE, CATEGORY, _SECONDS, _SHARE),
    rows_shown=10,
)
_RANKS = TableSpec(
    "ranks",
    "Time by rank",
    (
        _RANK,
        _HOST,
        _STAGE,
        ColumnSpec("step_s", "step [ms]", milliseconds),
        ColumnSpec("compute_s", "compute [ms]", milliseconds),
        ColumnSpec("wait_s", "wait [ms]", milliseconds),
        ColumnSpec("transfer_s", "transfer [ms]", milliseconds),
        ColumnSpec("exposed_s", "exposed [ms]", milliseconds),
        ColumnSpec("copy_s", "copy [ms]", milliseconds),
        ColumnSpec("other_s", "other [ms]", milliseconds),
        ColumnSpec("unrecorded_s", "unrecorded [ms]", milliseconds),
        ColumnSpec("outstanding_s", "outstanding call [ms]", milliseconds),
    ),
    rows_shown=8,
)
_IMBALANCE = TableSpec(
    "imbalance",
    "Compute imbalance",
    (
        PHASE,
        ColumnSpec("mean_s", "mean [ms]", milliseconds),
        ColumnSpec("max_s", "max [ms]", milliseconds),
        ColumnSpec("imbalance", "max / mean", ratio),
        ColumnSpec("rank", "on rank", number),
    ),
)
_WAITS = TableSpec(
    "waits",
    "Wait and transfer time",
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
_STRAGGLERS = TableSpec(
    "stragglers",
    "Stragglers",
    (
        _RANK,
        _HOST,
        ColumnSpec("meetings", "calls", integer),
        ColumnSpec("last", "arrives last", integer),
        ColumnSpec("imposed_s", "imposed wait [ms]", milliseconds),
        ColumnSpec("wait_s", "own wait [ms]", milliseconds),
        ColumnSpec("work_s", "busy [ms]", milliseconds),
        ColumnSpec("straggler", "straggler"),
    ),
    rows_shown=5,
)
_PATH = TableSpec(
    "path",
    "Critical path",
    (CATEGORY, PHASE, AXIS, OP, _SECONDS, _SHARE),
    rows_shown=10,
)
_COLLECTIVES = TableSpec(
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
        ColumnSpec("later", "deferred wait", percent),
    ),
    rows_shown=12,
)
_TRAFFIC = TableSpec(
    "traffic",
    "Bytes between ranks",
    (
        AXIS,
        ColumnSpec("sender", "sender", number),
        ColumnSpec("receiver", "receiver", number),
        ColumnSpec("bytes", "bytes [B]", prefixed),
    ),
    rows_shown=-1,
)
_CROSSING = TableSpec(
    "crossing",
    "Traffic between hosts",
    (
        _HOST,
        ColumnSpec("ranks", "ranks", integer),
        ColumnSpec("calls", "calls", count),
        ColumnSpec("bytes", "received [B]", prefixed),
        ColumnSpec("crossing", "from other hosts [B]", prefixed),
        ColumnSpec("on_cards", "through NICs [B]", prefixed),
    ),
    rows_shown=8,
)
_CROSSING_PAIRS = TableSpec(
    "crossing_pairs",
    "Bytes between hosts",
    (
        ColumnSpec("sender_host", "sender"),
        ColumnSpec("receiver_host", "receiver"),
        ColumnSpec("bytes", "bytes [B]", prefixed),
    ),
    rows_shown=-1,
)
_PIPELINE = TableSpec(
    "pipeline",
    "Pipeline",
    (
        _STAGE,
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
_BUBBLE = TableSpec(
    "bubble",
    "Bubble",
    (
        _STAGE,
        ColumnSpec("span_s", "all passes [ms]", milliseconds),
        ColumnSpec("idle_s", "idle [ms]", milliseconds),
        ColumnSpec("warmup_s", "warmup [ms]", milliseconds),
        ColumnSpec("steady_s", "steady [ms]", milliseconds),
        ColumnSpec("drain_s", "drain [ms]", milliseconds),
    ),
)
_COPIES = TableSpec(
    "copies",
    "Offload copies",
    (
        ColumnSpec("name", "direction"),
        PHASE,
        ColumnSpec("copies", "copies", count),
        ColumnSpec("bytes", "copied [B]", prefixed),
        _SECONDS,
        ColumnSpec("byte_per_s", "rate [B/s]", prefixed),
        ColumnSpec("exposed_s", "exposed [ms]", milliseconds),
    ),
)
_MEMORY = TableSpec(
    "memory",
    "Memory",
    (
        ColumnSpec("kind", "kind"),
        ColumnSpec("peak", "highest peak [B]", prefixed),
        _RANK._replace(heading="on rank"),
    ),
)
_MEMORY_RANKS = TableSpec(
    "memory_ranks",
    "Memory by rank",
    (
        ColumnSpec("rank", "rank", number),
        *(ColumnSpec(kind, f"{kind} [B]", prefixed) for kind in MEMORY_KIND),
    ),
    rows_shown=-1,
)
_PREDICTION = TableSpec(
    "prediction",
    "Prediction",
    (
        ColumnSpec("quantity", "quantity"),
        _STAGE,
        _RANK,
        ColumnSpec("predicted", "predicted", prefixed),
        ColumnSpec("measured", "measured", prefixed),
        ColumnSpec("ratio", "predicted / measured", ratio),
    ),
)
_LOSS = TableSpec(
    "loss",
    "Loss",
    (
        ColumnSpec("step", "step", integer),
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("grad_norm", "gradient norm", "{:.4f}".format),
    ),
    rows_shown=-1,
)

_EVALUATION = TableSpec(
    "evaluation",
    "Evaluation",
    (
        ColumnSpec("step", "after step", integer),
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("perplexity", "perplexity", "{:.4f}".format),
        ColumnSpec("accuracy", "accuracy", percent),
        ColumnSpec("tokens", "tokens", integer),
        ColumnSpec("seconds", "time [ms]", milliseconds),
    ),
    rows_shown=10,
)

_EXPERT_COST = TableSpec(
    "expert_cost",
    "Cost of expert load imbalance",
    (
        ColumnSpec("slots", "capacity", integer),
        ColumnSpec("highest", "max / mean", ratio),
        _DROPPED,
        ColumnSpec("dropped_even", "dropped, balanced", percent),
        _UNUSED,
        ColumnSpec("empty_even", "unused, balanced", percent),
        ColumnSpec("empty_flop", "unused [FLOP]", prefixed),
        ColumnSpec("wait_s", "wait along e [ms]", milliseconds),
        ColumnSpec("wait_share", "share of step", percent),
        ColumnSpec("rank", "for rank", number),
        ColumnSpec("experts", "experts"),
        ColumnSpec("load", "load", ratio),
    ),
)
_EXPERTS = TableSpec(
    "experts",
    "Expert load",
    (
        ColumnSpec("layer", "layer", layer),
        ColumnSpec("expert", "expert", number),
        _SHARE._replace(heading="share of tokens"),
        ColumnSpec("load", "load", ratio),
        _DROPPED,
        _UNUSED,
    ),
    rows_shown=16,
)
_ROUTERS = TableSpec(
    "routers",
    "Expert load by step",
    (
        ColumnSpec("step", "step", integer),
        ColumnSpec("layer", "layer", layer),
        ColumnSpec("highest", "max / mean", ratio),
        ColumnSpec("fullest", "busiest expert", number),
        ColumnSpec("lowest", "min / mean", ratio),
        _DROPPED,
        _UNUSED,
        ColumnSpec("balance_loss", "balance loss [nat]", "{:.6f}".format),
        ColumnSpec("z_loss", "z loss [nat]", "{:.6f}".format),
    ),
    rows_shown=-1,
)
_EXCHANGES = TableSpec(
    "exchanges",
    "Dispatch and combine",
    (
        AXIS,
        PHASE,
        ColumnSpec("what", "exchange"),
        ColumnSpec("calls", "calls", count),
        ColumnSpec("bytes", "received [B]", prefixed),
        ColumnSpec("blocked_s", "blocked [ms]", milliseconds),
        ColumnSpec("wait_s", "wait [ms]", milliseconds),
        ColumnSpec("transfer_s", "transfer [ms]", milliseconds),
    ),
)

OF_A_RUN = (
    *(_STEP, _EFFICIENCY, _PREDICTION, _LOSS, _EVALUATION),
    *(_TIME, _BETWEEN, _LAYERS, _RANKS, _IMBALANCE),
    *(_WAITS, _STRAGGLERS, _PATH),
    *(_COLLECTIVES, _TRAFFIC, _CROSSING, _CROSSING_PAIRS),
    *(_PIPELINE, _BUBBLE),
    *(_EXPERT_COST, _EXPERTS, _ROUTERS, _EXCHANGES),
    *(_MEMORY, _MEMORY_RANKS, _COPIES),
)
