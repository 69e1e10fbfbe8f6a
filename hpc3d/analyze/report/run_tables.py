"""Specifications of the tables of a run, in report order: titles, columns, headings and units."""

from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    columns,
    count,
    integer,
    layer,
    microseconds,
    milliseconds,
    number,
    percent,
    prefixed,
    ratio,
    times,
)
from hpc3d.trace.schema import MEMORY_KIND

_RANK = ColumnSpec("rank", "rank", number)
_HOST = ColumnSpec("host", "host")
_STAGE = ColumnSpec("stage", "stage", number)
PHASE = ColumnSpec("phase", "phase")
AXIS = ColumnSpec("axis", "axis")
OP = ColumnSpec("op", "operation")
CATEGORY = ColumnSpec("category", "category")
_CALLS = ColumnSpec("calls", "calls", count)
_RECEIVED = ColumnSpec("bytes", "received [B]", prefixed)
_LAYER = ColumnSpec("layer", "layer", layer)
_SECONDS = ColumnSpec("seconds", "time [ms]", milliseconds)
_ATTEMPT = ColumnSpec("attempt", "attempt", number)
_SHARE = ColumnSpec("share", "share", percent)
_EVALUATED = (
    ColumnSpec("step", "after step", integer),
    ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
    ColumnSpec("perplexity", "perplexity", "{:.4f}".format),
    ColumnSpec("accuracy", "accuracy", percent),
    ColumnSpec("tokens", "tokens", integer),
)
_LOADED = columns(percent, dropped="dropped", empty="unused capacity")

