"""Counted bytes and calls of a training step, compared with closed forms for each rank and axis.

Sizes are chosen so that all parameters divide evenly, without padding.
"""

from collections import Counter, defaultdict
from functools import cache
from itertools import product
from time import monotonic_ns
from typing import NamedTuple

import pytest

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.schema import OP
from tests.pipeline.mixes import config_of, trainer_of, words_of
from tests.strided import strided

BATCH, SEQUENCE, HIDDEN, VOCABULARY, ITEM = 48, 3, 24, 48, 8
TABLE = VOCABULARY * HIDDEN


class Counted(NamedTuple):
    """Counts of one rank: {(axis, op): bytes and posting time of each call}, elements of its
    parameters by kind, and the start of the last product."""

    stage: int
    calls: dict
    posted: dict
    elements: dict
    last_product: int

    def bytes(self, axis, op):
        return sum(self.calls[axis, op])

    def ops(self, axis):
        return {op for along, op in self.calls if along == axis}


@cache
def counted(line):
    """Return the `Counted` of every rank in the first step of a mix."""
    config = config_of(f"steps=1 vocabulary={VOCABULARY} {line}")
    return run(config.sizes(), lambda mesh: first_step(mesh, config))


def first_step(mesh, config):
    recorder = MemoryRecorder(mesh.rank, monotonic_ns)
    trainer = trainer_of(mesh.traced(recorder), config)
    trainer.step(0)
    assert recorder.dropped == 0
    events = recorder.rows()
    events = events[events["step"] == 0]
    elements = Counter()
    for item in trainer.parameters:
        elements[kind_of(item)] += item.value.size
    last_product = events["t_start"][events["op"] == OP.index("gemm")].max(initial=0)
    return Counted(mesh.coord("p"), *calls(recorder, events), elements, last_product)


def calls(recorder, events):
    groups, received, posted = recorder.header["groups"], defaultdict(list), defaultdict(list)
    for event in events[events["seq"] >= 0]:
        key = groups[event["group"]]["axis"], OP[event["op"]]
        received[key].append(int(event["bytes"]))
        posted[key].append(int(event["posted"]))
    return received, posted


def kind_of(item):
    if item.name in ("embedding.token", "head.table"):
        return item.name
    return "matrices" if item.name.endswith("weight") else "vectors"


# A mix, and over how many ranks the block between two stages is spread.
BETWEEN = {
    "p=2 schedule=gpipe microbatches=3": 1,
    "p=4 schedule=1f1b microbatches=8": 1,
    "p=4 schedule=zb-h1 microbatches=8": 1,
    "p=4 schedule=zb-h2 microbatches=4 layers_per_stage=[1,0,2,1]": 1,
    "p=2 schedule=interleaved chunks=2 microbatches=4": 1,
    "p=4 schedule=interleaved chunks=2 microbatches=6 layers=8": 1,
    "p=2 schedule=zb-v chunks=2 microbatches=4": 1,
    "p=4 schedule=zb-v chunks=2 microbatches=8 layers=8": 1,
    "p=2 d=3 schedule=1f1b microbatches=4 zero=3": 3,
    "p=2 d=2 x=2 schedule=1f1b microbatches=4 scheme=1d": 2,
    "p=3 x=2 schedule=1f1b microbatches=4 scheme=1d-sequence": 2,
    "p=2 x=2 y=2 schedule=zb-h1 microbatches=3 scheme=2d": 4,
    "p=2 d=2 x=2 z=2 schedule=1f1b microbatches=3 scheme=2.5d": 8,
    "p=2 x=2 y=2 z=2 schedule=1f1b microbatches=3 scheme=3d": 8,
}


