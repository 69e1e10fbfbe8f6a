"""Predicted bytes and messages of every rank, axis, op and phase equal the counted ones."""

import re
from math import inf

import numpy as np
import pytest

from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.threads import run
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.predict.simulation.count import Prediction, ZeroBatches, every_rank, predict
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import CATEGORY, EVENTS, OP, PHASE, record_type
from hpc3d.training.evaluator import Evaluator, FrozenEvaluator, FrozenModel
from hpc3d.training.microbatch_loader import MicrobatchLoader
from hpc3d.training.trainer import Trainer
from tests.pipeline.mixes import LARGE, MIXES, Tokens, config_of
from tests.strided import strided
from tests.training.test_evaluator import Counted, Held

# One rank, cubes of 27 and 64 ranks, and four axes at once.
MORE = """
microbatches=3
microbatches=2 optimizer=sgd
x=3 y=3 z=3 scheme=3d hidden=72 batch=54
x=3 y=3 z=3 scheme=3d hidden=72 batch=54 keep_gathered=false
x=4 y=4 z=4 scheme=3d hidden=48 heads=16
x=4 y=4 z=4 scheme=3d-broadcast hidden=48 heads=16
x=16 scheme=1d hidden=32 heads=16
""".strip().splitlines()


def counted(config):
    """Return the second step of every rank of a real run, as a Prediction."""

    def rank(mesh):
        recorder = Recorder(None, {"rank": mesh.rank}, 1 << 15, every_s=inf)
        batches = Tokens(config) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, config.model.vocabulary, batches)
        trainer.step(0)
        recorder.count = 0
        trainer.step(1)
        events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
        return Prediction(events, [group["axis"] for group in recorder.header["groups"]], {})

    return run(config.sizes(), rank)


# Mixtures of experts in all layers and in some, on e with every other axis.
MIXTURES = """
e=2 microbatches=2 experts=4 top_k=2 capacity=1 shared_experts=1
d=2 e=2 microbatches=2 zero=1 experts=4 top_k=2 balance_bias=0.01
e=2 x=2 y=2 z=2 microbatches=3 experts=4 top_k=2
p=2 e=2 x=2 z=2 schedule=1f1b kind=llama kv_heads=4 ffn=48 moe_every=2 experts=4 microbatches=3
d=2 e=2 y=2 microbatches=2 zero=3 experts=4 shared_experts=1 hidden=30 heads=6
p=2 d=2 e=2 schedule=zb-h1 microbatches=4 zero=2 experts=4 top_k=4 bucket_mb=0.01 capacity=0
d=2 c=2 e=2 microbatches=2 zero=1 experts=4 sequence=4
c=2 x=2 scheme=1d-sequence batch=4 microbatches=4 experts=4 sequence=8
e=2 x=2 y=2 microbatches=2 scheme=2d-summa experts=4 top_k=2 recompute=full dropout=0.25
d=2 c=2 x=2 microbatches=2 sequence=8 boundaries=true
d=2 c=4 microbatches=2 zero=1 sequence=16 window=3 global_every=2 kind=llama ffn=48
p=2 c=4 schedule=1f1b microbatches=2 sequence=16 context=both ulysses=2 window=3
""".strip().splitlines()

PAIRS = [
    f"schedule=dualpipe-v overlap_experts=true {line}"
    for line in """
e=2 microbatches=5 experts=4 top_k=2 batch=20 backend=cupy dtype=float32
d=2 e=2 x=2 microbatches=4 batch=32 zero=1 experts=4 recompute=full prefetch=true bucket_mb=0.001
p=2 e=2 microbatches=6 experts=4 shared_experts=1 kind=llama ffn=48 batch=24 dropout=0.1
p=2 d=2 e=2 microbatches=5 zero=3 experts=4 top_k=2 moe_every=2 overlap=false batch=20
p=2 e=4 microbatches=7 experts=4 batch=28 zero=0 balance_bias=0.01 capacity=1
""".strip().splitlines()
]
# In 16 bits: what is summed, and so the moments of norms and of logits, are in float32.
NARROW = """
dtype=float16 microbatches=2
dtype=bfloat16 p=2 d=2 schedule=1f1b microbatches=4 zero=1
dtype=bfloat16 d=4 shard=2 microbatches=2 zero=1 bucket_mb=0.01
dtype=bfloat16 x=2 y=2 z=2 schedule=none microbatches=1 scheme=3d batch=4
dtype=bfloat16 d=2 x=2 y=2 schedule=none microbatches=2 zero=3 scheme=2d kind=llama ffn=36
dtype=bfloat16 d=2 c=2 schedule=zb-v chunks=2 microbatches=2 zero=2 sequence=4 recompute=full
dtype=bfloat16 e=2 x=2 y=2 z=2 microbatches=3 experts=4 top_k=2
dtype=float32 reduce_dtype=bfloat16 p=2 d=2 schedule=1f1b microbatches=2 bucket_mb=0.01
dtype=bfloat16 reduce_dtype=float32 d=3 x=2 microbatches=2 zero=3 scheme=2d prefetch=true
""".strip().splitlines()

