"""Arrays of 16-bit floats; their sums are accumulated in float32."""

import ml_dtypes
import numpy as np
import pytest

from hpc3d.arrays.narrow import Narrow, integers, is_narrow, itemsize, of_type, widened
from hpc3d.arrays.pool import Pool, contiguous, lease_of
from hpc3d.arrays.primitive import PRIMITIVES
from hpc3d.comm.communicator import fold
from hpc3d.ops import product as product_module
from hpc3d.ops import rows as rows_module
from hpc3d.ops.attention import AttentionMask, HeadForm, attend, attend_again, attend_grad
from hpc3d.ops.cached_attention import Cache, attend_cached
from hpc3d.ops.chunk_tiles import ChunkPair, Chunks
from hpc3d.ops.chunked_attention import (
    ChunkGrad,
    begin_merging,
    chunks_grad,
    end_merging,
    join_grads,
    keys_and_values,
    merge_chunks,
    row_dots,
)
from hpc3d.ops.cross_entropy import local_sums, row_max, softmax_grad
from hpc3d.ops.embedding import gather_rows, scatter_rows
from hpc3d.ops.gelu import gelu_exact, gelu_grad, gelu_tanh
from hpc3d.ops.norm import moments, normalise, normalise_grad, normalise_sums, row_squares
from hpc3d.ops.product import accumulate, product
from hpc3d.ops.quantize import decode_rows, encode_rows
from hpc3d.ops.random import Mask, philox_key
from hpc3d.ops.rotary import Rotation, rotary_table, rotate
from hpc3d.ops.routing import combine, combine_grad, dispatch, dispatch_grad, route
from hpc3d.ops.rows import (
    add_bias,
    add_repeated,
    dropped,
    scale_and_shift,
    soft_cap,
    soft_cap_grad,
    sum_repeated,
    sum_rows,
)
from hpc3d.ops.swiglu import geglu, swiglu, swiglu_grad

TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
MANY = 1000  # ones, whose sum in bfloat16 stays at 256

every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def drawn(shape, dtype, seed=0):
    return of_type(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def ones(shape, dtype):
    return of_type(np.ones(shape, dtype))


@every_type
def test_pool_arrays_and_views_of_16_bit_types_are_narrow(dtype):
    pool = Pool()
    whole = pool.zeros((4, 6), dtype)
    views = whole[1:], whole.T, whole.reshape(2, 2, 6), whole[0], whole.swapaxes(0, 1)[::2]
    copies = whole.copy(), np.concatenate([whole, whole]), contiguous(whole.T), whole[[0, 2]]
    for array in (whole, *views, *copies):
        assert type(array) is Narrow and array.dtype == dtype
    assert all(lease_of(view) is lease_of(whole) for view in views)
    assert type(integers(whole)) is np.ndarray and integers(whole).dtype == np.uint16
    assert type(whole.astype(np.float32)) is np.ndarray
    assert type(whole.astype(dtype)) is Narrow
    for other in (np.float32, np.int16, np.uint16):
        assert not is_narrow(np.dtype(other)) and type(pool.zeros((2,), other)) is np.ndarray


@every_type
def test_narrow_arithmetic_runs_in_float32_and_rounds_when_stored(dtype):
    x, y = drawn((300, 257), dtype), drawn((300, 257), dtype, 1)
    a, b = widened(x), widened(y)
    for ours, theirs in ((x + y, a + b), (x.sum(0), a.sum(0)), (x.max(1), a.max(1))):
        assert type(ours) is np.ndarray and ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(x @ y.T, a @ b.T)
    np.testing.assert_array_equal(np.einsum("ij,ij->i", x, y), np.einsum("ij,ij->i", a, b))
    row = drawn((257,), dtype, 2)
    x += row
    np.testing.assert_array_equal(x, (a + widened(row)).astype(dtype))
    x *= a[:, :1]
    expected = (widened((a + widened(row)).astype(dtype).view(Narrow)) * a[:, :1]).astype(dtype)
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(np.add.reduce(y, out=np.empty_like(row)), b.sum(0).astype(dtype))


def microbatches(x):
    total = np.zeros(3, np.float32)
    for row in x:
        accumulate(total, row)
    return total


SUMS = {
    "all": lambda x: x.sum(0),
    "rows": sum_rows,
    "squares": lambda x: row_squares(contiguous(x.T)),
    "mean": lambda x: moments(contiguous(x.T))[0] * MANY,
    "product": lambda x: product(x.T, x, np.empty((3, 3), np.float32))[0],
    "repeated": lambda x: sum_repeated(x, 0, 1)[0],
    "table": lambda x: scatter_rows(x, np.zeros(MANY, int), np.arange(MANY), (1, 3))[0],
    "norm over rows": lambda x: normalise_sums(x, x, ones(3, x.dtype))[1],
    "norm over features": lambda x: normalise_sums(x.T, x.T, ones(MANY, x.dtype))[0][0],
    "exponentials": lambda x: local_sums(x.T, np.ones(3, np.float32), np.zeros(3, int))[0][0],
    "microbatches": microbatches,
}


@every_type
@pytest.mark.parametrize("name", SUMS)
def test_sum_of_a_thousand_ones_is_exact_in_float32(name, dtype):
    found = SUMS[name](ones((MANY, 3), dtype))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.full(3, MANY), rtol=1e-5)


