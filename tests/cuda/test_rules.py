"""The whole trainer with device rules: same losses, norms and weights as with NumPy."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hpc3d.comm import threads
from hpc3d.training.trainer import Trainer
from tests.cuda import rules
from tests.cuda.rules import on_devices, some
from tests.fakes.fake_device import plain
from tests.pipeline.mixes import (
    Tokens,
    alone,
    config_of,
    serial,
    train,
    trained_of,
    trainer_of,
)
from tests.strided import strided

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("counts_from_zero")]

ONE = "p=1 schedule=none microbatches=2 layers=1 batch=4 steps=4 dtype=float32"
LLAMA = "kind=llama kv_heads=4 ffn=20"  # of 12 heads: three queries a key
BERT = "kind=bert padding=4"
SWITCH = "experts=4 top_k=1 capacity=0.75 balance_bias=0.05"
MIXTRAL = f"{LLAMA} experts=4 top_k=2 capacity=0 shared_experts=1"
MODULES = """recompute='["layernorm","mlp"]'"""
ACTIVATIONS = """recompute='["layernorm","mlp_act"]'"""
LINES = [
    ONE,
    f"{ONE} tied=false gelu=exact dropout=0.25 recompute=selective",
    f"{ONE} optimizer=sgd learning_rate=0.1 recompute=full dropout=0.25",
    f"{ONE} {LLAMA} recompute=selective dropout=0.25",
    f"{ONE} {LLAMA} head_dim=6 attention_bias=true mlp_bias=true tied=false",
    f"{ONE} kind=qwen3 kv_heads=4 head_dim=6 ffn=20 recompute=selective",
    f"{ONE} kind=olmo2 kv_heads=4 head_dim=6 ffn=20 dropout=0.25",
    f"{ONE} kind=gemma kv_heads=4 head_dim=6 ffn=20 recompute=full",
    f"{ONE} kind=gemma2 kv_heads=4 ffn=20 window=3 score_cap=0.7 logit_cap=1.5",
    f"{ONE} kind=gemma3_text kv_heads=4 head_dim=6 ffn=20 window=3 query_scalar=9 {MODULES}",
    f"{ONE} kind=gpt_neox heads=6 rope_fraction=0.5 {MODULES}",
    f"{ONE} kind=roberta padding=4 gelu=exact",
    f"{ONE} {BERT} recompute=selective dropout=0.25",
    f"{ONE} {SWITCH} {MODULES}",
    f"{ONE} {MIXTRAL} recompute=selective dropout=0.25",
    f"{ONE} optimizer=adafactor experts=4 shared_experts=1 {ACTIVATIONS}",
]
SEVERAL = [
    "x=2 y=2 z=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 chunked_products=2",
    "p=2 d=2 x=2 schedule=1f1b microbatches=2 batch=8 layers=2 steps=2 zero=1 scheme=1d",
    "d=2 x=2 schedule=none microbatches=2 batch=8 layers=1 zero=3 prefetch=true dropout=0.25",
    "x=2 y=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 scheme=2d-summa",
    "x=2 y=2 z=2 schedule=none batch=4 microbatches=1 layers=1 steps=1 scheme=3d-broadcast",
    "x=2 z=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 kind=llama kv_heads=4 ffn=24",
    "d=2 y=2 schedule=none microbatches=2 batch=8 layers=1 steps=2 zero=1 kind=llama kv_heads=1",
    f"x=2 z=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 {BERT}",
    "x=2 y=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 kind=qwen3 kv_heads=1 ffn=24",
    "x=2 y=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 kind=gemma scheme=2d ffn=24",
    "x=2 y=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 kind=olmo2 kv_heads=1 ffn=24",
    "x=2 y=2 schedule=none batch=4 microbatches=1 layers=1 steps=2 kind=olmo2 scheme=2d",
]
CONTEXT = [
    "c=2 sequence=8 dropout=0.25",
    "c=2 d=2 sequence=4 zero=1 context=all-to-all kind=llama kv_heads=4 ffn=24",
    "c=2 x=2 sequence=8 kind=llama kv_heads=4 ffn=24 scheme=1d-sequence recompute=selective "
    "chunked_products=2",
    "c=4 sequence=8 context=both ulysses=2 dropout=0.25 recompute=full",
    "c=2 p=2 schedule=1f1b microbatches=2 layers=2 sequence=8 kind=bert padding=4 dropout=0.25",
    "attention=chunked recompute=selective kind=llama kv_heads=4 ffn=24",
    "c=2 sequence=8 window=3 global_every=2 layers=2 dropout=0.25",
    "sequence=8 window=3 recompute=selective",
    "c=2 x=2 sequence=8 kind=gemma2 kv_heads=4 ffn=24 score_cap=0.7 logit_cap=1.5",
    "sequence=8 boundaries=true separator=4 dropout=0.25",
    "c=2 sequence=8 boundaries=true separator=4",
]
EXPERTS = [
    f"e=2 x=2 {SWITCH} batch=8 microbatches=2",
    f"e=2 d=2 zero=1 {MIXTRAL} dropout=0.25",
    f"e=2 c=2 sequence=8 {LLAMA} experts=4 top_k=2 capacity=2 recompute=full",
]
CONTEXT += EXPERTS
SEVERAL += [f"schedule=none batch=4 microbatches=1 layers=1 steps=2 {line}" for line in CONTEXT]
SEVERAL.append(
    "d=2 x=2 schedule=none microbatches=2 batch=8 layers=1 steps=2 zero=1 optimizer=adafactor"
)
MUON = [
    f"{ONE} optimizer=muon learning_rate=0.001",
    "d=2 x=2 schedule=none microbatches=2 batch=8 layers=2 steps=2 zero=1 optimizer=muon",
    "e=2 x=2 schedule=none microbatches=2 batch=8 layers=1 steps=2 experts=4 optimizer=muon",
    "x=2 y=2 schedule=none microbatches=1 batch=8 layers=1 steps=2 optimizer=muon "
    "orthogonalize=sharded",
]


def same(found, expected):
    """Assert that float32 steps and weights of a rank are those of NumPy on one rank.

    The gradient of a key's bias is 0 up to rounding, so AdamW's steps for it are noise.
    """
    np.testing.assert_allclose(found.totals, expected.totals, rtol=2e-5)
    learnt = {name: what for name, what in found.weights.items() if "qkv.bias" not in name}
    for name, (where, block) in learnt.items():
        part = expected.weights[name][1][where]
        np.testing.assert_allclose(
            plain(block)[: len(part)], part, rtol=1e-4, atol=2e-5, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("line", some([*LINES, f"{LINES[3]} steps=1 microbatches=1"], 4))
def test_training_on_a_device_matches_numpy(line, launcher):
    (found,) = on_devices(line, train)
    same(found, serial(alone(line)))


@pytest.mark.slow
def test_8_bit_moments_match_numpy_except_for_rounding_ties(launcher):
    line = f"{ONE} optimizer=adamw-8bit hidden=264 heads=4 kind=llama ffn=8 steps=2"
    (found,), expected = on_devices(line, train), serial(alone(line))
    np.testing.assert_allclose(found.totals, expected.totals, rtol=2e-5)
    for name, (where, block) in found.weights.items():
        if "qkv.bias" not in name:
            part = expected.weights[name][1][where]
            far = ~np.isclose(plain(block)[: len(part)], part, rtol=1e-4, atol=2e-5)
            assert far.mean() < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["block", "tensor"])
def test_float8_products_on_a_device_match_numpy(scales, launcher):
    """Another order of sums changes the rounding of some operands, so after four steps norms
    differ by up to 3 % on some processors."""
    line = f"{ONE} hidden=144 microbatches=1 steps=2 product_dtype=float8 product_scale={scales}"
    (found,) = on_devices(line, train)
    expected = serial(alone(line)).totals
    np.testing.assert_allclose(found.totals[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found.totals, expected, rtol=0.01)
    assert launcher.count["round_tiles"] == launcher.count["tile_row_maxima"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", some(["", "x=2 z=2", "d=2 zero=3 kind=llama kv_heads=2 ffn=96"], 0)
)
def test_native_float8_products_match_numpy(line, launcher, monkeypatch):
    monkeypatch.setattr(rules.CudaPool, "float8", True)
    line += " schedule=none microbatches=1 layers=1 batch=8 sequence=8 hidden=64 steps=2"
    line += " heads=4 dtype=float32 product_dtype=float8 product_scale=tensor"
    expected = serial(alone(line)).totals
    for found in on_devices(line, train):
        np.testing.assert_allclose(found.totals[0], expected[0], rtol=1e-4)
        np.testing.assert_allclose(found.totals, expected, rtol=0.01)
    assert launcher.count["coded product"] > 0 == launcher.count["round_tiles"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "dtype"), some([("none", "int8"), ("full", "int8"), ("none", "float8")], 2)
)
def test_8_bit_saved_activations_match_numpy(recompute, dtype, launcher):
    """A device rounds X of a norm, and NumPy the normalized rows, so the results differ."""
    line = f"{ONE} recompute={recompute} keep_dtype={dtype}"
    (found,) = on_devices(line, train)
    expected = serial(alone(line)).totals
    np.testing.assert_allclose(found.totals[0][0], expected[0][0], rtol=2e-5)
    np.testing.assert_allclose(found.totals, expected, rtol=0.01)
    kind = {"int8": "", "float8": "float8_"}[dtype]
    assert launcher.count[f"encode_{kind}rows"] == launcher.count[f"decode_{kind}rows"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("line", some([ONE, f"d=2 zero=1 batch=8 dropout=0.25 {ONE[4:]}"], 0))
def test_fused_gelu_products_match_numpy(line, launcher):
    line = f"{line} backend=cupy fused_gelu=true"
    for found in on_devices(line, train):
        same(found, serial(alone(line)))
    assert not launcher.count.keys() & {"gelu_tanh", "gelu_grad"}


@pytest.mark.parametrize("line", strided(SEVERAL, 99, 3))
def test_parallel_training_on_devices_matches_serial_numpy(line, launcher):
    line = f"{line} dtype=float32"
    for found in on_devices(line, train):
        same(found, serial(alone(line)))


@pytest.mark.slow
@pytest.mark.parametrize("line", some(MUON, 0))
def test_muon_on_devices_matches_numpy(line, launcher):
    line = f"{line} dtype=float32"
    for found in on_devices(line, train):
        same(found, serial(alone(line)))


GRAPHS = """
p=2 schedule=gpipe microbatches=4 layers=2 dropout=0.25
p=2 d=2 schedule=1f1b microbatches=3 layers=2 zero=1 batch=12 tied=false prefetch=true
p=4 schedule=1f1b microbatches=2 layers=4
p=2 schedule=interleaved chunks=2 microbatches=4 layers=4 recompute=selective
p=2 schedule=zb-h1 microbatches=4 layers=2
p=2 d=2 schedule=zb-h2 microbatches=4 layers=2 zero=3 prefetch=true
p=2 schedule=zb-v chunks=2 microbatches=4 layers=4 kind=llama kv_heads=4 ffn=24 dropout=0.25
p=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 layers=4
p=2 x=2 schedule=1f1b microbatches=2 layers=2 dtype=float16 dropout=0.25
p=2 c=2 schedule=1f1b microbatches=2 layers=2 sequence=8 dropout=0.25
c=2 schedule=none microbatches=2 layers=1 sequence=8 kind=llama kv_heads=4 ffn=24
c=4 schedule=none microbatches=1 layers=1 sequence=8 context=both ulysses=2 recompute=full
d=2 x=2 schedule=none microbatches=2 layers=1 zero=2 dtype=float16 dropout=0.25 prefetch=true
d=4 shard=2 schedule=none microbatches=2 layers=1 zero=1
x=2 y=2 schedule=none microbatches=2 layers=1 scheme=2d-summa
x=2 y=2 z=2 schedule=none microbatches=1 layers=1 scheme=3d-broadcast
e=2 c=2 schedule=none microbatches=1 layers=1 sequence=8 experts=4 top_k=2 capacity=2
e=2 d=2 schedule=none microbatches=2 layers=1 zero=1 experts=4 balance_bias=0.01 optimizer=muon
e=2 schedule=dualpipe-v microbatches=2 layers=2 experts=4 overlap_experts=true prefetch=true
""".strip().splitlines()
ONE_GRAPHS = [line.replace("capacity=0", "capacity=2") for line in LINES[:-1]]


def graphed(line):
    """Train with a CUDA graph on every rank; return the results, and the launches of each step."""
    launched = []

    def trained(mesh, config):
        trainer = trainer_of(mesh, replace(config, train=replace(config.train, cuda_graph=True)))
        steps = []
        for number in range(config.train.steps):
            steps.append(trainer.step(number))
            launched.append(trainer.replay.loss is not None)
        return trained_of(trainer, steps)

    found = on_devices(line, trained)
    assert sum(launched) == len(found) * (config_of(line).train.steps - 1)
    return found


def equal(found, expected):
    """Assert that the steps and weights of all ranks are equal to the last bit."""
    for got, other in zip(found, expected, strict=True):
        assert got.totals == other.totals
        for name, (_, block) in got.weights.items():
            np.testing.assert_array_equal(plain(block), plain(other.weights[name][1]), name)


@pytest.mark.parametrize("line", strided(GRAPHS, 99, 4))
def test_cuda_graph_on_several_ranks_changes_no_result(line, launcher):
    dtype = "" if "dtype" in line else " dtype=float32"
    line = f"batch=8 steps=4 {line}{dtype}"
    equal(graphed(line), on_devices(line, train))


@pytest.mark.slow
@pytest.mark.parametrize("line", some(ONE_GRAPHS, 0))
def test_replayed_cuda_graph_matches_the_launched_step(line, launcher):
    """From the third step on, only the norm and the update are launched separately."""
    expected, launched = on_devices(line, train), []

    def recorded(mesh, config):
        trainer = trainer_of(mesh, replace(config, train=replace(config.train, cuda_graph=True)))
        steps = []
        for number in range(config.train.steps):
            launcher.count.clear()
            steps.append(trainer.step(number))
            launched.append(Counter(launcher.count))
        return trained_of(trainer, steps)

    equal(on_devices(line, recorded), expected)
    update, bias = "descend" if "sgd" in line else "adamw", "balance_bias" in line
    # A bias lies between other parameters. It is not in the norm, and its update is not AdamW's.
    norm = dict.fromkeys(("sum_squares", "sum_parts"), 1 + bias)
    assert launched[2] == launched[3] == {update: 2 + bias, **norm}


def test_experts_without_a_capacity_limit_are_launched(launcher):
    """The number of their slots depends on the routing, which a graph cannot contain."""

    def replay(mesh, config):
        config = replace(config, train=replace(config.train, cuda_graph=True))
        trainer = trainer_of(mesh, config)
        return trainer.replay, [trainer.step(number).loss for number in range(3)]

    line = f"{ONE} {MIXTRAL}"
    ((none, losses),) = on_devices(line, replay)
    assert none is None
    np.testing.assert_allclose(losses, [loss for loss, _ in serial(alone(line)).totals[:3]], 2e-5)


@pytest.mark.parametrize("kind", strided(["bfloat16", "float16"], 2))
@pytest.mark.parametrize(
    "line",
    some([ONE, f"{ONE} gelu=exact dropout=0.25", SEVERAL[1], LINES[3], SEVERAL[8], LINES[-1]], 0),
)
def test_16_bit_training_matches_float32(kind, line, launcher):
    """Tests float32 master weights, and loss scaling in float16."""

    def steps(mesh, config):
        batches = Tokens(config) if mesh.rank == 0 else None
        trainer = Trainer(mesh, config, config.model.vocabulary, batches)
        assert trainer.optimizer.states["master"].dtype == np.float32
        return [trainer.step(number)[1:4:2] for number in range(config.train.steps)]

    def wide(mesh):
        config = config_of(f"{alone(line)} dtype=float32")
        trainer = Trainer(mesh, config, config.model.vocabulary, Tokens(config))
        return [trainer.step(number)[1:4:2] for number in range(config.train.steps)]

    (expected,) = threads.run({}, wide)
    for found in on_devices(f"{line} dtype={kind}", steps):
        np.testing.assert_allclose(found, expected, rtol=3e-2 if kind == "bfloat16" else 5e-3)


@pytest.mark.parametrize(
    ("recompute", "dropout"), strided([*product(("none", "selective"), (0, 0.25))], 4)
)
def test_fused_attention_is_used_only_without_dropout(recompute, dropout, launcher):
    """With dropout, all passes use products."""
    rules.register(launcher, rules.Flash())
    line = f"{ONE} recompute={recompute} dropout={dropout}"
    test_16_bit_training_matches_float32("bfloat16", line, launcher)
    assert bool(launcher.count["causal_softmax"]) == bool(dropout)
    rules.register(launcher)


@pytest.mark.parametrize("recompute", strided(["none", "selective"], 2))
def test_fused_attention_is_used_with_padding(recompute, launcher):
    rules.register(launcher, rules.Flash())
    line = f"{ONE} {BERT} steps=2 recompute={recompute}"
    test_16_bit_training_matches_float32("bfloat16", line, launcher)
    rules.register(launcher)
    assert launcher.count["clear_masked"] > 0 == launcher.count["causal_softmax"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "c=4 sequence=16 kind=llama kv_heads=4 ffn=24",
        "c=4 sequence=16 context=both ulysses=2 recompute=full",
        f"c=2 x=2 sequence=8 {BERT}",
        "attention=chunked",
    ],
)
def test_ring_uses_fused_kernels(line, launcher):
    rules.register(launcher, rules.Flash())
    line = f"schedule=none batch=4 microbatches=1 layers=1 steps=2 {line}"
    test_16_bit_training_matches_float32("bfloat16", line, launcher)
    rules.register(launcher)
    assert launcher.count["merge_hop"] > 0 == launcher.count["chunk_softmax"]


# Of a layer, forward and backward.
LAUNCHES = {"product": 12, "add_norm": 2, "norm_grad": 2, "norm_columns": 2, "sum_strips": 2}
LAUNCHES |= {"accumulate": 4, "gelu_tanh": 1, "gelu_grad": 1}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_number_of_launches_per_layer(fused, launcher):
    def counted(mesh, config):
        trainer = trainer_of(mesh, config)
        launcher.count.clear()
        trainer.step(0)
        return Counter(launcher.count)

    line = f"{ONE} microbatches=1 backend=cupy fused_gelu={str(fused).lower()}"
    (one,), (two,) = (on_devices(f"{line} layers={n}", counted) for n in (1, 2))
    attention = {"product": 6, "causal_softmax": 1, "causal_softmax_grad": 1}
    gelu = {"gelu_tanh", "gelu_grad"} if fused else set()
    left = {name: count for name, count in LAUNCHES.items() if name not in gelu}
    assert two - one - Counter(attention) == left