# Gradients of which replicas sum factors, or the largest elements.
COMPRESSED = """
d=2 microbatches=2 compression=powersgd compression_rank=3
d=2 x=2 microbatches=2 zero=1 compression=top-k compression_share=0.1
p=2 d=2 e=2 experts=4 schedule=1f1b microbatches=2 compression=powersgd bucket_mb=0.01
d=2 x=2 y=2 scheme=3d-broadcast compression=powersgd compression_rank=2
c=2 d=2 z=2 sequence=4 overlap=false compression=top-k compression_share=0.05
""".strip().splitlines()

# The second step has an agreement (local_steps=1 or 2) or none (local_steps=3).
LOCAL = """
d=2 local_steps=2 steps=4 microbatches=2 bucket_mb=0.01 outer_momentum=0.9
d=2 x=2 local_steps=3 steps=4 scheme=1d
dtype=bfloat16 d=4 shard=2 zero=3 local_steps=2 steps=4 microbatches=2 hidden=36
p=2 d=2 x=2 y=2 scheme=3d-broadcast schedule=1f1b microbatches=2 local_steps=2 steps=4
d=2 e=2 experts=4 balance_bias=0.01 local_steps=2 steps=4 reduce_dtype=bfloat16 dtype=float32
d=4 local_steps=2 steps=4 compression=powersgd compression_rank=3
d=2 local_steps=1 steps=4 sync=stale microbatches=2 bucket_mb=0.01 outer_momentum=0.9
p=2 d=4 shard=2 zero=1 schedule=1f1b microbatches=2 local_steps=1 sync=stale steps=4
d=3 local_steps=1 steps=4 sync=stale compression=top-k compression_share=0.1
""".strip().splitlines()

# All-gathers of updated values during the forward pass.
LATER = """
d=2 c=2 microbatches=2 zero=1 sequence=4 bucket_mb=0.001 prefetch=true
p=2 d=2 schedule=interleaved chunks=2 microbatches=4 zero=2 bucket_mb=0.001 prefetch=true
d=2 z=2 microbatches=1 zero=1 optimizer=muon bucket_mb=0.001 prefetch=true
""".strip().splitlines()

SMALL, MANY = MORE[:4], [*MORE[4:], *LARGE[::4]]  # ranks
LINES = [
    *strided([*MIXES, *SMALL], 44, 42),
    *strided(MIXTURES, 9),
    *strided(PAIRS, 2),
    *strided(NARROW, 9, 1),
    *strided(COMPRESSED, 9),
    *strided(LOCAL, 5),
    *strided(LATER, 3),
    *strided(MANY, len(MANY), len(MANY)),
]


@pytest.mark.parametrize("line", LINES)
def test_predicted_traffic_and_flops_match_the_counted_ones(line):
    """Without a capacity, the prediction assumes a balance, so that it is not exact."""
    config = config_of(re.sub(r"capacity=0(?![.\d])", "capacity=4", line))
    predicted = list(every_rank(config, config.model.vocabulary))
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()


EVALUATED = [
    "p=2 d=2 x=2 schedule=1f1b microbatches=3 zero=3 hidden=30 heads=6",
    "p=2 schedule=zb-v chunks=2 microbatches=3",
    "x=2 y=2 schedule=none scheme=2d microbatches=2 kind=llama kv_heads=4 ffn=48",
    "d=2 e=2 x=2 microbatches=2 experts=4 moe_every=2",
]


def evaluated(mesh, config, feed, batches):
    """Return an evaluation of two batches on a rank, as a Prediction."""
    recorder = Recorder(None, {"rank": mesh.rank}, 1 << 15, every_s=inf)
    mesh = mesh.traced(recorder)
    trainer = Trainer(mesh, config, config.model.vocabulary, batches, feed=feed)
    evaluator = Evaluator(trainer, batches and [batches], feed=feed)
    recorder.count, evaluator.counts = 0, [2]
    evaluator.evaluate(0)
    events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
    return Prediction(events, [group["axis"] for group in recorder.header["groups"]], {})


