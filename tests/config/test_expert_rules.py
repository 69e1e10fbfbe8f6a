"""Mixture-of-experts settings that are rejected, and limits that are accepted."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.config.test_context_rules import ranks_of
from tests.elided import elided

FOUR = "--model.experts 4"
FAMILIES = "model.experts = 4: ... model.kind = gpt2 or llama or qwen3; ..."
# Options, and the line.
WRONG = {
    "--mesh.e 2": "mesh.e = 2: ... model.experts > 0; ...",
    "--model.top_k 2": "model.top_k = 2: ... model.experts > 0; ...",
    "--model.capacity 0": "model.capacity = 0.0: ... model.experts > 0; ...",
    "--model.moe_every 2": "model.moe_every = 2: ... model.experts > 0; ...",
    "--model.shared_experts 1": "model.shared_experts = 1: ... model.experts > 0; ...",
    "--model.balance_loss 0": "model.balance_loss = 0.0: ... model.experts > 0; ...",
    "--model.z_loss 0": "model.z_loss = 0.0: ... model.experts > 0; ...",
    "--model.balance_bias 0.1": "model.balance_bias = 0.1: ... model.experts > 0; ...",
    f"{FOUR} --model.top_k 5": "model.top_k = 5 ... model.experts = 4; use at most 4",
    f"{FOUR} --model.layers 2 --model.moe_every 3": (
        "model.moe_every = 3 ... model.layers = 2, ... use at most 2"
    ),
    f"{FOUR} --mesh.e 8": "model.experts = 4 ... mesh.e = 8; use a multiple of 8",
    f"{FOUR} --mesh.x 2 --parallel.scheme 3d-broadcast": (
        "model.experts = 4: with scheme 3d-broadcast ... use parallel.scheme = 3d"
    ),
    f"{FOUR} --model.balance_bias 0.001 --train.dtype bfloat16": (
        "model.balance_bias = 0.001: bfloat16 ... train.dtype = float32"
    ),
    f"{FOUR} --model.kind bert": FAMILIES,
    f"{FOUR} --model.kind qwen2 --model.kv_heads 4": FAMILIES,
    "--model.kind bert --model.top_k 2": (
        "model.top_k = 2: ... model.kind = gpt2 or llama or qwen3 and model.experts > 0; ..."
    ),
    "--model.kind bert --mesh.e 2": "mesh.e = 2: ... model.experts > 0; ...",
    f"{FOUR} --model.capacity -1": "model.capacity = -1.0: must be at least 0 ...",
    f"{FOUR} --model.capacity inf": "model.capacity = inf: ...",
    f"{FOUR} --model.capacity nan": "model.capacity = nan: ...",
    f"{FOUR} --model.balance_loss -1e-9": "model.balance_loss = -1e-09: ...",
    f"{FOUR} --model.z_loss inf": "model.z_loss = inf: ...",
    f"{FOUR} --model.balance_bias -0.1": "model.balance_bias = -0.1: ...",
    f"{FOUR} --model.balance_bias 1": "model.balance_bias = 1.0: ... at least 0 and below 1",
    f"{FOUR} --model.top_k 0": "model.top_k = 0: must be at least 1...",
    "--model.experts -1": "model.experts = -1: must be at least 0...",
    f"{FOUR} --model.moe_every 0": "model.moe_every = 0: must be at least 1...",
    f"{FOUR} --mesh.e 2 --parallel.microbatches 64": (
        "train.batch / parallel.microbatches = 3 ... mesh.e = 2; ..."
    ),
    f"{FOUR} --mesh.x 2 --mesh.y 2 --parallel.split {{m='x',n='y',own='y'}}": (
        "model.experts = 4: with parallel.split ... diagonal of y ..."
    ),
    f"{FOUR} --model.balance_bias 0.001 --train.dtype float16": (
        "model.balance_bias = 0.001: float16 ..."
    ),
    f"{FOUR} --mesh.e 2 --mesh.x 5 --parallel.zero 3 --train.batch 10": (
        "model.hidden = 384 ... mesh.x = 5; use a multiple of 5..."
    ),
    f"{FOUR} --mesh.e 2 --train.batch 9": (
        "train.batch = 9 ... mesh.e = 2; use a multiple of 2..."
    ),
    f"{FOUR} --mesh.x 2 --mesh.y 4 --mesh.z 2 --train.batch 8 --model.sequence 3": (
        "train.batch x model.sequence = 24 ... mesh.y x mesh.x x mesh.z = 16; use ... 16..."
    ),
}
ALLOWED = [
    f"{FOUR} --model.top_k 4",
    f"{FOUR} --model.layers 2 --model.moe_every 2",
    f"{FOUR} --mesh.e 4",
    f"{FOUR} --mesh.c 2 --mesh.e 2",
    f"{FOUR} --mesh.x 2 --parallel.scheme 3d",
    f"{FOUR} --mesh.x 2 --mesh.y 2 --parallel.split {{m='x',n='y',replicate='y'}}",
    f"{FOUR} --model.balance_bias 0.001",
    f"{FOUR} --model.capacity 1e308 --model.balance_loss 1e308 --model.z_loss 1e-320",
    f"{FOUR} --model.balance_loss 0 --train.dtype bfloat16",
    f"{FOUR} --mesh.e 2 --mesh.c 2 --train.backend cupy",
    f"{FOUR} --mesh.e 2 --mesh.c 2 --parallel.context all-to-all",
    f"{FOUR} --mesh.e 2 --mesh.c 4 --parallel.context both --parallel.ulysses 2",
    f"{FOUR} --mesh.e 2 --parallel.microbatches 96",
    f"{FOUR} --model.capacity 0 --model.z_loss 0 --model.balance_loss 0",
    f"{FOUR} --model.kind llama --model.kv_heads 4",
    f"{FOUR} --mesh.e 2 --guard.abft_every 1",
    f"{FOUR} --mesh.x 2 --mesh.y 4 --mesh.z 2 --train.batch 8 --model.sequence 4",
    f"{FOUR} --mesh.x 4 --parallel.scheme 1d-sequence --parallel.microbatches 192",
]


@pytest.mark.parametrize("words", WRONG)
def test_invalid_expert_settings_are_rejected(words):
    options = words.split()
    (line,) = problems(*options, ranks=ranks_of(options))
    assert re.match(elided(WRONG[words]), line)


@pytest.mark.parametrize("words", ALLOWED)
def test_expert_settings_at_the_limits_are_accepted(words):
    options = words.split()
    assert resolve(load(None, options), ranks_of(options)).model.experts == 4
