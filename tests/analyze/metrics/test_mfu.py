"""Model FLOPs, compared with published utilizations and with recorded runs."""

import pytest

from hpc3d.analyze.metrics.mfu import efficiency_row, model_flops, recorded_flops
from hpc3d.analyze.metrics.parallel_layout import layout_of
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.config.input_file import ModelConfig
from hpc3d.config.load import to_toml
from hpc3d.trace.trace_config import one_time
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import by_hand, row
from tests.analyze.traces import config_of
from tests.strided import strided

PEAK = 312e12  # of an A100, 16 bits

# arXiv:2205.05198: h, L, batch, ranks, seconds with selective recomputation, MFU
PUBLISHED = {
    "22B": (6144, 48, 4, 8, 1.10, 41.5),
    "175B": (12288, 96, 64, 64, 13.75, 51.4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_mfu_matches_the_published_values(name):
    hidden, layers, batch, ranks, seconds, mfu = PUBLISHED[name]
    model = ModelConfig(hidden=hidden, layers=layers, sequence=2048)
    found = model_flops(model, batch, 51200) / (seconds * ranks * PEAK)
    assert 100 * found == pytest.approx(mfu, abs=0.3)


def test_model_flops_equal_the_sum_over_single_products():
    """qkv, projection, two MLP products, q k', p v, head; times three for forward and backward."""
    h, s, layers, batch, v = 8, 6, 3, 5, 11
    products = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    layer = sum(2 * s * k * n for k, n in products) + 2 * (2 * s * s * h)
    forward = batch * (layers * layer + 2 * s * h * v)
    model = ModelConfig(hidden=h, heads=2, layers=layers, sequence=s)
    assert model_flops(model, batch, v) == pytest.approx(3 * forward, rel=1e-14)


RUNS = {
    "1d": {"mesh__x": 2, "parallel__scheme": "1d"},
    "1d-sequence": {"mesh__x": 2, "parallel__scheme": "1d-sequence"},
    "2d-summa": {"mesh__x": 2, "mesh__y": 2, "parallel__scheme": "2d-summa"},
    "2.5d": {"mesh__x": 2, "mesh__y": 2, "mesh__z": 2, "parallel__scheme": "2.5d"},
    "3d": {"mesh__x": 2, "mesh__y": 2, "mesh__z": 2, "parallel__scheme": "3d"},
    "3d-broadcast": {"mesh__x": 2, "mesh__y": 2, "parallel__scheme": "3d-broadcast"},
    "pipeline": {"mesh__p": 2, "mesh__d": 2, "parallel__microbatches": 4},
    "zero bubble": {"mesh__p": 2, "parallel__microbatches": 4, "parallel__schedule": "zb-h1"},
}


def small(folder, name, **values):
    sizes = {"model__layers": 2, "train__steps": 1, **RUNS[name], **values}
    ranks = 1
    for key, size in sizes.items():
        ranks *= size if key.startswith("mesh__") else 1
    return trained(folder / "run", ranks, **sizes)


@pytest.mark.parametrize("name", strided(RUNS, 3))
def test_recorded_flops_equal_model_flops(tmp_path, name):
    trace = small(tmp_path, name)
    found = efficiency_row(trace)
    assert found["recorded_flop"] == pytest.approx(found["model_flop"], rel=1e-12)
    model = config_of(1, model__layers=2).model
    assert found["model_flop"] == model_flops(model, 24, 24)
    assert found["mfu"] is None and found["hfu"] is None


@pytest.mark.parametrize("name", ["1d", "3d"])
def test_vocabulary_padding_counts_in_recorded_flops_not_model_flops(tmp_path, name):
    found = efficiency_row(small(tmp_path, name, vocabulary=17))
    model, padded = config_of(1, model__layers=2).model, {"1d": 18, "3d": 20}[name]
    assert found["model_flop"] == model_flops(model, 24, 17)
    assert found["recorded_flop"] == pytest.approx(model_flops(model, 24, padded), rel=1e-12)


def gemm(start, flops, **values):
    return row(0, start, start + 1, flops=flops, layer=-1, **values)


def test_utilization_uses_the_median_step_of_the_slowest_rank(tmp_path):
    """Rank 0 has steps of 5, 2 and 3 s, and rank 1 of 1 s; 8 of the 12 flop are in products."""
    rows = [
        gemm(0, 3.0),
        gemm(1, 5.0, op="attention", phase="backward"),
        gemm(2, 4.0, op="norm"),
        gemm(4000, 8.0, step=1),
        gemm(6000, 8.0, step=2),
        gemm(9000, 1e9, step=-1),
    ]
    ends = {0: (-1000, 4000), 1: (4000, 6000), 2: (6000, 9000)}
    steps = {
        (rank, step): (t, u if rank == 0 else t + 1000)
        for step, (t, u) in ends.items()
        for rank in (0, 1)
    }
    config = config_of(1, model__vocabulary=17)
    trace = by_hand(tmp_path / "trace.h5", rows, steps, config=to_toml(config))
    assert recorded_flops(trace) == 8
    found, flop = efficiency_row(trace, peak=5.0), model_flops(config.model, 24, 17)
    assert (found["step_s"], found["model_flop"], found["recorded_flop"]) == (3, flop, 8)
    assert found["recorded_flop_per_s"] == pytest.approx(8 / 3)
    assert found["flop_per_s"] == pytest.approx(flop / 3)
    assert found["hfu"] == pytest.approx(8 / 3 / (2 * 5))
    assert found["mfu"] == pytest.approx(flop / 3 / (2 * 5))


def test_vocabulary_size_is_inferred_from_the_head_product(tmp_path):
    """2 B s h V = 2 * 24 * 4 * 8 * 40; products of layers and backward passes differ."""
    head = 2.0 * 24 * 4 * 8 * 40
    rows = [
        gemm(0, head),
        gemm(2, 1e9, phase="backward"),
        row(0, 4, 5, layer=0, flops=1e9),
        gemm(6, 1e9, op="loss"),
    ]
    config = config_of(1)
    trace = by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 10)}, config=to_toml(config))
    assert efficiency_row(trace)["model_flop"] == pytest.approx(model_flops(config.model, 24, 40))


@pytest.mark.parametrize(
    "config",
    ["", "who = knows", "parallel = 3", "[trace]\nclock = []", "[parallel]\nsplit = { q = 'x' }"],
)
def test_model_flops_are_unknown_without_a_configuration(tmp_path, config):
    trace = by_hand(tmp_path / "trace.h5", [gemm(0, 6.0)], {(0, 0): (0, 10)}, config=config)
    assert configuration(trace) is None and one_time(trace)
    assert layout_of(trace).label == "synthetic, 1 rank"
    found = efficiency_row(trace, peak=1e3)
    assert found["model_flop"] is found["flop_per_s"] is found["mfu"] is None
    assert found["hfu"] == pytest.approx(6 / 10e-3 / 1e3)
