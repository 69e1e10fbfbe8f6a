"""Logits with a key-value cache match the full forward pass on every layout."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.decoder import Decoder, sequences_for
from hpc3d.model.families import family_of
from hpc3d.model.key_value_cache import CachedAttention
from hpc3d.model.microbatch import Microbatch
from hpc3d.tensor.split import SCHEMES, Split
from hpc3d.training.trainer import spec_of
from tests.checkpoints.drawn_models import draw
from tests.model.whole import Model
from tests.pipeline.mixes import config_of
from tests.strided import strided

SEQUENCE = 9
COMMON = f"schedule=none microbatches=1 batch=48 layers=2 sequence={SEQUENCE}"
KINDS = [
    "kind=gpt2",
    "kind=gpt2 tied=false gelu=exact vocabulary=31",
    "kind=llama kv_heads=4 ffn=48",
    "kind=llama kv_heads=1 ffn=48",  # which every rank has
    "kind=qwen2 kv_heads=4 ffn=24 tied=false",
    "kind=qwen3 kv_heads=1 head_dim=4 ffn=48",
    "kind=olmo2 kv_heads=2 ffn=48",
    "kind=gemma kv_heads=4 head_dim=4 ffn=48",
    "kind=gemma2 kv_heads=4 ffn=48 window=3 global_every=2 score_cap=0.7 logit_cap=1.5",
    "kind=gemma3_text head_dim=4 window=3 global_every=2 rope_window_theta=20 query_scalar=9",
    "kind=gpt_neox rope_fraction=0.5 hidden=48 tied=false",
    "kind=llama kv_heads=4 head_dim=4 ffn=48 attention_bias=true mlp_bias=true",
    "window=3 global_every=2",
]
MIXTURES = [
    "experts=4 top_k=2 capacity=0 moe_every=2 shared_experts=1 balance_bias=0.1",
    "kind=llama ffn=48 experts=6 top_k=3 capacity=0",
]
MESHES = """
x=2 scheme=1d
x=4 scheme=1d
x=2 scheme=1d-sequence
x=4 scheme=1d-sequence
x=2 y=2 scheme=2d
x=3 y=2 scheme=2d
x=2 y=2 scheme=2d-summa
x=2 y=2 z=2 scheme=2.5d
x=2 y=2 z=2 scheme=3d
y=4 z=1 scheme=3d
x=3 z=2 scheme=3d
x=2 y=2 z=2 scheme=3d-broadcast
y=2 z=2 scheme=3d-broadcast
""".strip().splitlines()


def forward_of(line):
    """Return the forward pass of training on one rank, which maps tokens [sequences, t] to logits
    [sequences, t, vocabulary]."""
    config = config_of(line)
    family, count = family_of(config.model), config.model.vocabulary
    sizes = replace(family.sizes(config.model, count), separator=config.data.document_end())
    (model,) = run({}, lambda mesh: Model(mesh, sizes, Split(), family=family))
    for item in model.parameters:
        draw(item, model.mesh)

    def logits(tokens):
        padded = np.zeros((len(tokens), config.model.sequence), int)
        padded[:, : tokens.shape[1]] = tokens
        micro, stage = Microbatch(0, 0, padded, padded, 1.0), model.stage
        x, _ = stage.embeddings.forward(micro)
        for block in stage.blocks:
            x, _ = block.forward(x, micro)
        found, _ = stage.head.logits(x)
        return found.reshape(*padded.shape, -1)[:, : tokens.shape[1], :count]

    return logits


def decoder_of(mesh, config, capacity=SEQUENCE):
    """Return a decoder with weights that depend on names, in the type of the configuration."""
    spec = spec_of(config, config.model.vocabulary)
    decoder = Decoder(mesh, spec, config.train.dtype, capacity)
    for item in decoder.parameters:
        draw(item, mesh)
    return decoder


def step_by_step(line, tokens, parts):
    """Return the logits of each rank after each of the `parts` of the tokens."""
    config = config_of(line)

    def rank(mesh):
        split, mixes = config.splits["dense"], config.model.experts > 0
        assert sequences_for(mesh.sizes, split, len(tokens), mixes) == len(tokens)
        decoder, start, found = decoder_of(mesh, config), 0, []
        for count in parts:
            found.append(decoder.forward(tokens[:, start : start + count]).copy())
            start += count
        return found

    return run(config.sizes(), rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["", *strided(MESHES, 6)])
def test_cached_decoder_logits_match_the_full_forward_pass(mesh, kind):
    line = f"{COMMON} {kind} {mesh}"
    ranks = prod(config_of(line).mesh.sizes().values())
    tokens = np.random.default_rng(3).integers(0, 29, (2 * ranks, SEQUENCE))
    parts = [4, 1, 1, 2, 1]
    expected = forward_of(f"{COMMON} {kind}")(tokens)[:, np.cumsum(parts) - 1]
    for found in step_by_step(line, tokens, parts):
        for number, logits in enumerate(found):
            np.testing.assert_allclose(logits, expected[:, number], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "mesh", ["", *strided([mesh for mesh in MESHES if "broadcast" not in mesh], 5)]
)
@pytest.mark.parametrize("kind", MIXTURES)
def test_cached_decoder_logits_of_experts_match_the_full_forward_pass(mesh, kind):
    test_cached_decoder_logits_match_the_full_forward_pass(mesh, kind)


def test_forget_resets_the_decoder():
    tokens = np.random.default_rng(3).integers(0, 29, (1, 5))

    def rank(mesh):
        decoder = decoder_of(mesh, config_of(f"{COMMON} {KINDS[2]}"))
        first = decoder.forward(tokens).copy()
        other = decoder.forward(tokens[:, :2])
        decoder.forget()
        return first, other, decoder.forward(tokens)

    first, other, again = run({}, rank)[0]
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_layers_share_the_rotary_table_of_a_call(monkeypatch):
    made, table = [], CachedAttention.table

    def counted(layer, micro, dtype):
        made.append(layer.kept.length)
        return table(layer, micro, dtype)

    monkeypatch.setattr(CachedAttention, "table", counted)
    step_by_step(f"{COMMON} {KINDS[2]}", np.zeros((1, SEQUENCE), int), [4, 1, 1])
    assert made == [0, 4, 5]


def test_decoder_has_no_gradients_or_optimizer_state():
    def rank(mesh):
        decoder = decoder_of(mesh, config_of(COMMON))
        return decoder.parameters.value.size, decoder.parameters.grad.size, mesh.pool.live

    values, gradients, live = run({}, rank)[0]
    assert values and not gradients and not live["gradient"]


@pytest.mark.parametrize(
    ("scheme", "sizes", "samples", "expected"),
    [
        ("1d", {"x": 4}, 1, 1),
        ("1d", {"x": 4}, 3, 3),
        ("1d-sequence", {"x": 4}, 3, 4),
        ("1d-sequence", {"x": 4}, 5, 8),
        ("2d", {"x": 2, "y": 3}, 1, 6),  # X[m_xy], Y[m_x]
        ("3d", {"x": 2, "y": 3, "z": 5}, 1, 30),  # X[m_xy], Y[m_xz]
        ("3d", {"y": 3, "z": 5}, 1, 15),
        ("3d-broadcast", {"x": 2, "y": 3, "z": 5}, 1, 2),
    ],
)
def test_sequences_divide_over_the_axes_that_split_rows(scheme, sizes, samples, expected):
    assert sequences_for(sizes, SCHEMES[scheme], samples) == expected


@pytest.mark.parametrize(
    ("scheme", "plain", "mixed"),
    [("1d", 1, 1), ("1d-sequence", 2, 2), ("2d-summa", 4, 4), ("2.5d", 8, 8), ("3d", 4, 8)],
)
def test_expert_sequences_divide_over_all_ranks_that_route_rows(scheme, plain, mixed):
    sizes = {"x": 2, "y": 2, "z": 2}
    assert sequences_for(sizes, SCHEMES[scheme], 1) == plain
    assert sequences_for(sizes, SCHEMES[scheme], 1, mixes=True) == mixed
