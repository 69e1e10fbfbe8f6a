"""Predicted launches, bytes and memory of a device, compared with the counted ones."""

from collections import Counter
from contextlib import contextmanager
from math import inf

import numpy as np
import pytest

from hpc3d.arrays.abstract import CostMeter
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.cuda import launch_table
from hpc3d.ops.attention import HeadForm, attend
from hpc3d.predict.simulation import abstract_gpu
from hpc3d.predict.simulation.count import predict_on
from hpc3d.predict.simulation.evaluated_batch import evaluated
from hpc3d.trace.recorder import Recorder
from hpc3d.training.trainer import Trainer
from tests.cuda import rules
from tests.cuda.rules import on_devices
from tests.pipeline.mixes import Tokens
from tests.predict.fixed import MACHINE
from tests.strided import strided
from tests.training.test_evaluator import evaluator_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("counts_from_zero")]

ONE = "p=1 schedule=none microbatches=2 layers=2 batch=4 steps=2 backend=cupy dtype=float32"
MODULES = """recompute='["layernorm","mlp"]'"""
ACTIVATIONS = """recompute='["layernorm","mlp_act"]'"""
CAPS = "score_cap=0.7 logit_cap=1.5"
LINES = [
    f"{ONE} gelu=exact dropout=0.25 recompute=selective",
    f"{ONE} fused_gelu=true tied=false recompute=full",
    f"{ONE} dtype=bfloat16 hidden=32 heads=4 sequence=8 recompute=selective",
    f"x=2 y=2 z=2 scheme=3d {ONE[4:]} batch=8 chunked_products=2",
    f"p=2 d=2 x=2 zero=1 scheme=1d {ONE[4:]} schedule=1f1b batch=8",
    f"d=2 x=2 zero=3 dropout=0.25 {ONE[4:]} batch=8 prefetch=true",
    f"x=2 y=2 scheme=2d-summa {ONE[4:]} batch=8",
    f"{ONE} kind=llama kv_heads=4 ffn=20 {MODULES}",
    f"{ONE} kind=llama ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8 recompute=selective",
    f"x=2 z=2 {ONE[4:]} batch=8 kind=llama kv_heads=4 ffn=24 dropout=0.25",
    f"x=2 y=2 {ONE[4:]} batch=8 kind=llama kv_heads=4 head_dim=6 ffn=24 attention_bias=true",
    f"x=2 {ONE[4:]} batch=8 kind=phi3 heads=6 kv_heads=2 ffn=24 rope_fraction=0.5",
    f"y=2 {ONE[4:]} kind=qwen3 kv_heads=1 ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8",
    f"x=2 y=2 {ONE[4:]} batch=8 kind=qwen3 kv_heads=4 head_dim=6 ffn=24",
    f"y=2 {ONE[4:]} batch=8 kind=olmo2 kv_heads=1 head_dim=6 ffn=24",
    f"x=2 {ONE[4:]} batch=8 kind=olmo2 kv_heads=4 ffn=24 scheme=1d-sequence",
    f"{ONE} kind=gemma ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8 {MODULES}",
    f"x=2 y=2 {ONE[4:]} batch=8 kind=gemma kv_heads=4 head_dim=6 ffn=24",
    f"{ONE} kind=gemma2 ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8 {CAPS}",
    f"c=2 x=2 sequence=8 {ONE[4:]} batch=8 kind=gemma2 kv_heads=4 ffn=24 window=3 {CAPS}",
    f"{ONE} kind=gemma3_text ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8 {MODULES}",
    f"c=2 x=2 sequence=8 {ONE[4:]} batch=8 kind=gemma3_text ffn=24 window=3 global_every=2",
    f"x=2 y=2 {ONE[4:]} batch=8 kind=gpt_neox heads=6 rope_fraction=0.5 {MODULES}",
    f"c=2 x=2 sequence=8 {ONE[4:]} batch=8 kind=roberta padding=4",
    f"y=2 {ONE[4:]} kind=qwen2 kv_heads=1 ffn=40 dtype=bfloat16 hidden=32 heads=4 sequence=8",
    f"{ONE} kind=bert padding=4 fused_gelu=true {ACTIVATIONS}",
    f"{ONE} kind=bert dtype=bfloat16 hidden=32 heads=4 sequence=8 recompute=selective padding=4",
    f"c=2 sequence=8 {ONE[4:]} kind=bert dtype=bfloat16 hidden=32 heads=4 padding=4",
    f"x=2 z=2 {ONE[4:]} batch=8 kind=bert gelu=exact dropout=0.25 padding=4",
    f"c=2 x=2 sequence=8 {ONE[4:]} kind=llama kv_heads=4 ffn=24 dropout=0.25",
    f"c=4 sequence=8 context=both ulysses=2 {ONE[4:]} layers=1 kind=bert padding=4",
    f"c=2 x=2 sequence=8 {ONE[4:]} layers=1 dtype=bfloat16 recompute=full hidden=32 heads=4",
    f"c=4 sequence=16 {ONE[4:]} kind=llama kv_heads=2 ffn=40 dtype=bfloat16 hidden=32 heads=4",
    f"{ONE} attention=chunked sequence=8 dropout=0.25",
    f"c=2 sequence=16 {ONE[4:]} dtype=bfloat16 hidden=32 heads=4 window=3 global_every=2",
    f"{ONE} attention=chunked dtype=bfloat16 hidden=32 heads=4 sequence=16 window=3",
    f"{ONE} dtype=bfloat16 hidden=32 heads=4 sequence=16 window=3 recompute=selective",
    f"{ONE} dtype=bfloat16 hidden=32 heads=4 sequence=16 boundaries=true",
    f"c=2 {ONE[4:]} dtype=bfloat16 hidden=32 heads=4 sequence=16 boundaries=true",
    f"d=2 e=2 x=2 zero=1 {ONE[4:]} layers=1 batch=16 optimizer=adafactor experts=4",
    f"e=2 {ONE[4:]} schedule=dualpipe-v experts=4 overlap_experts=true recompute=full",
    f"d=2 x=2 zero=1 {ONE[4:]} batch=8 optimizer=lion",
    f"d=2 x=2 zero=1 {ONE[4:]} batch=8 optimizer=muon kind=llama kv_heads=4 ffn=24",
    f"x=2 y=2 {ONE[4:]} layers=1 batch=8 optimizer=muon orthogonalize=sharded",
    f"{ONE} layers=1 hidden=264 heads=4 kind=llama ffn=8 optimizer=adamw-8bit",
    f"x=2 z=2 {ONE[4:]} batch=8 layers=1 product_dtype=float8 keep_dtype=float8",
]
FLOAT8 = "product_dtype=float8 product_scale=tensor layers=1 batch=8 sequence=8 hidden=64"


