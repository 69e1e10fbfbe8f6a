"""Pipeline settings that are rejected, and the defaults of unset pipeline settings."""

import re
from math import prod

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems, sized
from tests.elided import elided

PANELS = '{ n = "y", panels = "y" }'  # replicas broadcast panels of W, which have no padding
PAIRED = {
    "mesh.e": 2,
    "model.experts": 4,
    "parallel.overlap_experts": "true",
    "parallel.schedule": "dualpipe-v",
    "parallel.microbatches": 4,
}

PIPELINES = [
    ({"mesh.p": 4}, "mesh.p = 4: 4 ... model.layers = 3; ... 3"),
    (
        {"mesh.p": 2, "parallel.chunks": 2, "parallel.schedule": "zb-v"},
        "mesh.p = 2 x parallel.chunks = 2: 4 ... model.layers = 3; ... 3 model chunks",
    ),
    (
        {"mesh.p": 2, "parallel.layers_per_stage": "[1, 1, 1]"},
        "parallel.layers_per_stage ... 3 ... 2",
    ),
    (
        {"parallel.recompute": "[0, 3]"},
        "parallel.recompute = [0, 3]: layer 3 ... model.layers = 3, use 0 to 2",
    ),
    (
        {"parallel.recompute": "[1, 0, 1]"},
        "parallel.recompute = [1, 0, 1] ... once",
    ),
    (
        {"parallel.recompute": '["mlp", "mlp"]'},
        "parallel.recompute = ['mlp', 'mlp'] ... once",
    ),
    (
        {"mesh.p": 2, "parallel.layers_per_stage": "[1, 1]"},
        "parallel.layers_per_stage = [1, 1]: 2 ... model.layers = 3;",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "none"},
        "mesh.p = 2: schedule none ... 1f1b or mesh.p = 1",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "1f2b"},
        "parallel.schedule = '1f2b': ... 1f1b? ... none, gpipe",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "csv:nowhere.csv"},
        "parallel.schedule = csv:nowhere.csv: nowhere.csv: ... CSV file",
    ),
    (
        {"mesh.p": 2, "parallel.chunks": 2, "model.layers": 4},
        "parallel.chunks = 2: schedule 1f1b requires 1 chunk per stage; use 1",
    ),
    (
        {
            "mesh.p": 3,
            "parallel.microbatches": 2,
            "parallel.schedule": "interleaved",
            "model.layers": 6,
        },
        "parallel.microbatches = 2: schedule interleaved ... 3",
    ),
    (
        {"mesh.p": 2, "parallel.microbatches": 5},
        "train.batch = 144 ... parallel.microbatches = 5; use ... 5",
    ),
    (
        {"mesh.p": 2, "mesh.d": 4, "parallel.microbatches": 48},
        "train.batch / parallel.microbatches = 3 ... mesh.d = 4",
    ),
    (
        {"mesh.d": 2, "parallel.zero": 2, "parallel.scheme": "3d-broadcast"},
        "parallel.zero = 2: ... scheme 3d-broadcast ...; ... 3d",
    ),
    (
        {"mesh.d": 2, "parallel.zero": 2, "parallel.split": '{ m = "x", own = "x" }'},
        "parallel.zero = 2: ... parallel.split ...; ... parallel.zero = 1 or 3",
    ),
    (
        {"parallel.chunked_products": 2, "parallel.scheme": "2d-summa"},
        "parallel.chunked_products = 2: with scheme 2d-summa, products have panels; use 1, ...",
    ),
    (
        {"parallel.chunked_products": 2, "parallel.split": '{ m = "x", own = "x" }'},
        "parallel.chunked_products = 2: with parallel.split, ...; use 1, or scheme 3d",
    ),
    (
        {"parallel.overlap_experts": "true", "parallel.schedule": "dualpipe-v"},
        "parallel.overlap_experts = true: without mesh.e > 1, ...; use false, or mesh.e = 2",
    ),
    (
        PAIRED | {"parallel.schedule": "zb-v"},
        "parallel.overlap_experts = true: schedule zb-v ...; use parallel.schedule = dualpipe-v",
    ),
    (
        PAIRED | {"parallel.microbatches": 1},
        "parallel.microbatches = 1: parallel.overlap_experts ... mesh.p = 1 needs at least 2; ...",
    ),
    (
        PAIRED | {"parallel.offload": '["optimizer", "parameters"]'},
        "parallel.offload = ['optimizer', 'parameters']: parameters of ... cannot ...; use ...",
    ),
    (
        {"parallel.chunked_products": 2, "train.product_dtype": "float8"},
        "parallel.chunked_products = 2: only valid for train.product_dtype = absent; ...",
    ),
    (
        {"mesh.d": 32, "parallel.zero": 3, "train.batch": 160, "parallel.split": PANELS},
        "model.hidden = 144 ... mesh.d = 32; use ... 32",
    ),
    (
        {"mesh.d": 4, "parallel.zero": 1, "parallel.shard": 3},
        "parallel.shard = 3 must divide mesh.d = 4; use 2 or 4",
    ),
    (
        {"mesh.d": 4, "parallel.zero": 1, "parallel.shard": 8},
        "parallel.shard = 8 must divide mesh.d = 4; use 4",
    ),
    (
        {"mesh.d": 4, "parallel.shard": 2},
        "parallel.shard = 2: only valid for parallel.zero = 1 or 2 or 3; ...",
    ),
    (
        {
            "mesh.d": 4,
            "parallel.zero": 1,
            "parallel.shard": 2,
            "parallel.compression": "top-k",
        },
        "parallel.shard = 2: only valid for parallel.compression = none; ...",
    ),
    (
        {
            "mesh.d": 64,
            "parallel.zero": 3,
            "parallel.shard": 32,
            "train.batch": 192,
            "parallel.split": PANELS,
        },
        "model.hidden = 144 ... parallel.shard = 32; use ... 32",
    ),
    (
        {"mesh.d": 10, "parallel.zero": 1, "parallel.shard": 5},
        "train.batch = 144 ... mesh.d = 10; use ... 10",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "pipedream", "model.tied": "false"},
        "train.clip = 1.0: ... pipedream ... train.clip = 0",
    ),
    (
        {
            "mesh.d": 2,
            "mesh.p": 2,
            "parallel.schedule": "pipedream-2bw",
            "parallel.microbatches": 2,
            "parallel.local_steps": 4,
        },
        "parallel.local_steps = 4: ... pipedream-2bw ...; use 0, or a synchronous schedule",
    ),
    (
        {"parallel.local_steps": 4},
        "parallel.local_steps = 4: mesh.d = 1 ... single worker...; use 0, or ... above 1",
    ),
    (
        {"mesh.d": 2, "parallel.zero": 1, "parallel.shard": 2, "parallel.local_steps": 4},
        "parallel.local_steps = 4: mesh.d = 2 ... single worker...above parallel.shard",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "pipedream", "train.clip": 0},
        "model.tied = true: ... pipedream ... model.tied = false",
    ),
]