@pytest.mark.parametrize("line", strided(BETWEEN, 4))
def test_stages_exchange_activations_and_their_gradients(line):
    """2 v M b s h e / ranks are sent and received by a stage of v chunks, less at the ends.

    Each chunk sends every microbatch forward, except the last chunk, and its gradient back, except
    the first chunk. At the turn of a V schedule, both chunks are on the same stage.
    """
    words = words_of(line)
    stages, chunks, micros = (int(words.get(k, 1)) for k in ("p", "chunks", "microbatches"))
    block = BATCH // micros * SEQUENCE * HIDDEN * ITEM // BETWEEN[line]
    turn = words["schedule"] == "zb-v"
    first, last = 0, 0 if turn else stages - 1
    for rank in counted(line):
        moves = 2 * chunks - (rank.stage == first) - (rank.stage == last)
        moves -= 2 * (turn and rank.stage == stages - 1)
        assert rank.ops("p") == {"send", "recv"}
        assert rank.calls["p", "send"] == rank.calls["p", "recv"] == [block] * moves * micros


# On the data axis (d - 1) / d of the elements are moved, times this:
#   op, zero -> of vectors; of matrices; of the table of the embedding; of that of the head
MICROS = 4
ON_DATA = {
    ("all_reduce", 0): (2, 2, 2, 2),
    ("reduce_scatter", 1): (1, 1, 1, 1),
    ("all_gather", 1): (1, 1, 1, 1),
    ("reduce_scatter", 2): (1, MICROS, MICROS, MICROS),
    ("all_gather", 2): (1, 1, 1, 1),
    ("reduce_scatter", 3): (1, MICROS, MICROS, MICROS),
    ("all_gather", 3): (1, 2 * MICROS, MICROS, 2 * MICROS),  # no backward pass reads a lookup's W
}


def on_data(zero, data, elements):
    """Return {op: bytes} of a replica in a step."""
    kinds = "vectors", "matrices", "embedding.token", "head.table"
    totals = {}
    for (op, stage), factors in ON_DATA.items():
        if stage == zero:
            moved = sum(factor * elements[kind] for factor, kind in zip(factors, kinds))
            totals[op] = moved * ITEM * (data - 1) // data
    return totals


def elements_of(stage, stages, layers):
    """Return the elements of an untied model's stage by kind: 12 h^2 + 13 h per layer, ends."""
    first, last = stage == 0, stage == stages - 1
    return {
        "matrices": 12 * HIDDEN**2 * layers,
        "vectors": 13 * HIDDEN * layers + SEQUENCE * HIDDEN * first + 2 * HIDDEN * last,
        "embedding.token": TABLE * first,
        "head.table": TABLE * last,
    }


@pytest.mark.parametrize(
    ("zero", "data", "overlap"), strided([*product(range(4), (2, 4), ("true", "false"))], 5)
)
def test_data_parallel_bytes_match_the_formula_for_every_zero_stage(zero, data, overlap):
    """2 psi e (d-1)/d with ZeRO 0 and 1. Per further microbatch, ZeRO 2 adds psi e (d-1)/d, and
    ZeRO 3 twice as much."""
    pipeline = f"p=2 schedule=1f1b microbatches={MICROS} layers_per_stage=[1,3] tied=false"
    for rank in counted(f"{pipeline} d={data} zero={zero} overlap={overlap}"):
        elements = elements_of(rank.stage, 2, (1, 3)[rank.stage])
        expected = on_data(zero, data, elements)
        assert {op: rank.bytes("d", op) for op in rank.ops("d")} == expected


@pytest.mark.parametrize(
    ("context", "zero"), strided([*product(["ring", "all-to-all"], range(4))], 5)
)
def test_context_ranks_reduce_gradients_as_replicas(zero, context):
    """2 psi e (1 - 1/(c d)), in one collective over the plane c d. The bytes of ZeRO 2 and 3 in a
    pass are as many, along d and along c."""
    line = f"d=2 c=2 sequence=4 context={context} microbatches={MICROS} tied=false zero={zero}"
    elements = elements_of(0, 1, 4)
    elements["vectors"] += (4 - SEQUENCE) * HIDDEN  # of positions
    attention = {"ring": {"send", "recv"}, "all-to-all": {"all_to_all"}}[context]
    for rank in counted(line):
        if zero < 2:
            assert (rank.ops("d"), rank.ops("c")) == (set(), attention)
        totals = {
            op: sum(rank.bytes(axis, op) for axis in ("c", "d", "c d"))
            for op in ("all_reduce", "reduce_scatter", "all_gather")
        }
        assert {op: moved for op, moved in totals.items() if moved} == on_data(zero, 4, elements)