OF_A_RUN = (
    TableSpec(
        "step",
        "Step",
        (
            *columns(integer, steps="steps", first="from", last="to"),
            *columns(milliseconds, step_s_min="min [ms]", step_s_25="25 % [ms]"),
            *columns(milliseconds, step_s_median="median [ms]", step_s_75="75 % [ms]"),
            *columns(milliseconds, step_s_max="max [ms]"),
            *times("forward", "backward"),
            ColumnSpec("tokens_per_s", "tokens/s", prefixed),
            ColumnSpec("communication_share", "communication", percent),
        ),
    ),
    TableSpec(
        "attempts",
        "Attempts",
        (
            *columns(number, attempt="attempt"),
            ColumnSpec("layout", "layout"),
            *columns(integer, ranks="ranks", first="from", last="to"),
            *columns(integer, superseded="superseded from"),
            *columns(milliseconds, step_s="median step [ms]"),
            ColumnSpec("tokens_per_s", "tokens/s", prefixed),
            ColumnSpec("file", "trace"),
        ),
    ),
    TableSpec(
        "efficiency",
        "Efficiency",
        (
            *columns(prefixed, model_flop="model [FLOP]", recorded_flop="recorded [FLOP]"),
            *columns(prefixed, flop_per_s="model [FLOP/s]"),
            *columns(prefixed, recorded_flop_per_s="recorded [FLOP/s]"),
            *columns(percent, mfu="MFU", hfu="HFU"),
        ),
    ),
    TableSpec(
        "prediction",
        "Prediction",
        (
            ColumnSpec("machine", "machine"),
            ColumnSpec("quantity", "quantity"),
            _STAGE,
            _RANK,
            *columns(prefixed, predicted="predicted", measured="measured"),
            ColumnSpec("ratio", "predicted / measured", ratio),
        ),
    ),
    TableSpec(
        "loss",
        "Loss",
        (
            ColumnSpec("step", "step", integer),
            ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
            ColumnSpec("grad_norm", "gradient norm", "{:.4f}".format),
            _SECONDS,
            _ATTEMPT,
            ColumnSpec("superseded", "superseded in attempt"),
        ),
        rows_shown=-1,
    ),
    TableSpec("evaluation", "Evaluation", (*_EVALUATED, _SECONDS, _ATTEMPT), rows_shown=10),
    TableSpec(
        "validation",
        "Evaluation of each text",
        (ColumnSpec("text", "text"), *_EVALUATED, _ATTEMPT),
        rows_shown=10,
    ),
    TableSpec(
        "time",
        "Step time",
        (
            CATEGORY,
            PHASE,
            AXIS,
            OP,
            _SECONDS,
            _SHARE,
            _CALLS,
            _RECEIVED,
            ColumnSpec("flop_per_s", "rate [FLOP/s]", prefixed),
        ),
    ),
    TableSpec(
        "between",
        "Time between steps",
        (
            ColumnSpec("name", "activity"),
            CATEGORY,
            ColumnSpec("times", "count", count),
            *times("mean", "longest"),
            _SECONDS._replace(heading="total [ms]"),
        ),
    ),
    TableSpec(
        "layers",
        "Time by layer",
        (_LAYER, PHASE, CATEGORY, _SECONDS, _SHARE),
        rows_shown=10,
    ),
    TableSpec(
        "ranks",
        "Time by rank",
        (
            _RANK,
            _HOST,
            _STAGE,
            *times("step", "compute", "wait", "transfer", "exposed", "copy", "other"),
            *times("unrecorded"),
            ColumnSpec("outstanding_s", "outstanding call [ms]", milliseconds),
        ),
        rows_shown=8,
    ),
    TableSpec(
        "imbalance",
        "Compute imbalance",
        (
            PHASE,
            *times("mean", "max"),
            ColumnSpec("imbalance", "max / mean", ratio),
            _RANK._replace(heading="on rank"),
            ColumnSpec("stage_imbalance", "stages, max / mean", ratio),
            _STAGE._replace(heading="on stage"),
        ),
    ),
    TableSpec(
        "waits",
        "Wait and transfer time",
        (
            AXIS,
            OP,
            _CALLS,
            *times("blocked", "wait", "transfer"),
            ColumnSpec("violations", "violations", integer),
            ColumnSpec("worst_s", "worst [us]", microseconds),
        ),
    ),
    TableSpec(
        "stragglers",
        "Stragglers",
        (
            _RANK,
            _HOST,
            *columns(integer, peers="peers", meetings="calls", last="arrives last"),
            *columns(milliseconds, imposed_s="imposed wait [ms]", wait_s="own wait [ms]"),
            *columns(milliseconds, work_s="busy [ms]"),
            ColumnSpec("straggler", "straggler"),
        ),
        rows_shown=5,
    ),
    TableSpec(
        "path",
        "Critical path",
        (CATEGORY, PHASE, AXIS, OP, _SECONDS, _SHARE),
        rows_shown=10,
    ),
    TableSpec(
        "collectives",
        "Collectives and messages",
        (
            AXIS,
            OP,
            *columns(integer, members="members", size="size [B]", count="count"),
            ColumnSpec("seconds", "median [us]", microseconds),
            *columns(prefixed, algbw="algbw [B/s]", busbw="busbw [B/s]"),
            ColumnSpec("later", "deferred wait", percent),
        ),
        rows_shown=12,
    ),
    TableSpec(
        "traffic",
        "Bytes between ranks",
        (
            AXIS,
            *columns(number, sender="sender", receiver="receiver"),
            _RECEIVED._replace(heading="bytes [B]"),
        ),
        rows_shown=-1,
    ),
    TableSpec(
        "crossing",
        "Traffic between hosts",
        (
            _HOST,
            ColumnSpec("ranks", "ranks", integer),
            _CALLS,
            _RECEIVED,
            *columns(prefixed, crossing="from other hosts [B]", on_cards="through NICs [B]"),
        ),
        rows_shown=8,
    ),
    TableSpec(
        "crossing_pairs",
        "Bytes between hosts",
        (
            *columns(str, sender_host="sender", receiver_host="receiver"),
            _RECEIVED._replace(heading="bytes [B]"),
        ),
        rows_shown=-1,
    ),
    TableSpec(
        "pipeline",
        "Pipeline",
        (
            _STAGE,
            *columns(integer, ranks="ranks", passes="passes"),
            *columns(milliseconds, forward_s="F [ms]", backward_s="BW [ms]"),
            *columns(milliseconds, input_s="B [ms]", weight_s="W [ms]"),
            *columns(percent, idle_share="idle", idle_share_simulated="idle, ideal"),
            *columns(integer, in_flight="in flight", in_flight_simulated="in flight, ideal"),
        ),
    ),
    TableSpec(
        "pipeline_bubble",
        "Pipeline bubble",
        columns(
            percent,
            bubble="pipeline bubble",
            bubble_ideal="ideal bubble",
            idle_share="idle time",
        ),
    ),
    TableSpec(
        "bubble",
        "Idle time of the stages",
        (
            _STAGE,
            ColumnSpec("span_s", "all passes [ms]", milliseconds),
            *times("idle", "warmup", "steady", "drain"),
        ),
    ),
    TableSpec(
        "expert_cost",
        "Cost of expert load imbalance",
        (
            ColumnSpec("slots", "capacity", integer),
            ColumnSpec("highest", "max / mean", ratio),
            *columns(percent, dropped="dropped", dropped_even="dropped, balanced"),
            *columns(percent, empty="unused capacity", empty_even="unused, balanced"),
            ColumnSpec("empty_flop", "unused [FLOP]", prefixed),
            ColumnSpec("wait_s", "wait along e [ms]", milliseconds),
            ColumnSpec("wait_share", "share of step", percent),
            _RANK._replace(heading="for rank"),
            ColumnSpec("experts", "experts"),
            ColumnSpec("load", "load", ratio),
        ),
    ),
    TableSpec(
        "experts",
        "Expert load",
        (
            _LAYER,
            ColumnSpec("expert", "expert", number),
            _SHARE._replace(heading="share of tokens"),
            ColumnSpec("load", "load", ratio),
            *_LOADED,
        ),
        rows_shown=16,
    ),
    TableSpec(
        "routers",
        "Expert load by step",
        (
            ColumnSpec("step", "step", integer),
            _LAYER,
            ColumnSpec("highest", "max / mean", ratio),
            ColumnSpec("fullest", "busiest expert", number),
            ColumnSpec("lowest", "min / mean", ratio),
            *_LOADED,
            *columns("{:.6f}".format, balance_loss="balance loss [nat]", z_loss="z loss [nat]"),
        ),
        rows_shown=-1,
    ),
    TableSpec(
        "exchanges",
        "Dispatch and combine",
        (
            AXIS,
            PHASE,
            ColumnSpec("what", "exchange"),
            _CALLS,
            _RECEIVED,
            *times("blocked", "wait", "transfer"),
        ),
    ),
    TableSpec(
        "memory",
        "Memory",
        (
            ColumnSpec("kind", "kind"),
            ColumnSpec("peak", "highest peak [B]", prefixed),
            _RANK._replace(heading="on rank"),
        ),
    ),
    TableSpec(
        "memory_ranks",
        "Memory by rank",
        (_RANK, *columns(prefixed, **{kind: f"{kind} [B]" for kind in MEMORY_KIND})),
        rows_shown=-1,
    ),
    TableSpec(
        "copies",
        "Offload copies",
        (
            *(ColumnSpec("name", "direction"), PHASE, ColumnSpec("copies", "copies", count)),
            *columns(prefixed, bytes="copied [B]"),
            _SECONDS,
            ColumnSpec("byte_per_s", "rate [B/s]", prefixed),
            ColumnSpec("exposed_s", "exposed [ms]", milliseconds),
        ),
    ),
)
