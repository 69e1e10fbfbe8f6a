"""Predicted peaks of every kind of memory equal those of every rank of a real job."""

from dataclasses import replace

import pytest

from hpc3d.predict.simulation.count import every_rank
from hpc3d.predict.simulation.simulator import simulate
from tests.jobs import Case
from tests.pipeline.mixes import config_of, ranks
from tests.predict.fixed import MACHINE

LINES = """
dtype=bfloat16 d=2 x=2 zero=1 microbatches=2 recompute=[0,2] keep_dtype=int8 optimizer=lion
dtype=bfloat16 d=2 x=2 zero=1 microbatches=2 optimizer=adamw-8bit hidden=64 heads=4 vocabulary=32
dtype=float32 d=2 x=2 zero=1 microbatches=2 'offload=["optimizer","activations"]' keep_dtype=int8
dtype=float16 p=2 x=2 schedule=1f1b microbatches=4 recompute=full optimizer=adafactor
dtype=float32 x=2 y=2 microbatches=2 keep_dtype=bfloat16 optimizer=adafactor keep_gathered=false
dtype=float32 d=2 p=2 schedule=zb-h1 microbatches=4 zero=1 compression=powersgd
dtype=bfloat16 d=4 zero=3 microbatches=2 recompute=selective optimizer=muon prefetch=true
dtype=float32 d=2 x=2 zero=1 microbatches=2 keep_dtype=int8 recompute=[1] reduce_dtype=bfloat16
dtype=bfloat16 d=2 y=2 microbatches=2 compression=top-k optimizer=sgd attention=chunked
dtype=bfloat16 p=2 d=2 schedule=zb-v chunks=2 microbatches=4 keep_dtype=int8 optimizer=adafactor
dtype=float32 p=2 d=2 schedule=interleaved chunks=2 microbatches=4 zero=2 keep_dtype=bfloat16
dtype=bfloat16 c=2 x=2 sequence=8 microbatches=2 attention=chunked recompute=full optimizer=muon
dtype=float32 d=2 e=2 experts=4 microbatches=2 zero=1 keep_dtype=int8 optimizer=lion
dtype=bfloat16 p=2 d=2 schedule=1f1b microbatches=4 'offload=["activations","parameters"]'
dtype=float32 p=2 d=2 schedule=1f1b microbatches=4 zero=1 compression=powersgd bucket_mb=0.01
dtype=float32 p=2 d=2 schedule=1f1b microbatches=4 zero=1 compression=top-k compression_share=0.1
x=2 y=2 z=2 chunked_products=2 recompute='["layernorm","mlp"]'
x=2 y=2 z=2 dtype=bfloat16 recompute='["layernorm","mlp_act"]'
x=4 d=2 scheme=1d recompute=full chunked_products=3
p=2 d=2 x=2 schedule=1f1b microbatches=4 zero=1 scheme=1d-sequence chunked_products=2
p=4 z=2 schedule=zb-h1 microbatches=4 recompute='["core_attn","mlp"]' keep_dtype=int8
d=2 x=2 y=2 zero=3 prefetch=true chunked_products=3 recompute='["mlp"]' hidden=36
d=4 x=2 scheme=1d zero=1 dtype=float32 reduce_dtype=bfloat16
d=4 shard=2 x=2 zero=1 dtype=float32 reduce_dtype=bfloat16 bucket_mb=0.01
d=4 shard=2 zero=3 dtype=bfloat16 microbatches=2 optimizer=muon hidden=30 heads=6
d=4 shard=2 zero=3 dtype=bfloat16 reduce_dtype=float32 microbatches=2 hidden=30 heads=6
p=2 d=2 schedule=1f1b microbatches=2 zero=1 bucket_mb=0.01 prefetch=true dtype=bfloat16
d=3 x=2 zero=2 dtype=bfloat16 reduce_dtype=float32 microbatches=2 scheme=2d prefetch=true
c=4 x=2 microbatches=2 sequence=8 recompute='["mlp_act"]'
d=2 c=4 zero=2 context=both ulysses=2 sequence=8 hidden=36
c=4 y=2 context=all-to-all attention=chunked sequence=8 heads=8
p=2 c=4 schedule=1f1b kind=llama kv_heads=12 sequence=8 microbatches=4
p=2 e=2 x=2 schedule=1f1b experts=4 top_k=2 moe_every=2 microbatches=2
d=2 e=4 experts=4 top_k=4 shared_experts=1 capacity=0 zero=1 recompute='["layernorm","mlp"]'
e=2 x=2 y=2 experts=4 top_k=2 scheme=2d recompute=full
d=2 e=2 z=2 experts=4 balance_bias=0.001 zero=3 prefetch=true chunked_products=2 hidden=36
p=2 d=2 e=2 experts=4 moe_every=2 schedule=zb-h1 microbatches=4 zero=2
p=2 e=2 experts=4 schedule=dualpipe-v microbatches=4 overlap_experts=true recompute=[1]
e=2 x=2 experts=4 schedule=dualpipe-v microbatches=3 overlap_experts=true dtype=float32
c=2 e=2 x=2 kind=llama kv_heads=12 sequence=8 experts=4 top_k=2
d=2 x=2 dtype=bfloat16 microbatches=2 bucket_mb=0.01 local_steps=2 outer_momentum=0.9
p=2 d=2 dtype=float32 schedule=1f1b microbatches=4 local_steps=2 'offload=["optimizer"]'
d=2 x=2 dtype=bfloat16 microbatches=2 bucket_mb=0.01 local_steps=1 sync=stale steps=4
d=4 shard=2 zero=3 dtype=float32 microbatches=2 local_steps=1 sync=stale steps=4 hidden=36
""".strip().splitlines()

OF_MPI = (
    "dtype=float32 c=2 d=2 zero=3 microbatches=2 sequence=4",
    "dtype=float32 d=2 x=2 zero=2 microbatches=2 keep_dtype=bfloat16",
    "dtype=float32 d=2 x=2 zero=1 reduce_dtype=bfloat16",
)


@pytest.mark.slow
@pytest.mark.timeout(0)  # tests.jobs limits each case
@pytest.mark.parametrize(
    "case",
    [Case(ranks(line), "auto", line) for line in LINES]
    + [Case(ranks(line), "mpi", f"{line} transport=mpi") for line in OF_MPI],
    ids=str,
)
def test_predicted_peaks_of_hybrid_layouts_match_mpi_ranks(run_in_job, case):
    run_in_job("tests.predict.simulation.peaks_on_mpi", case)


GEMM = MACHINE.gemm | dict.fromkeys(("bfloat16", "float16", "float64"), MACHINE.gemm["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_simulated_peaks_match_predicted_ones(line):
    config = config_of(line)
    predicted = list(every_rank(config, config.model.vocabulary))
    runs = simulate(config, config.model.vocabulary, replace(MACHINE, gemm=GEMM))
    assert [run.peak["all"] for run in runs] == [predicted[run.rank].peak["all"] for run in runs]
