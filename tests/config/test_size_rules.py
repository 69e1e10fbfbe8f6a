"""Sizes that are not divisible, with their error messages."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems, sized
from tests.elided import elided


@pytest.mark.parametrize(("kv_heads", "y"), [(1, 8), (2, 8), (4, 4), (8, 4), (24, 8)])
def test_kv_heads_and_tensor_ranks_must_divide_each_other(kv_heads, y):
    words = sized({"--model.kind": "llama", "--model.kv_heads": kv_heads}, "--mesh.y", str(y))
    assert resolve(load(None, words), y).model.kv_heads == kv_heads


@pytest.mark.parametrize(
    ("changes", "mesh", "lines"),
    [
        (
            {"--train.batch": 142, "--model.sequence": 3},
            {"x": 2, "y": 4},
            ["train.batch x model.sequence = 426 ... mesh.x x mesh.y = 8"],
        ),
        (
            {"--train.batch": 142},
            {"x": 2, "z": 4},
            ["train.batch = 142 ... mesh.x x mesh.z = 8"],
        ),
        ({"--model.heads": 18}, {"y": 4, "x": 2}, ["model.heads = 18", "mesh.y = 4"]),
        (
            {"--model.kind": "llama", "--model.kv_heads": 6, "--model.ffn": 180},
            {"y": 8},
            [
                "model.kv_heads = 6 ... mesh.y = 8 ...; use 4 or 8",
                "model.ffn = 180 ... mesh.y = 8; use ... 8",
            ],
        ),
        (
            {"--model.kind": "llama", "--model.heads": 9, "--model.head_dim": 6},
            {"x": 8},
            ["model.heads x model.head_dim = 54 ... mesh.x = 8; use ... 8"],
        ),
        (
            {"--model.kind": "qwen2", "--model.heads": 36, "--model.kv_heads": 9},
            {"x": 2, "y": 2, "z": 2},
            ["model.kv_heads = 9 ... mesh.y = 2 ...; use 6 or 12"],
        ),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"z": 8},
            ["model.hidden = 150 ... mesh.z = 8; use ... 8"],
        ),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"x": 8},
            ["model.hidden = 150 ... mesh.x = 8; use ... 8"],
        ),
        (
            {"--model.heads": 25},
            {"x": 8},
            ["model.hidden = 144 ... model.heads = 25;"],
        ),
    ],
)
def test_indivisible_size_error_names_the_key_and_axes(changes, mesh, lines):
    axes = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", str(size))]
    said = problems(*sized(changes, *axes))
    assert all(any(re.search(elided(line), one) for one in said) for line in lines)
    keys = ["train.batch", "train.batch x model.sequence"]
    keys += [f"model.{size}" for size in ("heads", "kv_heads", "hidden", "ffn")]
    keys.append("model.heads x model.head_dim")
    assert all(one.split(" = ")[0] in keys for one in said)


@pytest.mark.parametrize("scheme", ["3d", "1d"])
def test_mesh_with_another_number_of_ranks_is_the_only_error(scheme):
    (said,) = problems(*sized({"--mesh.x": 5, "--mesh.y": 7, "--parallel.scheme": scheme}))
    assert said.startswith("mesh: x 5 x y 7 = 35 ranks, but the job has 8 ranks; ")
