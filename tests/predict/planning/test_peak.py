"""Estimated memory, compared with simulated peaks."""

from itertools import islice

import pytest

from hpc3d.predict.planning.estimate import Estimator
from tests.predict.planning.brute import every_layout, step
from tests.predict.planning.test_search import CLUSTER, SMALL, config_of, settled


@pytest.fixture(scope="module")
def pipelines():
    return [each for each in every_layout(config_of(SMALL), 8) if each.mesh.p > 1]


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow) for first in (0, 41, 83, 131, 197)]
)
def test_estimated_pipeline_memory_matches_the_simulation(first, pipelines):
    """Tests each schedule, with few and many microbatches, all ZeRO stages and recomputation."""
    estimator, wrong = Estimator(256, CLUSTER), []
    for config in islice(pipelines, first, None, 241):
        _, peak = step(config, 256, CLUSTER)
        wrong.append(estimator.estimate(config).peak / peak - 1)
    assert len(wrong) > 20
    assert min(wrong) > -0.03
    assert max(wrong) < 0.06
    assert sum(map(abs, wrong)) / len(wrong) < 0.015


def test_any_uneven_stage_may_have_the_peak_memory():
    line = "p=6 model.layers=12 schedule=1f1b microbatches=8 layers_per_stage=[1,1,1,7,1,1]"
    config = settled(f"{SMALL} {line}", 6)
    found = Estimator(256, CLUSTER).estimate(config)
    assert found.stage == 3
    assert found.peak == pytest.approx(step(config, 256, CLUSTER)[1], rel=0.02)


ON_GPUS = [
    "model.layers=12 model.hidden=1024 model.heads=8 model.sequence=2048 train.batch=64 "
    f"model.vocabulary=4096 train.dtype=bfloat16 train.backend=cupy {line}"
    for line in """
d=8 zero=3 microbatches=4
d=8 zero=3 recompute=full
d=8 zero=3 recompute=full microbatches=8
d=4 x=2 zero=3 scheme=1d-sequence microbatches=2 prefetch=true
d=8 zero=3 shard=4 reduce_dtype=float32 microbatches=2
d=8 zero=2 microbatches=8
d=8 zero=1 microbatches=8
d=8 zero=1 microbatches=2 overlap=false
d=8 microbatches=8 reduce_dtype=bfloat16
p=2 d=4 zero=1 schedule=1f1b microbatches=8
p=2 d=4 zero=1 schedule=interleaved chunks=3 microbatches=8
d=4 c=2 zero=1 microbatches=8
e=8 schedule=dualpipe-v microbatches=4 model.experts=8 overlap_experts=true
p=2 e=4 schedule=dualpipe-v microbatches=8 model.experts=8 overlap_experts=true
""".strip().splitlines()
]


def test_estimated_gpu_memory_matches_the_simulation():
    """One estimator serves all layouts, whose microbatches need workspaces of different sizes.

    All layers of a layout share one workspace, and at most two layers reduce their gradients.
    """
    estimator = Estimator(4096, CLUSTER)
    for line in ON_GPUS:
        config = settled(line)
        _, peak = step(config, 4096, CLUSTER)
        assert estimator.estimate(config).peak == pytest.approx(peak, rel=0.05), line
