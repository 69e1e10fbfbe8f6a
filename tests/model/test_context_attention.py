"""Ring attention and head exchange, compared with attention on one rank; bytes and memory."""

from collections import Counter

import numpy as np
import pytest
import torch

from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.threads import run
from hpc3d.model.context import Context
from hpc3d.model.context_attention import _pairs, attention_of
from hpc3d.model.families import BERT, GEMMA2, GPT2, LLAMA
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.ops.chunk_tiles import Hop
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.tensor.split import Split
from hpc3d.trace.schema import OP, PHASE
from tests.strided import strided

B, T, WIDTH, HEADS = 2, 24, 4, 12
PADDING = 3
RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 5, (B, T))
TOKENS[1, 4:] = PADDING  # nearly all of a sequence


def sizes_of(kv_heads=HEADS, **more):
    hidden = HEADS * WIDTH
    return ModelSizes(1, hidden, HEADS, T, 5, kv_heads=kv_heads, ffn=4, **more)


KINDS = {
    "causal": (GPT2, sizes_of()),
    "dropout": (GPT2, sizes_of(dropout=0.25)),
    "several queries a key": (LLAMA, sizes_of(kv_heads=6)),
    "both": (LLAMA, sizes_of(kv_heads=6, dropout=0.25)),
    "bidirectional": (BERT, sizes_of()),
    "padded": (BERT, sizes_of(padding=PADDING, dropout=0.25)),
    "capped": (GEMMA2, sizes_of(kv_heads=6, score_cap=0.7, dropout=0.25)),
    "documents": (LLAMA, sizes_of(kv_heads=6, separator=1, dropout=0.25)),
    "one key": (LLAMA, sizes_of(kv_heads=1, dropout=0.25)),
    "two keys": (LLAMA, sizes_of(kv_heads=2)),
}
CONTEXTS = {
    "chunked": Context(T),
    "ring of 2": Context(T, 2),
    "ring of 3": Context(T, 3),
    "ring of 4": Context(T, 4),
    "2 exchange": Context(T, 1, 2),
    "3 exchange": Context(T, 1, 3),
    "ring of 2, 2 exchange": Context(T, 2, 2),
    "ring of 3, 2 exchange": Context(T, 3, 2),
}


def spec_of(kind, context, chunked):
    family, sizes = KINDS[kind]
    split = Split(m="c", replicate="c")
    return ModelSpec(family, sizes, {"dense": split}, seed=3, context=context, chunked=chunked)


def blocks(kind):
    """Return [q|k|v] of full sequences, and the gradient of the output."""
    sizes = KINDS[kind][1]
    shapes = (B * T, sizes.qkv), (B * T, sizes.hidden)
    draw = np.random.default_rng(5)
    return [draw.normal(size=shape) for shape in shapes]


def micro_of(context):
    tokens = context.cut(TOKENS)
    return Microbatch(4, 7, tokens, tokens, 1.0)


