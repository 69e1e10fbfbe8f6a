"""Estimated step times, compared with simulations."""

from dataclasses import replace

import pytest

from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.simulation.simulator import simulate, step_length
from tests.predict.planning.test_peak import ON_GPUS
from tests.predict.planning.test_search import CLUSTER, SMALL, settled, step
from tests.strided import strided

LAYOUTS = """
x=8 scheme=1d
x=8 scheme=1d-sequence recompute=selective chunked_products=2
x=4 y=2 scheme=2d
x=2 y=2 z=2 chunked_products=2
x=2 y=2 z=2 keep_gathered=false recompute=full
x=2 y=2 z=2 scheme=2.5d
x=2 y=4 scheme=2d-summa
d=8
d=4 x=2 scheme=1d zero=1
d=4 x=2 zero=2
d=4 x=2 zero=3 microbatches=2 prefetch=true model.hidden=260 model.heads=4
p=4 x=2 schedule=1f1b microbatches=8
p=4 d=2 schedule=gpipe microbatches=4
p=2 d=2 y=2 schedule=interleaved chunks=2 microbatches=4
p=4 x=2 scheme=1d schedule=zb-h1 microbatches=8 recompute=selective
p=4 x=2 scheme=1d schedule=zb-h1 recompute=full
p=4 d=2 schedule=zb-h1 zero=2
p=4 d=2 schedule=zb-h2 microbatches=2
p=2 d=2 x=2 scheme=1d-sequence schedule=zb-v microbatches=4 zero=1
d=8 train.backend=cupy
d=8 zero=1 prefetch=true bucket_mb=1 train.backend=cupy
p=4 d=2 schedule=1f1b microbatches=4 zero=2 prefetch=true
x=4 y=2 scheme=2d microbatches=2 chunked_products=2 prefetch=true train.backend=cupy
p=4 d=2 schedule=gpipe microbatches=4 train.backend=cupy
p=4 d=2 schedule=gpipe microbatches=4 train.backend=cupy train.cuda_graph=true
d=4 x=2 zero=3 microbatches=2 train.backend=cupy train.cuda_graph=true
p=4 d=2 schedule=1f1b microbatches=8 layers_per_stage=[0,2,1,1]
p=4 d=2 schedule=zb-h1 zero=1 layers_per_stage=[2,0,2,0] microbatches=4
p=2 d=2 y=2 schedule=interleaved chunks=2 microbatches=4 layers_per_stage=[0,2,2,0] bucket_mb=1
""".strip().splitlines()


OF_LLAMA = """
x=2 y=2 z=2 model.kind=llama model.kv_heads=4 model.ffn=640
x=2 y=4 scheme=2d microbatches=2 model.kind=qwen2 model.kv_heads=1 model.ffn=640
p=2 x=4 schedule=1f1b microbatches=4 model.kind=llama model.kv_heads=4 train.backend=cupy
p=2 x=4 schedule=1f1b microbatches=4 model.kind=llama model.kv_heads=2 train.backend=cupy
""".strip().splitlines()


OF_BERT = """
x=2 y=2 z=2 model.kind=bert model.padding=0
p=2 x=4 schedule=1f1b microbatches=4 model.kind=bert scheme=1d-sequence train.backend=cupy
""".strip().splitlines()


CUT = """
c=4 x=2
d=2 c=2 y=2 zero=1 context=all-to-all
p=2 c=4 schedule=1f1b microbatches=4 zero=2 context=both ulysses=2
d=2 c=2 p=2 schedule=zb-h1 microbatches=4 zero=1
c=4 x=2 microbatches=2 zero=3 model.sequence=1024 recompute=full
c=8 model.sequence=2048 train.batch=4 train.backend=cupy train.dtype=bfloat16
c=8 model.sequence=2048 train.batch=4 model.window=100 model.global_every=2
p=2 d=4 model.sequence=2048 schedule=1f1b microbatches=4 model.window=300 train.backend=cupy
""".strip().splitlines()


MIXTURES = [
    f"model.experts=8 {line}"
    for line in """
e=8
d=2 e=2 x=2 model.top_k=2 model.capacity=1 model.shared_experts=1
e=2 x=2 y=2 microbatches=2 scheme=2d recompute=full
p=2 e=2 y=2 schedule=1f1b microbatches=4 zero=1 model.moe_every=2
p=2 d=2 e=2 schedule=zb-h1 microbatches=4 model.capacity=0 model.top_k=2
d=2 e=4 zero=3 model.kind=llama model.kv_heads=4 model.ffn=640
c=2 e=2 x=2 zero=2
e=2 x=4 scheme=1d-sequence microbatches=8
e=8 model.moe_every=2 train.backend=cupy train.dtype=bfloat16
p=4 e=2 schedule=1f1b microbatches=8 model.moe_every=2 model.capacity=0 model.top_k=2
p=4 d=2 schedule=1f1b microbatches=8 layers_per_stage=[0,2,1,1] model.moe_every=2 zero=1
p=4 e=2 schedule=zb-h1 zero=2 microbatches=8 model.moe_every=3 model.layers=8
e=8 schedule=dualpipe-v microbatches=4 overlap_experts=true train.backend=cupy
e=4 x=2 schedule=dualpipe-v microbatches=4 overlap_experts=true recompute=full
p=2 e=2 x=2 schedule=dualpipe-v microbatches=4 overlap_experts=true train.backend=cupy
""".strip().splitlines()
]