def observed(mesh, config):
    """Return the peaks of a rank in its second step."""
    batches = Tokens(config) if mesh.rank == 0 else None
    mesh = mesh.traced(Recorder(None, {"rank": mesh.rank}, 1 << 15, every_s=inf))
    trainer = Trainer(mesh, config, config.model.vocabulary, batches)
    for number in range(2):
        trainer.step(number)
    return dict(mesh.pool.peak)


class Counts(CostMeter):
    """Meter that counts kernels as a Launcher counts launches."""

    def __init__(self):
        self.count, self.bytes, self.products = Counter(), Counter(), Counter()
        self.times, self.float8 = 1, rules.CudaPool.float8

    @contextmanager
    def counting(self, times):
        self.times = times
        yield
        self.times = 1

    def product(self, m, n, k, dtype, batch=1):
        self.products[m, n, k, dtype.name, batch] += self.times

    def kernel(self, name, nbytes):
        self.count[name] += self.times
        self.bytes[name] += self.times * nbytes


def launched(counter):
    """Count the launches of hpc3d's kernels; CuPy has an `add`, too."""
    return {
        name: counter[name] for name in launch_table.kernels() if name != "add" and counter[name]
    }


@pytest.mark.slow
@pytest.mark.parametrize("line", strided(LINES, 4))
def test_predicted_launches_and_memory_match_a_device_run(line, launcher):
    if "bfloat16" in line:
        rules.register(launcher, rules.Flash())
    config = rules.config_of(line)
    measured = on_devices(line, observed)
    rules.register(launcher)
    grid, told = config.grid(), Counts()
    for rank, peaks in zip(range(grid.size), measured, strict=True):
        mesh = abstract_mesh(grid.sizes, grid.coords(rank), abstract_gpu.pool_of(config, told))
        predicted = predict_on(mesh, config, config.model.vocabulary).peak
        outside = {"all", "workspace"} | ({"activation"} if "bfloat16" in line else set())
        kinds = peaks.keys() - outside  # what the rules take, and Flash, is of no pool here
        assert {kind: predicted[kind] for kind in kinds} == {kind: peaks[kind] for kind in kinds}
    assert launched(told.count) == launched(launcher.count)
    assert launched(told.bytes) == launched(launcher.bytes)
    assert told.products == launcher.products