def attended(mesh, kind, context, chunked=True, window=0):
    """Return output and gradient for this rank's rows of [q|k|v], and the row indices."""
    layer = attention_of(mesh, "layers.0.drop_p", spec_of(kind, context, chunked), window)
    part = slice(mesh.coord("c") * B * context.tokens, (mesh.coord("c") + 1) * B * context.tokens)
    rows = np.array(context.rows(part, B * context.parts, 0))
    qkv, dout = (block[rows] for block in blocks(kind))
    micro = micro_of(context)
    out, saved = layer.forward(qkv, micro)
    return out, layer.backward(dout, saved, micro), rows


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two keys"])
def test_context_attention_matches_a_single_rank(kind, context):
    out, dqkv, _ = run({}, lambda mesh: attended(mesh, kind, Context(T), chunked=False))[0]
    for found, gradient, rows in run(
        {"c": context.parts}, lambda mesh: attended(mesh, kind, context)
    ):
        np.testing.assert_allclose(found, out[rows], rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient, dqkv[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("window", strided([1, 2, 3, 4, 7, 9, 13, 23], 4, 2))
@pytest.mark.parametrize("kind", ["causal", "both"])
def test_windowed_context_attention_matches_a_single_rank(kind, context, window):
    out, dqkv, _ = run({}, lambda mesh: attended(mesh, kind, Context(T), False, window))[0]
    for found, gradient, rows in run(
        {"c": context.parts}, lambda mesh: attended(mesh, kind, context, True, window)
    ):
        np.testing.assert_allclose(found, out[rows], rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient, dqkv[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("window", "cap"),
    [(1, 0), (5, 0), (64, 0), (65, 0), (100, 0), (160, 0.7), (5, 0.7), (65, 0.7)],
)
def test_window_and_soft_cap_of_a_long_sequence_match_torch(window, cap, chunked, monkeypatch):
    """Chunks have 16 tokens, and blocks of full attention 64 queries."""
    monkeypatch.setattr("hpc3d.model.context_attention._CHUNK", 16)
    tokens, heads, width = 160, 2, 4
    sizes = ModelSizes(1, heads * width, heads, tokens, 5, score_cap=cap)
    split = {"dense": Split(m="c", replicate="c")}
    spec = ModelSpec(GPT2, sizes, split, context=Context(tokens), chunked=chunked)
    draw = np.random.default_rng(8)
    qkv, dout = draw.normal(size=(tokens, sizes.qkv)), draw.normal(size=(tokens, sizes.hidden))
    zeros = np.zeros((1, tokens), int)
    micro = Microbatch(0, 0, zeros, zeros, 1.0)

    def rank(mesh):
        layer = attention_of(mesh, "p", spec, window)
        out, saved = layer.forward(qkv.copy(), micro)
        return out, layer.backward(dout, saved, micro)

    leaf = torch.tensor(qkv, requires_grad=True)
    q, k, v = leaf.reshape(tokens, heads, 3, width).permute(2, 1, 0, 3)
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (back >= 0) & (back < window)
    scores = q @ k.mT / width**0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    expected = expected.transpose(0, 1).reshape(tokens, -1)
    expected.backward(torch.tensor(dout))
    _pairs.cache_clear()
    found, gradient = run({}, rank)[0]
    _pairs.cache_clear()
    np.testing.assert_allclose(found, expected.detach(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(gradient, leaf.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rings", [2, 3, 4, 5, 8])
def test_hops_reach_all_tokens_in_a_window_and_no_others(rings):
    """A hop is made if a query of some rank attends to a key at this distance."""
    length, kinds = 4 * rings, set()
    context = Context(length, rings)
    owner = np.empty(length, int)
    for ring_rank in range(rings):
        owner[context.positions(ring_rank)] = ring_rank
    for window in range(1, length + 1):
        pairs = [(i, j) for i in range(length) for j in range(max(0, i - window + 1), i + 1)]
        needed = {(owner[i] - owner[j]) % rings for i, j in pairs} - {0}
        assert {*context.hops(window)} == needed
        kinds.add(len(needed))
    assert kinds >= {0, rings - 1} and context.hops() == tuple(range(1, rings))


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_hops_of_a_ring_are_rectangles(kind):
    """Each rank of a ring of 3 has 2 chunks of 4 tokens."""
    first, second, both = slice(0, 4), slice(4, 8), slice(0, 8)
    shapes = {0: (both, both, True), -1: (both, first, False), 1: (second, both, False)}
    for here in range(3):
        mesh = abstract_mesh({"c": 3}, {"c": here})
        layer = attention_of(mesh, "p", spec_of(kind, Context(T, 3), True))
        for there, pairs in enumerate(layer.pairs):
            causal = shapes[(there > here) - (there < here)]
            assert Hop.of(pairs) == (causal if kind == "causal" else (both, both, False))


@pytest.mark.parametrize("rings", [2, 3, 4])
def test_causal_ring_computes_every_needed_tile_once_and_shares_them_equally(rings):
    """With 2 r chunks, a causal mask needs r (2 r + 1) pairs of chunks, 2 r + 1 on each rank."""
    chunk, tiles = T // (2 * rings), []
    for here in range(rings):
        mesh = abstract_mesh({"c": rings}, {"c": here})
        layer = attention_of(mesh, "p", spec_of("causal", Context(T, rings), True))
        mine = [
            (pair.query_position // chunk, pair.key_position // chunk)
            for pairs in layer.pairs
            for pair in pairs
        ]
        assert len(mine) == 2 * rings + 1
        tiles += mine
    needed = [(query, key) for query in range(2 * rings) for key in range(query + 1)]
    assert sorted(tiles) == needed


@pytest.mark.parametrize(("kind", "u"), [("causal", 2), ("one key", 2), ("two keys", 6)])
def test_unchunked_attention_exchanges_full_sequences(kind, u):
    """With fewer keys than ranks, some ranks share a key."""
    context = Context(T, 1, u)
    out, dqkv, _ = run({}, lambda mesh: attended(mesh, kind, Context(T), chunked=False))[0]
    for found, gradient, rows in run(
        {"c": u}, lambda mesh: attended(mesh, kind, context, chunked=False)
    ):
        np.testing.assert_allclose(found, out[rows], rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient, dqkv[rows], rtol=0, atol=1e-12)


def counted(kind, context, dtype="float64", window=0, rank=0):
    """Return {(op, phase): bytes received by a rank along c}, and the attention FLOPs."""
    recorder = MemoryRecorder(0, lambda: 0)
    bare = abstract_mesh({"c": context.parts}, {"c": rank})
    mesh = bare.traced(recorder)
    layer = attention_of(mesh, "layers.0.drop_p", spec_of(kind, context, True), window)
    sizes, rows = KINDS[kind][1], B * context.tokens
    micro = micro_of(context)
    with mesh.trace.scope(phase="forward"):
        _, saved = layer.forward(mesh.empty((rows, sizes.qkv), dtype), micro)
    with mesh.trace.scope(phase="backward"):
        layer.backward(mesh.empty((rows, sizes.hidden), dtype), saved, micro)
    received, flops = Counter(), Counter()
    for event in recorder.rows():
        op, phase = OP[event["op"]], PHASE[event["phase"]]
        received[op, phase] += int(event["bytes"])
        flops[phase] += event["flops"] if op == "attention" else 0
    return received, flops


@pytest.mark.parametrize(
    ("dtype", "item", "wide"), [("float64", 8, 8), ("float32", 4, 4), ("float16", 2, 4)]
)
@pytest.mark.parametrize("kind", ["causal", "both"])
@pytest.mark.parametrize("c", [2, 3, 4])
def test_received_bytes_of_ring_attention(c, kind, dtype, item, wide):
    """Forward 2 (c-1) K e, backward 2 (c-1) K (e + w)."""
    keys = B * T // c * KINDS[kind][1].kv_heads * WIDTH
    received, _ = counted(kind, Context(T, c), dtype)
    assert received["recv", "forward"] == 2 * (c - 1) * keys * item
    assert received["recv", "backward"] == 2 * (c - 1) * keys * (item + wide)


@pytest.mark.parametrize("kind", ["causal", "both"])
def test_window_leaves_out_hops_and_chunks(kind):
    """A ring of 4 has 8 chunks of 3 tokens. A window of 4 tokens reaches 1 chunk back, 5 tokens 2.

    Rank i has the chunks i and 7 - i, and receives blocks from 1 or 2 ranks away in both
    directions. Each chunk attends to itself and to the chunks within reach.
    """
    keys, chunk = B * T // 4 * KINDS[kind][1].kv_heads * WIDTH, B * HEADS * WIDTH * (T // 8) ** 2
    for window, reach, hops in ((1, 0, 0), (4, 1, 2), (5, 2, 3)):
        for rank in range(4):
            received, flops = counted(kind, Context(T, 4), window=window, rank=rank)
            assert received["recv", "forward"] == 2 * hops * keys * 8
            assert received["recv", "backward"] == 2 * hops * keys * 16
            pairs = sum(1 + min(reach, number) for number in (rank, 7 - rank))
            assert (flops["forward"], flops["backward"]) == (4 * chunk * pairs, 10 * chunk * pairs)


@pytest.mark.parametrize("kind", ["causal", "both", "one key"])
@pytest.mark.parametrize("u", [2, 3])
def test_received_bytes_of_ulysses_attention(u, kind):
    """(1 - 1/u) (2 Q + 2 K) e in each pass, with all_to_all or with messages between neighbors.

    A rank needs a complete key, also if it is the only one, so K has at least u heads.
    """
    sizes = KINDS[kind][1]
    for rings, op in ((1, "all_to_all"), (2, "recv")):
        context = Context(T, rings, u)
        tokens = B * context.tokens
        queries, keys = tokens * sizes.hidden, tokens * max(u, sizes.kv_heads) * WIDTH
        moved = (u - 1) * (2 * queries + 2 * keys) * 8 // u
        ring = (rings - 1) * 2 * keys * 8
        received, _ = counted(kind, context)
        assert received[op, "forward"] == moved + ring
        assert received[op, "backward"] == moved + 2 * ring


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_flops_of_chunked_attention(context):
    """Per score 4 D forward and 10 backward, because p is recomputed; (2r+1) / (4r) of the square
    with a causal mask, all of it without. A rank with T / 256 chunks counts as one chunk here."""
    square, chunks = B * HEADS * T * T * WIDTH // context.parts, 2 * context.rings
    share = 1 if context.rings == 1 else (chunks + 1) / (2 * chunks)
    for kind, seen in (("causal", share), ("bidirectional", 1)):
        _, flops = counted(kind, context)
        assert flops["forward"] == pytest.approx(4 * square * seen)
        assert flops["backward"] == pytest.approx(10 * square * seen)


@pytest.mark.parametrize(("cap", "products"), [(0.0, 4), (0.7, 5)])
def test_flops_of_full_attention_with_a_soft_cap(cap, products):
    """The backward pass computes q k^T again; the saved data is the same as without a cap."""
    sizes = ModelSizes(1, HEADS * WIDTH, HEADS, T, 5, score_cap=cap)
    split, recorder = {"dense": Split()}, MemoryRecorder(0, lambda: 0)
    mesh = abstract_mesh({}, {}).traced(recorder)
    layer, micro = attention_of(mesh, "p", ModelSpec(GPT2, sizes, split)), micro_of(Context(T))
    qkv, dout = (mesh.empty((B * T, n), "float64") for n in (sizes.qkv, sizes.hidden))
    out, saved = layer.forward(qkv, micro)
    kept = qkv, dout, out, saved.probabilities
    assert mesh.pool.live.total() == sum(each.nbytes for each in kept)
    layer.backward(dout, saved, micro)
    product = 2 * B * HEADS * T * T * WIDTH
    assert [row["flops"] for row in recorder.rows()] == [2 * product, products * product]


def kept(length, rings=1, chunked=True):
    """Return the elements that attention saves besides [q|k|v], with a ring of `rings` ranks."""
    sizes = ModelSizes(1, HEADS * WIDTH, HEADS, length, 5)
    spec = ModelSpec(
        GPT2,
        sizes,
        {"dense": Split(m="c", replicate="c")},
        context=Context(length, rings),
        chunked=chunked,
    )
    mesh = abstract_mesh({"c": rings}, {"c": 0})
    layer, tokens = attention_of(mesh, "p", spec), spec.context.tokens
    zeros = np.zeros((rings, tokens), np.int32)
    qkv = mesh.empty((tokens, sizes.qkv), "float64")
    _, saved = layer.forward(qkv, Microbatch(0, 0, zeros, zeros, 1.0))
    assert saved
    return (mesh.pool.live.total() - qkv.nbytes) / 8


def test_saved_memory_is_linear_in_the_sequence_and_shrinks_with_the_ring():
    """The output and a sum per row and head are saved; full attention saves T per row and head."""
    per_token = HEADS * WIDTH + HEADS
    assert kept(1024) == 1024 * per_token
    assert kept(4096) == 4096 * per_token
    assert kept(4096, rings=4) == 1024 * per_token
    assert kept(1024, chunked=False) == 1024 * (HEADS * WIDTH + HEADS * 1024)