WINDOWS = [
    f"scheme=1d model.sequence=16384 train.batch=8 model.window=50 {line}"
    for line in """
x=8 model.global_every=4 model.layers=6
e=2 c=2 x=2 model.experts=4 model.moe_every=2 model.global_every=4
e=2 c=2 x=2 model.experts=4 model.moe_every=2 model.global_every=2
d=2 x=4 zero=3 model.experts=4 model.moe_every=2 model.global_every=3 model.layers=6
""".strip().splitlines()
]


COMPRESSED = """
d=8 compression=powersgd
d=4 x=2 scheme=1d zero=1 compression=top-k compression_share=0.1
p=2 d=4 schedule=1f1b microbatches=4 compression=powersgd
d=8 compression=top-k train.backend=cupy
""".strip().splitlines()

LOCAL = """
d=8 local_steps=1 outer_momentum=0.9
d=4 x=2 scheme=1d local_steps=1
d=8 shard=2 zero=3 local_steps=1 train.backend=cupy
p=2 d=4 schedule=1f1b microbatches=4 local_steps=1 compression=powersgd
d=8 local_steps=1 train.optimizer=muon
d=8 local_steps=1 sync=stale outer_momentum=0.9
d=4 x=2 scheme=1d local_steps=8 sync=stale bucket_mb=0.5
d=8 shard=2 zero=3 local_steps=4 sync=stale train.backend=cupy
p=2 d=4 schedule=1f1b microbatches=4 local_steps=4 sync=stale compression=powersgd
""".strip().splitlines()

EVERY = [*LAYOUTS, *OF_LLAMA, *OF_BERT, *CUT, *MIXTURES, *COMPRESSED, *LOCAL]


@pytest.mark.parametrize("line", strided(EVERY, 6))
def test_an_estimate_is_near_the_simulation(line):
    config = settled(f"{SMALL} {line}")
    found = Estimator(256, CLUSTER).estimate(config)
    seconds, peak = step(config)
    assert found.seconds == pytest.approx(seconds, rel=0.1)
    assert found.peak == pytest.approx(peak, rel=0.1)
    parts = found.compute + found.bubble + found.waits.total()
    assert parts == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.compute, found.bubble + 1e-12, *found.waits.values()) >= 0


CONTENDED = """
d=8 bucket_mb=0.5
d=4 x=2 scheme=1d zero=1
d=4 x=2 zero=3 microbatches=2 prefetch=true model.hidden=260 model.heads=4
p=2 d=4 schedule=gpipe microbatches=4 bucket_mb=0.5
""".strip().splitlines()


@pytest.mark.parametrize("line", CONTENDED)
def test_an_estimate_includes_the_contention_of_collectives(line):
    """The time that a step loses is estimated within a half, or within 1 % of the step."""
    config = settled(f"{SMALL} {line} train.backend=cupy")
    machines = CLUSTER, replace(CLUSTER, contention=1.7)
    ours = [Estimator(256, machine).estimate(config).seconds for machine in machines]
    theirs = [step_length(simulate(config, 256, machine)) / 1e9 for machine in machines]
    assert (
        0
        < ours[1] - ours[0]
        == pytest.approx(theirs[1] - theirs[0], rel=0.5, abs=0.01 * theirs[0])
    )


@pytest.mark.parametrize("line", CONTENDED)
def test_an_estimate_includes_the_launches_of_the_host(line):
    """The GPU is the bottleneck in the first case, and the host in the second.

    In the bubble of a pipeline, the host runs ahead, which estimates do not include.
    """
    config = settled(f"{SMALL} {line} train.backend=cupy")
    for host_s in (1e-6, 1e-4):
        machine = replace(CLUSTER, launch_s=0.0, host_s=host_s)
        found = Estimator(256, machine).estimate(config).seconds
        seconds = step_length(simulate(config, 256, machine)) / 1e9
        if host_s < 1e-5 or config.mesh.p == 1:
            assert found == pytest.approx(seconds, rel=0.1)
        assert found > 0.95 * seconds


@pytest.mark.parametrize("line", WINDOWS)
def test_an_estimate_counts_the_blocks_with_each_window(line):
    """These estimates are nearer to the simulation than a wrong number of blocks allows."""
    config = settled(f"{SMALL} {line}")
    found = Estimator(256, CLUSTER).estimate(config)
    assert found.seconds == pytest.approx(step(config)[0], rel=0.03)


def test_what_was_measured_for_one_layout_is_not_taken_for_another():
    shared = Estimator(256, CLUSTER)
    lines = *(f"{SMALL} {line}" for line in (*LAYOUTS, *CUT, *COMPRESSED)), *ON_GPUS
    configs = [*map(settled, lines)]
    together = [shared.estimate(config) for config in configs]
    assert together == [Estimator(256, CLUSTER).estimate(config) for config in configs]