@pytest.mark.parametrize("zero", strided([1, 2, 3], 2))
def test_hybrid_sharding_bytes_match_the_formula_within_and_between_groups(zero):
    """Within groups of 2: as with 2 replicas; between groups: psi e / 2 of each rank's shard."""
    elements = elements_of(0, 1, 4)
    for rank in counted(f"d=4 shard=2 microbatches={MICROS} tied=false zero={zero}"):
        assert {op: rank.bytes("d", op) for op in rank.ops("d")} == on_data(zero, 2, elements)
        assert rank.ops("r") == {"all_reduce"}
        assert rank.bytes("r", "all_reduce") == sum(elements.values()) * ITEM // 2


@pytest.mark.parametrize("zero", strided([2, 3], 2, 1))
def test_bytes_of_uneven_shards_include_their_padding(zero):
    """30 rows on 4 replicas count as 4 x 8 rows, and a vector is padded likewise."""

    def padded(rows, columns=1):
        return -(-rows // 4) * 4 * columns

    matrices = padded(30, 90) + padded(30, 30) + padded(30, 120) + padded(120, 30)
    vectors = padded(90) + padded(120) + 6 * padded(30)
    elements = dict.fromkeys(("embedding.token", "head.table"), VOCABULARY * 30)
    elements["matrices"] = 4 * matrices
    elements["vectors"] = 4 * vectors + padded(30 * SEQUENCE) + 2 * padded(30)
    line = f"d=4 hidden=30 heads=6 microbatches={MICROS} tied=false zero={zero}"
    for rank in counted(line):
        assert {op: rank.bytes("d", op) for op in rank.ops("d")} == on_data(zero, 4, elements)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "bucket"), strided([*product(range(4), (0.001, 25))], 3))
def test_zero_bytes_match_for_any_scheme_schedule_and_bucket(zero, bucket):
    """The elements are those of the rank's own blocks, which ZeRO-3 stores in d shards."""
    line = f"p=2 d=2 x=2 microbatches={MICROS} tied=false schedule=zb-h1 bucket_mb={bucket}"
    whole = counted(line)
    for rank, stored in zip(counted(f"{line} zero={zero}"), whole):
        expected = on_data(zero, 2, stored.elements)
        assert {op: rank.bytes("d", op) for op in rank.ops("d")} == expected


def test_tied_table_is_reduced_for_both_ends():
    (rank, *_) = counted(f"d=2 zero=2 microbatches={MICROS}")
    both = elements_of(0, 1, 4) | {"head.table": TABLE}
    assert rank.bytes("d", "reduce_scatter") == on_data(2, 2, both)["reduce_scatter"]
    values = {**both, "head.table": 0}
    assert rank.bytes("d", "all_gather") == on_data(2, 2, values)["all_gather"]


WEIGHTS, VECTORS = 2 * 4 + 1, 2 * 8 + 1  # of a stage of two layers and the embedding