@every_type
def test_fold_adds_members_in_order_and_rounds_once(dtype):
    total = ones((3,), dtype)
    fold(np.add, ones((MANY, 3), dtype), total)
    np.testing.assert_array_equal(total, np.full(3, MANY).astype(dtype))
    fold(np.add, [block.view(np.ndarray) for block in ones((MANY, 3), dtype)], total)
    np.testing.assert_array_equal(total, np.full(3, MANY).astype(dtype))


@every_type
def test_attention_over_many_equal_keys_returns_their_mean(dtype):
    """All keys have the same weight: 1 / 1,000 each, with a value of 1."""
    out, _ = attend(
        ones((MANY, 12), dtype), MANY, HeadForm(4), Pool().empty, mask=AttentionMask(False)
    )
    np.testing.assert_allclose(widened(out), 1, rtol=2.0**-8)


@every_type
def test_blocked_product_matches_the_float32_product(dtype, monkeypatch):
    monkeypatch.setattr(product_module, "_PANEL", 4 * 70 * 16)
    monkeypatch.setattr(product_module, "_BLOCK", 4 * 70 * 16)
    a, b = drawn((50, 70), dtype), drawn((70, 37), dtype, 1)
    out = product(a, b, of_type(np.empty((50, 37), dtype)))
    assert_near(out, widened(a) @ widened(b), dtype)
    turned = product(b.T, a.T, of_type(np.empty((37, 50), dtype)))
    assert_near(turned, (widened(a) @ widened(b)).T, dtype)
    a, b = drawn((20, 3, 70), dtype), drawn((70, 3, 37), dtype, 1)  # one product an expert
    out = product(a, b, of_type(np.empty((20, 3, 37), dtype)))
    assert_near(out, np.einsum("mek,ken->men", widened(a), widened(b)), dtype)


def assert_near(ours, theirs, dtype):
    """Assert equality up to one rounding of the largest element; the order of sums may differ."""
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert ours.dtype == dtype
    room = unit * np.maximum(np.abs(theirs), np.abs(theirs).max() / 64)
    assert (np.abs(np.asarray(ours, np.float64) - theirs) <= room).all()


ROWS, WIDE, SEQUENCE, FORM, CAPPED = 24, 36, 6, HeadForm(4), HeadForm(4, cap=0.7)
DROP = Mask(philox_key("drop"), 0.25, range(ROWS), range(WIDE), WIDE)
OF_SCORES = Mask(philox_key("p"), 0.25, range(4), range(9 * SEQUENCE**2), 9 * SEQUENCE**2)
PADDING = AttentionMask(True, np.arange(4 * SEQUENCE).reshape(4, SEQUENCE) % 7 == 5)
SLOTS = np.random.default_rng(7).permutation(60)[: 2 * ROWS].reshape(ROWS, 2)
INDEX = np.random.default_rng(8).integers(-5, WIDE - 3, ROWS)


