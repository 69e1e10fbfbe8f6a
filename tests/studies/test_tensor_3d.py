"""Predicted speedups of the paper on 3-D tensor parallelism."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc3d.config.cuboid import cuboids
from hpc3d.predict.machine.machine import Rates
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.tensor_3d import (
    CLOSE,
    PAPER,
    V100,
    main,
    own_batches,
    planned,
    point,
    reproduces,
    rows,
    variants,
)


@pytest.fixture(scope="module")
def machine():
    return load(V100)


@pytest.mark.parametrize(
    ("dtype", "hidden", "batch"),
    [
        ("float32", 8192, 128),
        ("float16", 16384, 256),
    ],
)
def test_both_published_speedups_are_reproduced_at_one_size(machine, dtype, hidden, batch):
    row = point(machine, batch, hidden, dtype)
    assert row["speedup"] == pytest.approx(PAPER, rel=CLOSE)
    assert reproduces(row)


def test_1d_exceeds_gpu_memory_at_the_published_size(machine):
    fits = point(machine, 128, 8192, "float32")["fits"]
    assert fits == {"1d": False, "2d-summa": True, "3d": True}


def test_published_speedups_are_not_reproduced_everywhere(machine):
    """With small matrices, 1-D communicates much more; with large ones, products hide this."""
    small, large = (point(machine, 64, hidden, "float32") for hidden in (2048, 32768))
    assert small["speedup"]["1d"] > 3 > PAPER["1d"] > 1.5 > large["speedup"]["1d"]
    assert not reproduces(small) and not reproduces(large)


def test_speedups_fall_with_batch_over_2d_and_with_hidden_over_1d(machine):
    found = rows(machine, "float32", hidden=(4096, 8192), batch=(64, 256))
    over = [row["speedup"] for row in found]
    assert over[0]["2d-summa"] > over[1]["2d-summa"]
    assert over[2]["2d-summa"] > over[3]["2d-summa"]
    assert over[0]["1d"] > over[2]["1d"] and over[1]["1d"] > over[3]["1d"]


def test_1d_time_per_sequence_does_not_depend_on_the_batch(machine):
    one, four = (point(machine, batch, 8192, "float32")["ms"]["1d"] for batch in (64, 256))
    assert one == pytest.approx(four, rel=0.02)


def test_schemes_may_use_different_batches(machine):
    found = rows(machine, "float32", hidden=(4096,), batch=(64, 128))
    assert own_batches(found) == [(4096, 128, 64)]
    assert not any(map(reproduces, found))


@pytest.mark.slow
def test_planned_cuboid_is_the_cube_only_if_tokens_match_features(machine):
    assert len(cuboids(64)) == len(set(cuboids(64))) == 28
    square = planned(machine, point(machine, 64, 8192, "float32"))
    assert square["grid"] == (4, 4, 4) and square["over_cube"] == 1
    long = planned(machine, point(machine, 256, 4096, "float32"))
    assert long["grid"][0] > 4 and long["over_cube"] > 1.3


def test_free_communication_gives_equal_speed(machine):
    """If network, memory and launches are free, all schemes take the same time."""
    free = tuple(
        replace(link, alpha_s=0, bandwidth=1e18, node_bandwidth=0, pair_bandwidth=0)
        for link in machine.links
    )
    flat = {"float32": Rates(15.7e12, (1.0,), (14e12,))}
    ideal = replace(machine, links=free, memory_bandwidth=1e18, launch_s=0, gemm=flat)
    over = point(ideal, 128, 8192, "float32")["speedup"]
    assert over == pytest.approx({"1d": 1, "2d-summa": 1}, rel=0.005)


def test_second_port_per_node_favors_1d(machine):
    how = variants(machine)
    changed, options = how["two ports per node"]
    over = [
        point(each, 128, 8192, "float32", **options)["speedup"]["1d"]
        for each in (machine, changed)
    ]
    assert over[1] < over[0]
    _, kept = how["gathered blocks kept"]
    assert point(machine, 128, 8192, "float32", **kept)["speedup"]["1d"] > over[0]


@pytest.mark.slow
def test_command_prints_and_returns_plain_values(capsys):
    import json

    found = main(SimpleNamespace(machine=None))
    assert any(map(reproduces, found["float32"]["rows"]))
    assert all(plan["over_cube"] >= 1 for plan in found["float32"]["planned"])
    json.dumps(found)
    out = capsys.readouterr().out
    assert "does not specify" in out and "4x4x4 1.00" in out