@pytest.mark.parametrize(("changes", "line"), PIPELINES)
def test_invalid_pipeline_settings_are_rejected(changes, line):
    changes = {"model.layers": 3, "mesh.x": 1, "mesh.y": 1, "mesh.z": 1, **changes}
    ranks = prod(changes.get(f"mesh.{axis}", 1) for axis in "pde")
    said = problems(*sized({f"--{key}": value for key, value in changes.items()}), ranks=ranks)
    assert len(said) == 1 and re.match(elided(line), said[0])


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize(("changes", "line"), PIPELINES)
def test_pipeline_errors_are_the_same_with_an_open_cuboid(changes, line, inner):
    if " mesh.d = " in line or " parallel.shard = " in line:
        return  # another cuboid might do
    sizes = {"model.layers": 3, **changes}
    ranks = prod(sizes.get(f"mesh.{axis}", 1) for axis in "pde") * inner
    said = problems(*sized({f"--{key}": value for key, value in sizes.items()}), ranks=ranks)
    assert len(said) == 1 and re.match(elided(line), said[0])


def test_negative_layers_per_stage_are_rejected():
    (said,) = problems("--mesh.p", "2", "--parallel.layers_per_stage", "[3, -1]", ranks=2)
    assert re.match(elided("parallel.layers_per_stage = [3, -1]: ... -1 ... 0"), said)


def test_listed_chunks_can_have_no_layers():
    sizes = "--model.layers 2 --mesh.p 4 --mesh.x 1 --mesh.y 1 --mesh.z 1"
    config = load(None, [*sizes.split(), "--parallel.layers_per_stage", "[0, 2, 0, 0]"])
    assert [*map(len, resolve(config, 4).layers())] == [0, 2, 0, 0]


def test_asynchronous_schedule_limits_the_number_of_steps():
    how = "--mesh.p 2 --parallel.schedule pipedream-2bw --parallel.microbatches 2 --train.steps"
    resolve(load(None, [*how.split(), "12500"]), 2)
    (said,) = problems(*how.split(), "12501", ranks=2)
    assert said.startswith("train.steps = 12501: schedule pipedream-2bw") and "12,500" in said


def test_number_of_chunks_follows_the_schedule():
    def chunks(schedule, *more):
        how = ["--model.layers", "8", "--mesh.p", "2", "--parallel.microbatches", "2", *more]
        return resolve(load(None, [*how, "--parallel.schedule", schedule]), 2).parallel.chunks

    assert [chunks(name) for name in ("1f1b", "zb-v", "interleaved")] == [1, 2, 2]
    assert chunks("interleaved", "--parallel.chunks", "4") == 4


def test_default_schedule_is_1f1b_on_several_stages():
    sizes = ["--model.layers", "3", "--mesh.x", "1", "--mesh.y", "1", "--mesh.z", "1"]
    one, two = (resolve(load(None, [*sizes, "--mesh.p", str(p)]), p) for p in (1, 2))
    assert (one.parallel.schedule, two.parallel.schedule) == ("none", "1f1b")
    assert two.layers() == [range(1), range(1, 3)]


def test_overlapping_passes_need_greenlet(monkeypatch):
    monkeypatch.setattr("hpc3d.runtime.optional_packages.find_spec", lambda package: None)
    said = problems(*sized({f"--{key}": value for key, value in PAIRED.items()}), ranks=2)
    assert said == ["parallel.overlap_experts needs greenlet: pip install greenlet"]