def blocks(dtype):
    """Return operands by name, which are equal for both types up to the rounding to 16 bits."""
    shapes = {"x": WIDE, "y": WIDE, "z": WIDE, "out": WIDE, "h": 2 * WIDE, "big": 3 * WIDE}
    made = {name: drawn((ROWS, columns), dtype, len(name)) for name, columns in shapes.items()}
    made |= {"gamma": drawn((WIDE,), dtype, 5), "beta": drawn((WIDE,), dtype, 6)}
    made["slots"] = drawn((60, WIDE), dtype, 9)
    return made


REAL = {
    "mean": np.random.default_rng(1).normal(size=(2, ROWS)).astype("f4"),
    "rstd": np.random.default_rng(2).random(ROWS).astype("f4"),
    "weights": np.random.default_rng(3).random((ROWS, 2)).astype("f4"),
}


def attention(b, empty, how, form=FORM):
    out, p = attend(b["big"], SEQUENCE, form, empty, **how)
    again = attend_again(b["big"], SEQUENCE, form, empty, **how)
    grad = attend_grad(b["x"], b["big"], p, SEQUENCE, form, empty, **how)
    return out, p, again, grad


def chunked(b, empty, form=FORM):
    """Attention with all keys of a sequence in one chunk."""
    qkv, dout, every = b["big"], b["x"], slice(0, SEQUENCE)
    chunks = Chunks([ChunkPair(every, every, True, 0, 0)], form)
    kv, merged = (op(qkv, SEQUENCE, form, empty) for op in (keys_and_values, begin_merging))
    merge_chunks(qkv, kv, merged, chunks)
    out = end_merging(merged, qkv.dtype, empty)
    dots, dq = row_dots(dout, out, SEQUENCE, chunks, empty), np.zeros((ROWS, WIDE), np.float32)
    dkv = chunks_grad(qkv, kv, ChunkGrad(dout, merged.sums, dots), dq, chunks, empty)
    return out, merged.sums, dots, dq, dkv, join_grads(qkv, dq, dkv, form, empty)


def coded(b, empty):
    codes, scales = empty((ROWS, WIDE), np.int8), empty((ROWS,), np.float32)
    encode_rows(b["x"], codes, scales)
    return decode_rows(codes, scales, b["out"]), scales


def loss(b):
    top = row_max(b["x"], WIDE - 3)
    sums, at = local_sums(b["x"], top, INDEX)
    return top, sums, b["x"].copy(), softmax_grad(b["x"], (sums[0], INDEX >= 0, at), 0.013)


def cached(b, empty, form=FORM):
    cache = empty((2, 4, 9, 9, 4), b["x"].dtype)
    cache[:, :, :, :3] = b["big"][:, :36].reshape(1, 4, 9, 6, 4)[:, :, :, :3]
    return attend_cached(b["big"], SEQUENCE, form, Cache(cache, 3), empty), cache