def observed_evaluation(mesh, config):
    """Return the peaks of a rank in an evaluation before the first training step."""
    trainer = Trainer(mesh, config, config.model.vocabulary, Tokens(config))
    evaluator = evaluator_of(trainer)
    mesh.pool.reset_peak()
    evaluator.evaluate(0)
    return dict(mesh.pool.peak)


@pytest.mark.slow
@pytest.mark.parametrize("line", strided(["", "kind=llama kv_heads=4 ffn=24 dropout=0.25"], 2))
def test_predicted_memory_of_an_evaluation_matches_a_device_run(line, launcher):
    config = rules.config_of(f"{ONE} {line}")
    (measured,) = on_devices(f"{ONE} {line}", observed_evaluation)
    rules.register(launcher)
    predicted = evaluated(config, config.model.vocabulary, MACHINE).peak
    kinds = measured.keys() - {"all", "workspace"}  # kernels take workspaces of no pool here
    assert {kind: predicted[kind] for kind in kinds} == {kind: measured[kind] for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("line", rules.some(["", "x=2 z=2", "d=2 zero=3 recompute=full"], 0))
def test_predicted_float8_products_match_a_device_run(line, launcher, monkeypatch):
    monkeypatch.setattr(rules.CudaPool, "float8", True)
    test_predicted_launches_and_memory_match_a_device_run(
        f"{line} {ONE[4:]} heads=4 {FLOAT8}", launcher
    )
    assert {"float8_e4m3fn", "float32"} == {key[3] for key in launcher.products}


@pytest.mark.slow
def test_attention_by_products_copies_q_k_v_and_the_output():
    """If matrix products compute attention, q, k, v and the output are copied."""
    pool = abstract_gpu.DeviceShapes(Counts())
    qkv = pool.empty((2 * 8, 4 * 3 * 8), np.float32)
    out, _ = attend(qkv, 8, HeadForm(8), pool.empty)
    assert pool.meter.bytes["copy"] == 2 * (qkv.nbytes + out.nbytes)


class AttentionCalls(CostMeter):
    """Meter that records (FLOPs, backward) of each fused attention kernel."""

    def __init__(self):
        self.calls = []

    def attention(self, flop, nbytes, case, backward):
        self.calls.append((flop, backward))
        assert (case.width, case.sequence, case.dtype) == (16, 128, "bfloat16")


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 3)])
def test_fused_attention_is_recorded_with_its_pass_and_flops(causal, window):
    """There are 2 products forward and 5 backward; a causal mask halves the FLOPs.

    With a window of 3 tokens, two queries have fewer than 3 keys.
    """
    pool = abstract_gpu.DeviceShapes(AttentionCalls())
    qkv = pool.empty((2 * 128, 4 * 3 * 16), "bfloat16")
    flash, form = pool.gpu.flash, HeadForm(16)
    out, stats = flash.forward(qkv, 128, form, causal, window)
    flash.backward(out, qkv, out, stats, 128, form, causal, window)
    product = 2 * (2 * 4) * 128**2 * 16 // (2 if causal else 1)
    if window:
        product = 2 * (2 * 4) * (3 * 128 - 3) * 16
    assert pool.meter.calls == [(2 * product, False), (5 * product, True)]


def test_hop_is_recorded_as_a_square_with_as_many_scores():
    pool = abstract_gpu.DeviceShapes(AttentionCalls())
    q = pool.empty((2, 2, 2, 256, 16), "bfloat16")
    k, v = pool.empty((2, 2, 2, 64, 16), "bfloat16")
    out, sums = pool.gpu.flash.hop(q, k, v, causal=False)
    pool.gpu.flash.hop_grad(q, (q, k, v), q, sums, causal=False)
    product = 2 * (2 * 4) * 256 * 64 * 16
    assert pool.meter.calls == [(2 * product, False), (5 * product, True)]
    assert out.size == q.size and sums.size == q.size // 16