def frozen(mesh, config, feed, batches):
    """Return an evaluation of a FrozenModel on a rank, as a Prediction."""
    recorder = Recorder(None, {"rank": mesh.rank}, 1 << 15, every_s=inf)
    mesh = mesh.traced(recorder)
    evaluator = FrozenEvaluator(FrozenModel(mesh, config), batches and [batches], feed=feed)
    recorder.count, evaluator.counts = 0, [2]
    evaluator.evaluate(0)
    events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
    axes = [group["axis"] for group in recorder.header["groups"]]
    return Prediction(events, axes, dict(mesh.pool.peak))


@pytest.mark.parametrize("line", EVALUATED)
def test_predicted_traffic_and_parameters_of_a_frozen_model_match_the_counted_ones(line):
    config = config_of(line)
    grid = config.grid()

    def rank(mesh):
        return frozen(mesh, config, MicrobatchLoader, Counted(config) if mesh.rank == 0 else None)

    for place, theirs in enumerate(run(grid.sizes, rank)):
        ours = frozen(abstract_mesh(grid.sizes, grid.coords(place)), config, ZeroBatches, None)
        assert ours.moved() == theirs.moved() and ours.flops() == theirs.flops()
        assert ours.peak["parameter"] == theirs.peak["parameter"] > 0
        assert not ours.peak.get("gradient") and not ours.peak.get("optimizer")


@pytest.mark.parametrize("line", EVALUATED)
def test_predicted_evaluation_traffic_matches_the_counted_one(line):
    config = config_of(line)
    grid = config.grid()

    def rank(mesh):
        return evaluated(mesh, config, MicrobatchLoader, Held(config) if mesh.rank == 0 else None)

    for place, theirs in enumerate(run(grid.sizes, rank)):
        mesh = abstract_mesh(grid.sizes, grid.coords(place))
        ours = evaluated(mesh, config, ZeroBatches, None)
        assert ours.moved() == theirs.moved() and ours.flops() == theirs.flops()
        assert {phase for *_, phase in ours.moved()} <= {"evaluation"}


def test_moved_and_flops_sum_the_event_rows():
    """Rows (category, op, phase, group, bytes, flops) with known sums, because an error in `moved`
    would affect both of two compared runs."""
    rows = [
        ("comm", "all_gather", "forward", 0, 30, 0),
        ("comm", "all_gather", "forward", 0, 12, 0),
        ("comm", "all_gather", "forward", 1, 5, 0),
        ("comm", "all_gather", "backward", 0, 7, 0),
        ("comm", "barrier", "other", 1, 0, 0),
        ("compute", "gemm", "forward", -1, 99, 600),
        ("compute", "gemm", "backward", -1, 0, 1200),
        ("compute", "attention", "forward", -1, 0, 50),
        ("compute", "none", "forward", -1, 0, 0),
    ]
    events = np.zeros(len(rows), record_type(EVENTS))
    for row, (category, op, phase, *numbers) in zip(events, rows):
        row["category"], row["op"] = CATEGORY.index(category), OP.index(op)
        row["phase"], (row["group"], row["bytes"], row["flops"]) = PHASE.index(phase), numbers
    found = Prediction(events, ["x", "y"], {})
    assert found.moved() == {
        ("x", "all_gather", "forward"): (2, 42),
        ("y", "all_gather", "forward"): (1, 5),
        ("x", "all_gather", "backward"): (1, 7),
        ("y", "barrier", "other"): (1, 0),
    }
    assert found.flops() == {"gemm": 1800, "attention": 50}


def test_model_that_exceeds_memory_is_predicted_quickly():
    """175 B parameters on 1,024 ranks; the rank is in the middle of the pipeline."""
    words = (
        "--model.layers 96 --model.hidden 12288 --model.heads 96 --model.sequence 2048 "
        "--model.vocabulary 51200 --train.batch 1024 --parallel.microbatches 16 "
        "--mesh.p 8 --mesh.x 2 --mesh.y 8 --mesh.z 8 --parallel.schedule 1f1b"
    )
    config = resolve(load(None, words.split()), 1024)
    middle = dict.fromkeys(config.sizes(), 0) | {"p": 3}
    found = predict(config, 51200, middle)
    # 12 of 96 layers: 12 h^2 on 128 ranks, and 13 h of vectors on 8 each.
    assert found.peak["parameter"] == 4 * 12 * (12 * 12288**2 // 128 + 13 * 12288 // 8)
    products = 72 * 1024 * 12 * 2048 * 12288**2 / 128
    assert found.flops()["gemm"] == pytest.approx(products, rel=1e-12)