TABLE = rotary_table(Rotation(), SEQUENCE, 4, np.dtype("f4"))
OPS = {
    "add_bias": lambda b, empty: [add_bias(b["x"], b["beta"], b["out"])],
    "dropped": lambda b, empty: [dropped(b["x"], DROP, b["out"])],
    "add_repeated": lambda b, empty: [add_repeated(b["x"], b["y"][:7], 3, b["out"])],
    "gelu_tanh": lambda b, empty: [gelu_tanh(b["x"], b["out"]), b["x"]],
    "gelu_exact": lambda b, empty: [gelu_exact(b["x"], b["out"]), b["x"]],
    "gelu_grad": lambda b, empty: [gelu_grad(b["x"], b["y"])],
    "swiglu": lambda b, empty: [swiglu(b["h"], b["out"]), b["h"]],
    "geglu": lambda b, empty: [geglu(b["h"], b["out"]), b["h"]],
    "scale_and_shift": lambda b, empty: [scale_and_shift(b["x"], 2.5, 1.0, b["out"])],
    "swiglu_grad": lambda b, empty: [swiglu_grad(b["h"], b["y"])],
    "normalise": lambda b, empty: normalise(
        b["x"], REAL["mean"][0], REAL["rstd"], b["gamma"], b["beta"], b["y"], b["out"]
    ),
    "normalise_rms": lambda b, empty: normalise(
        b["x"], None, REAL["rstd"], b["gamma"], None, b["y"], b["out"]
    ),
    "normalise_sums": lambda b, empty: normalise_sums(b["x"], b["y"], b["gamma"]),
    "normalise_grad": lambda b, empty: [
        normalise_grad(b["x"], REAL["rstd"], b["y"], b["gamma"], REAL["mean"], b["z"], b["out"])
    ],
    "rotate": lambda b, empty: [rotate(b["big"], TABLE, FORM), rotate(b["big"], TABLE, FORM, -1)],
    "gather_rows": lambda b, empty: [gather_rows(b["x"], INDEX)],
    "attention": lambda b, empty: attention(b, empty, {}),
    "attention with dropout": lambda b, empty: attention(b, empty, {"drop": OF_SCORES}),
    "attention with padding": lambda b, empty: attention(b, empty, {"mask": PADDING}),
    "attention with a cap": lambda b, empty: attention(b, empty, {}, CAPPED),
    "chunked with a cap": lambda b, empty: chunked(b, empty, CAPPED),
    "cached with a cap": lambda b, empty: cached(b, empty, CAPPED),
    "soft_cap": lambda b, empty: [soft_cap(b["x"], 0.7), b["x"]][1:],
    "soft_cap_grad": lambda b, empty: [soft_cap_grad(b["x"], b["y"], 5.0), b["x"]][1:],
    "chunked": chunked,
    "cached": cached,
    "coded": coded,
    "loss": lambda b, empty: loss(b),
    "route": lambda b, empty: route(b["x"], 2)[1:],
    "dispatch": lambda b, empty: [dispatch(b["x"], SLOTS, b["slots"])],
    "dispatch_grad": lambda b, empty: [dispatch_grad(b["slots"], SLOTS, b["out"])],
    "combine": lambda b, empty: [combine(b["slots"], SLOTS, REAL["weights"], b["out"])],
    "combine_grad": lambda b, empty: combine_grad(
        b["x"], b["slots"], SLOTS, REAL["weights"], np.zeros_like(b["slots"])
    ),
}


@every_type
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("cache", [1 << 17, 300], ids=["one block", "many blocks"])
def test_narrow_operation_matches_the_rounded_float32_operation(name, cache, dtype, monkeypatch):
    monkeypatch.setattr(rows_module, "CACHE", cache)
    ours = OPS[name](blocks(dtype), Pool().empty)
    given = {key: widened(block) for key, block in blocks(dtype).items()}
    theirs = OPS[name](given, Pool().empty)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype in (dtype, np.float32) and other.dtype == np.float32
        room = 4 * float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(mine, "f4"), other, rtol=room, atol=room * np.abs(other).max()
        )


def test_itemsize_of_every_named_type():
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "?!": 0}
    assert {name: itemsize(name) for name in sizes} == sizes


def test_every_operation_has_a_narrow_or_float32_rule():
    """The rule is its own, or NumPy's rule on float32 copies, which returns float32."""
    wide = {each.__name__ for each in PRIMITIVES if each.narrow_rule is None}
    assert {"scatter_rows", "sum_repeated", "route", "merge_chunks", "chunks_grad"} <= wide
    assert not wide & {"normalise", "gelu_tanh", "attend", "dispatch", "initialise", "adamw"}
