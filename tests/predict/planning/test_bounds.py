"""Minimum communication of layouts, and the placement of the axes with most traffic."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest

from hpc3d.predict.machine.machine import Link
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.bounds import Bounds, kind, volumes
from hpc3d.predict.simulation import summary
from hpc3d.predict.simulation.simulator import simulate
from tests.predict.machine.test_between_hosts import hosts
from tests.predict.planning.test_search import CLUSTER, SMALL, settled, step
from tests.strided import strided


def test_axis_with_the_most_traffic_is_placed_inside_a_node():
    config = settled("model.layers=4 model.hidden=512 train.batch=32 p=2 x=4 d=4 scheme=1d", 32)
    config = replace(config, mesh=replace(config.mesh, order="x p d c e y z"))
    turned = Bounds(config, 32, 256, CLUSTER).candidate(config).config
    assert turned.mesh.order == "p d x c e y z"
    assert step(turned)[0] < 0.8 * step(config)[0]


@pytest.mark.parametrize(
    ("line", "name"),
    [("d=4", "none"), ("x=4 scheme=1d", "1-D"), ("y=4", "3-D"), ("z=4", "3-D"), ("x=4", "3-D")],
)
def test_layout_kind_follows_the_axes_in_use(line, name):
    assert kind(settled(line, 4)) == name


def test_bound_allows_for_prefetched_weights():
    """Prefetching hides most of the communication of weights, which takes as long as compute."""
    slow = replace(CLUSTER, links=(Link(0, 1e-6, 8e9),))
    line = "model.layers=4 model.hidden=1024 model.heads=8 model.sequence=128 train.batch=128"
    config = settled(f"{line} x=8 scheme=3d")
    faster = replace(config, parallel=replace(config.parallel, prefetch=True))
    bounds = Bounds(config, 8, 256, slow)
    assert bounds.least(bounds.candidate(config)) < step(faster, slow)[0]


def test_bound_allows_for_gathers_of_updated_values_during_the_forward_pass():
    """The gradient reduction and the all-gather take as long as a backward and a forward pass."""
    slow = replace(CLUSTER, links=(Link(0, 1e-6, 4e9),))
    line = "model.layers=8 model.hidden=1024 model.heads=8 model.sequence=128 train.batch=128"
    config = settled(f"{line} d=8 zero=1 scheme=1d bucket_mb=4 prefetch=true")
    bounds = Bounds(config, 8, 256, slow)
    assert bounds.least(bounds.candidate(config)) < step(config, slow)[0]


def test_bound_of_a_model_with_a_partial_rotary_embedding():
    """The measured block has heads with one feature, which cannot be rotated in part."""
    config = settled(f"{SMALL} x=8 scheme=1d model.kind=phi3 model.rope_fraction=0.5")
    longrope = {"type": "longrope", "factor": 2.0, "original": 64.0}
    longrope |= dict.fromkeys(("short", "long"), (2.0,) * 8)
    config = replace(config, model=replace(config.model, rope_scaling=longrope))
    bounds = Bounds(config, 8, 256, CLUSTER)
    assert 0 < bounds.least(bounds.candidate(config)) < step(config)[0]


def test_bound_of_a_mixture_counts_capacity_slots():
    """An expert has slots for a quarter of its even share, so the bytes are a fourth."""
    line = "model.hidden=1024 model.heads=8 model.layers=4 model.sequence=512 train.batch=32"
    config = settled(f"{line} model.experts=4 model.capacity=0.25 e=4 x=2")
    bounds = Bounds(config, 8, 256, CLUSTER)
    least, (seconds, _) = bounds.least(bounds.candidate(config)), step(config)
    assert 0.6 * seconds < least < seconds


@pytest.mark.parametrize(
    "line",
    [
        "x=2 y=2 z=2 d=2 scheme=2.5d",
        "x=2 z=2 p=2 scheme=2.5d microbatches=2",
        "x=2 y=2 z=2 d=2 scheme=3d",
        "x=4 d=2 p=2 scheme=1d microbatches=2",
        "x=4 d=2 p=2 scheme=1d-sequence microbatches=2",
        "x=2 y=4 d=2 scheme=2d-summa",
        pytest.param("x=2 y=2 z=2 d=2 scheme=3d-broadcast", marks=pytest.mark.slow),
    ],
)
def test_volumes_are_the_bytes_of_the_matrices(line):
    """The simulation also moves tables, biases and norms, up to 15 % more.

    A rank takes part in all broadcasts and reductions, but receives data in some of them only.
    """
    ranks = prod(int(word[2:]) for word in line.split() if word[1] == "=")
    config = settled(f"{SMALL} train.dtype=float32 {line}", ranks)
    classes = [summary.moved(each) for each in simulate(config, 256, CLUSTER)[0].classes]
    for axis, elements in volumes(config).items():
        found = [{op: count["bytes"] for op, count in moved[axis].items()} for moved in classes]
        moved_bytes = sum(max(each[op] for each in found) for op in found[0])
        moved_bytes *= 2 if axis == "p" else 1  # the first stage receives only gradients
        assert moved_bytes / 1.15 < 4 * elements <= moved_bytes


@pytest.mark.parametrize("line", ["c=2 e=2", "e=2 x=2 scheme=1d-sequence"])
def test_volume_along_the_expert_axis_is_the_bytes_of_the_slots(line):
    config = settled(f"{SMALL} train.dtype=float32 model.experts=4 {line}", 4)
    moved = summary.moved(simulate(config, 256, CLUSTER)[0])
    assert 4 * volumes(config)["e"] == moved["e"]["all_to_all"]["bytes"]


SHORT = "model.layers=2 model.hidden=384 model.heads=24 model.sequence=24 train.batch=24"
LONG = "model.layers=2 model.hidden=3072 model.heads=24 model.sequence=1536 train.batch=24"
SUMMA = [
    f"{model} scheme=2d-summa train.dtype={dtype} {mesh}"
    for model, mesh, dtype in product(
        (SHORT, LONG),
        ("x=2 y=2", "x=4 y=2", "x=2 y=4", "x=3 y=2", "x=8", "y=8", "p=2 x=2 y=2", "d=2 x=2 y=3"),
        ("float32", "bfloat16"),
    )
]
CPUS = replace(hosts(4), gemm=dict.fromkeys(("float32", "bfloat16"), hosts(4).gemm["float32"]))
CLOSE = {"h100": ("h100", 0.5), "gpus": (CLUSTER, 0.45), "cpus": (CPUS, 0.2)}


@pytest.mark.parametrize(("machine", "close"), CLOSE.values(), ids=CLOSE)
@pytest.mark.parametrize("line", strided(SUMMA, 9))
def test_bound_of_summa_is_close_below_the_simulation(line, machine, close):
    """Panels of short matrices cost latency, and those of long matrices bandwidth."""
    machine = load(machine) if isinstance(machine, str) else machine
    ranks = prod(int(word[2:]) for word in line.split() if word[1] == "=")
    config = settled(line, ranks)
    bounds = Bounds(config, ranks, 256, machine)
    least = bounds.least(bounds.moves(config, volumes(config)))
    bubbles = 2 if "p=2" in line else 1  # of one microbatch, the bound assumes more
    assert close / bubbles < least / step(config, machine)[0] < 1


@pytest.mark.parametrize(
    "words", ["reduce_dtype=bfloat16 train.dtype=float32", "compression=powersgd"]
)
def test_bound_does_not_exceed_shortened_gradients(words):
    config = settled(f"{LONG} d=8 {words}")
    far = replace(CLUSTER, ranks_per_node=1, links=(Link(0, 1e-5, 1e8),))
    bounds = Bounds(config, 8, 256, far)
    assert bounds.least(bounds.candidate(config)) < step(config, far)[0]