@pytest.mark.parametrize(
    ("zero", "op", "one", "many"),
    [
        (0, "all_reduce", 1, WEIGHTS + VECTORS),
        (1, "reduce_scatter", 1, WEIGHTS + VECTORS),
        (1, "all_gather", 1, WEIGHTS + VECTORS),
        # In the passes of two microbatches every weight is reduced or gathered by itself.
        (2, "reduce_scatter", 1 + 2 * WEIGHTS, VECTORS + 2 * WEIGHTS),
        (2, "all_gather", 2, WEIGHTS + VECTORS),
        (3, "reduce_scatter", 1 + 2 * WEIGHTS, VECTORS + 2 * WEIGHTS),
        (3, "all_gather", 1 + 2 * (2 * WEIGHTS - 1), VECTORS + 2 * (2 * WEIGHTS - 1)),
    ],
)
def test_one_collective_per_bucket(zero, op, one, many):
    """A bucket holds all parameters with the same reduction; with size 0, only one parameter."""
    line = f"p=2 d=2 microbatches=2 tied=false zero={zero}"
    for size, number in ((25, one), (0, many)):
        stage = counted(f"{line} bucket_mb={size}")[0]
        assert len(stage.calls["d", op]) == number


@pytest.mark.parametrize(("zero", "op"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_buckets_are_filled_before_the_next_one_starts(zero, op):
    """The number of calls is about that of 20 kB buckets in the gradients; some are larger."""
    line = f"p=2 d=2 microbatches=2 tied=false zero={zero}"
    parameters, buckets = (counted(f"{line} bucket_mb={size}")[0] for size in (0, 0.02))
    size = 20_000 if op == "all_reduce" else 20_000 // 2  # of two replicas each moves a half
    sizes = buckets.calls["d", op]
    assert all(moved <= size or moved in parameters.calls["d", op] for moved in sizes)
    fit = -(-sum(sizes) // size)
    assert 3 < fit <= len(sizes) < 2 * fit < len(parameters.calls["d", op])


@pytest.mark.parametrize("zero", strided(range(4), 3))
@pytest.mark.parametrize(
    "pipeline",
    ["p=2 schedule=1f1b", "p=4 schedule=zb-h2", "p=2 schedule=interleaved chunks=2"],
)
def test_tied_table_gradient_is_exchanged_once_between_ends(pipeline, zero):
    """The gradient, or with ZeRO a rank's shard of it, uses the communicator of all ranks."""
    part = TABLE * ITEM // (2 if zero else 1)
    ranks = counted(f"{pipeline} d=2 microbatches=4 zero={zero}")
    last = max(rank.stage for rank in ranks)
    for rank in ranks:
        exchanged = [part] if rank.stage in (0, last) else []
        assert rank.calls["world", "send"] == rank.calls["world", "recv"] == exchanged


@pytest.mark.parametrize(
    "line",
    ["p=2 schedule=1f1b tied=false", "p=2 schedule=zb-v chunks=2", "d=2 schedule=none"],
)
def test_untied_or_single_stage_models_exchange_no_table(line):
    for rank in counted(f"{line} microbatches=4"):
        assert not {"send", "recv"} & rank.ops("world")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_gradient_reductions_start_during_the_last_backward_pass(schedule):
    """With a bucket per parameter, all buckets except those of a stage's first layer are posted
    during the pass, or all after it, if a stage waits for the gradient that it passes on."""
    line = f"p=2 d=2 microbatches=4 schedule={schedule} tied=false bucket_mb=0"
    layer, embedding, head = 12, 2, 3
    hands_on = schedule != "zb-h1"  # whose last pass is W
    last = (0, head + 2 * layer) if hands_on else (head + layer, layer)
    early = {0: (layer, layer + embedding), 1: last}
    for rank in counted(f"{line} overlap=true"):
        assert posted_around_the_last_product(rank) == early[rank.stage]
    for rank in counted(f"{line} overlap=false"):
        assert posted_around_the_last_product(rank) == (0, sum(early[rank.stage]))


def posted_around_the_last_product(rank):
    """Return the number of gradient reductions posted before and after the last product."""
    early = [posted < rank.last_product for posted in rank.posted["d", "all_reduce"]]
    return early.count(True), early.count(False)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_replicated_key_gradients_are_reduced_at_the_end_of_a_step(kv_heads):
    """2 (1 - 1/n) e times the elements of Wk, Wv and their biases, unsharded along n's axes; the
    biases are longer along m's axes. All other bytes are those of ranks with one key each."""
    layers, x, n, width = 2, 2, 4, HIDDEN // 12
    line = f"x={x} y={n} schedule=none microbatches=2 layers={layers} kind=qwen2 kv_heads="
    columns = 2 * kv_heads * width
    whole, longer = layers * (HIDDEN // x + 1) * columns, layers * (columns - 2 * width)
    for rank, cut in zip(counted(f"{line}{kv_heads}"), counted(f"{line}{n}"), strict=True):
        assert rank.calls.keys() == cut.calls.keys()
        more = {key: sum(rank.calls[key]) - sum(cut.calls[key]) for key in cut.calls}
        assert more.pop(("y", "all_reduce")) == 2 * whole * ITEM * (n - 1) // n
        assert more.pop(("x", "all_reduce")) == 2 * longer * ITEM * (x - 1) // x
        assert not any(more.values())


def test_rank_gathers_the_columns_of_its_keys():
    """(1 - 1/m) e times the elements of [Wq | Wk | Wv], h (h / n + 2 D)."""
    (rank, *_) = counted("x=2 y=4 microbatches=1 schedule=none layers=1 kind=llama kv_heads=2")
    assert HIDDEN * (HIDDEN // 4 + 2 * HIDDEN // 12) * ITEM // 2 in rank.calls["x", "all_gather"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rms_norm_reduces_one_number_per_row(ranks):
    """2 (1 - 1/g) rows e bytes in each pass, for two norms per layer and the last one."""
    layers, micros = 2, 2
    line = f"z={ranks} schedule=none microbatches={micros} layers={layers} kind=llama kv_heads=4"
    rows = BATCH // micros * SEQUENCE
    expected = [2 * rows * ITEM * (ranks - 1) // ranks] * 2 * (2 * layers + 1) * micros
    for rank in counted(line):
        assert rank.calls["z", "all_reduce"] == expected


EXPERT_MESHES = {  # and the ranks that sequences and X's columns are cut over
    "e=4": (4, 1),
    "d=2 e=2": (4, 1),
    "e=2 x=2 y=2 z=2": (8, 2),
    "e=2 x=4 scheme=1d-sequence": (8, 1),
    "e=2 x=2 y=2 scheme=2d-summa": (4, 2),
    "c=2 d=2 e=2": (8, 1),
    "p=2 d=2 e=2 schedule=zb-h1": (4, 1),
}


@pytest.mark.parametrize(("line", "ranks"), strided(EXPERT_MESHES.items(), 8))
@pytest.mark.parametrize("top_k", [1, 2])
def test_dispatch_and_combine_bytes_match_the_formula(line, ranks, top_k):
    """4 (1 - 1/e) E C S h' e per mixture and pass, with S sequences per rank."""
    experts, micros, tokens, layers = 4, 2, 8, 4
    model = f"sequence={tokens} experts={experts} top_k={top_k} capacity=1 layers={layers}"
    schedule = "" if "schedule" in line else "schedule=none"
    rows, columns = ranks
    slots = experts * (tokens * top_k // experts)
    e, stages = (int(words_of(line).get(axis, 1)) for axis in "ep")
    for rank in counted(f"{line} {schedule} microbatches={micros} {model}"):
        calls = rank.calls["e", "all_to_all"]
        assert len(calls) == 4 * layers // stages * micros
        block = slots * BATCH * HIDDEN * ITEM // (micros * rows * columns)
        assert set(calls) == {block * (e - 1) // e}


def test_slots_without_a_capacity_limit_depend_on_the_largest_load():
    """All experts have 15, 30 or 48 slots for 48 tokens: 5/4 of the mean load, twice that, all."""
    line = "e=2 schedule=none microbatches=2 sequence=4 experts=4 capacity=0 layers=1"
    ranks = counted(line)
    sizes = {4 * slots * HIDDEN * ITEM // 2 for slots in (15, 30, 48)}
    for rank in ranks:
        calls = rank.calls["e", "all_to_all"]
        assert calls == ranks[0].calls["e", "all_to_all"] and {*calls} <= sizes
        assert max(calls) < max(sizes)
        assert rank.calls["e", "all_gather"][:2] == [4 * 8] * 2


@pytest.mark.parametrize(
    ("line", "zero"), strided([*product(["c=2 d=2 e=2", "d=2 e=4", "e=4"], range(4))], 5)
)
def test_expert_axis_reduces_only_dense_weights(line, zero):
    """2 (1 - 1/(c d e)) psi e of dense weights, 2 (1 - 1/(c d)) psi e of a rank's experts."""
    layers, experts, batch = 2, 4, 32
    c, d, e = (int(words_of(line).get(axis, 1)) for axis in "cde")
    model = f"sequence=4 experts={experts} layers={layers} tied=false batch={batch}"
    dense = {
        "matrices": layers * (4 * HIDDEN**2 + HIDDEN * experts),
        "vectors": layers * 8 * HIDDEN + 4 * HIDDEN + 2 * HIDDEN,
        "embedding.token": TABLE,
        "head.table": TABLE,
    }
    here = experts // e
    own = {"matrices": layers * here * 8 * HIDDEN**2, "vectors": layers * here * 5 * HIDDEN}
    # int64 numbers of choices, of each expert in the sequences of all ranks of c
    choices = (c - 1) * layers * batch // (d * e) * experts * 8
    for rank in counted(f"{line} schedule=none microbatches={MICROS} zero={zero} {model}"):
        totals = Counter()
        for (axes, op), moved in rank.calls.items():
            if op in ("all_reduce", "reduce_scatter", "all_gather") and axes != "world":
                totals[op] += sum(moved)
        if c > 1:
            totals["all_gather"] -= choices
        expected = Counter(on_data(zero, c * d * e, dense))
        if c * d > 1:
            expected += Counter(on_data(zero, c * d, defaultdict(int, own)))
        assert totals == expected


SHARED = "p=2 d=2 x=2 schedule=1f1b microbatches=4 scheme=1d zero=1"
SHARDED = "p=2 d=2 x=2 schedule=1f1b microbatches=4 scheme=1d zero=3"
IN_GROUPS = "p=2 d=4 shard=2 schedule=1f1b microbatches=2 zero=2"


@pytest.mark.parametrize(
    ("line", "types", "of_values", "of_gradients"),
    strided(
        [
            (SHARED, "dtype=bfloat16", 4, 2),
            (SHARED, "dtype=float16 reduce_dtype=float16", 4, 4),
            (SHARED, "dtype=float32 reduce_dtype=bfloat16", 2, 4),
            (SHARED, "dtype=bfloat16 reduce_dtype=bfloat16", 4, 4),
            (SHARDED, "dtype=bfloat16 reduce_dtype=float32", 4, 2),
            (SHARDED, "dtype=float32 reduce_dtype=bfloat16", 2, 4),
            (IN_GROUPS, "dtype=float16 reduce_dtype=float32", 4, 2),
            (IN_GROUPS, "dtype=bfloat16 reduce_dtype=bfloat16", 4, 4),
        ],
        2,
    ),
)
def test_bytes_depend_on_the_value_and_reduction_types(line, types, of_values, of_gradients):
    """In float64, they are a multiple; sums of the loss, along x, are in float32."""
    of_data = dict.fromkeys(("reduce_scatter", "all_reduce"), of_gradients)
    of_data["all_gather"] = of_values
    for rank, wide in zip(counted(f"{line} {types}"), counted(line), strict=True):
        for axis, op in wide.calls:
            if axis != "world":
                times = of_data[op] if axis in "dr" else of_values
                pairs = zip(rank.calls[axis, op], wide.calls[axis, op], strict=True)
                found = {more / less for less, more in pairs}
                of_loss = {2} if axis == "x" and rank.stage else set()
                assert found == {times} | of_loss
