"""Kernels of the softmax and of rotary positions on the host, compared with the NumPy rules, and
the softmax with products, compared with complete attention."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.ops.attention import (
    CAUSAL,
    AttentionMask,
    HeadForm,
    attend,
    attend_again,
    attend_grad,
    heads_of,
)
from hpc3d.ops.random import Mask, philox_key
from hpc3d.ops.rotary import Rotation, rotary_table, rotate
from tests.cuda import rules
from tests.cuda.conftest import FLOAT
from tests.cuda.test_random import drawn_by
from tests.fakes.fake_device import plain
from tests.reference import fused_ops as fused
from tests.strided import strided

BATCH, HEADS = 2, 3
SEQUENCES = [1, 5, 33, 72]
SCALE = 0.3


def masked(rate, sequence, heads=HEADS):
    """Return the dropout of the second of three ranks, and its factors [B, heads, key, query]."""
    columns = heads * sequence**2
    mask = Mask(
        philox_key((3, "p")), rate, range(4, 4 + BATCH), range(columns, 2 * columns), 3 * columns
    )
    factors = mask.factors(slice(None), slice(None), np.float32)
    return mask, factors.reshape(BATCH, heads, sequence, sequence)


def dropout_of(mask):
    """Return the dropout parameters, which disable dropout without a mask."""
    if mask is None:
        names = "first_row", "first_column", "width", "limit", "factor"
        return {"dropout_key": None, **dict.fromkeys(names, 0)}
    given = drawn_by(mask)
    del given["rows"]
    return {"dropout_key": given.pop("key"), **given}


def padded(sequence):
    """Return the padding keys of BATCH samples: all keys of the first sample, or some."""
    return np.arange(BATCH * sequence).reshape(BATCH, sequence) % (sequence + 3) < sequence


def documents(sequence):
    """Return the beginnings of documents of 7 tokens, the first one shorter in a sample."""
    positions = np.arange(sequence)
    starts = [np.maximum(0, (positions + skipped) // 7 * 7 - skipped) for skipped in range(BATCH)]
    return np.array(starts, np.int64)


MASKS = {
    "causal": lambda sequence: CAUSAL,
    "all keys": lambda sequence: AttentionMask(causal=False),
    "padded": lambda sequence: AttentionMask(False, padded(sequence)),
    "causal, padded": lambda sequence: AttentionMask(True, padded(sequence)),
    "window": lambda sequence: AttentionMask(window=-(-sequence // 3)),
    "documents": lambda sequence: AttentionMask(starts=documents(sequence)),
    "window, padded": lambda sequence: AttentionMask(True, padded(sequence), 2),
}


@pytest.mark.parametrize("sequence", strided(SEQUENCES, 3))
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(
    ("sees", "cap"), [*((sees, 0) for sees in MASKS), ("causal", 0.4), ("window, padded", 0.4)]
)
def test_softmax_and_its_gradient_match_numpy(sequence, rate, sees, cap, real, draw, emulate):
    """A query that sees no key has probabilities of 0."""
    seen = MASKS[sees](sequence)
    shape = BATCH, HEADS, sequence, sequence
    mask, factors = masked(rate, sequence) if rate else (None, None)
    scores, wide = draw(real, *shape)
    products, slopes = scores.copy() if cap else None, 1.0
    if cap:
        slopes = 1 - np.tanh(SCALE * wide / cap) ** 2
    weights = real.empty(*shape) if rate else None
    sizes = {"heads": HEADS, "sequence": sequence, "scale": SCALE, **dropout_of(mask), "cap": cap}
    sizes |= {"causal": seen.causal, "window": seen.window}
    work = BATCH * HEADS, sequence
    softmax = {"scores": scores, "weights": weights, "padding": seen.padding}
    softmax["starts"] = seen.starts
    emulate("causal_softmax", *work, **softmax, **sizes)
    p, weighted = fused.causal_softmax(wide, SCALE, factors, seen, cap)
    real.same(scores, p)
    if rate:
        np.testing.assert_array_equal(real.back(weights) == 0, weighted == 0)
        real.same(weights, real.back(scores) * real.back(real.cast(factors)))
    dweights, wide_d = draw(real, *shape)
    given = {"p": scores, "dweights": dweights, "scores": products}
    emulate("causal_softmax_grad", *work, **given, **sizes)
    rounded = None if factors is None else real.back(real.cast(factors))
    expected = slopes * fused.causal_softmax_grad(real.back(scores), wide_d, SCALE, rounded)
    real.same(dweights, expected, atol=1e-6)


@pytest.mark.parametrize(("first", "keys"), [(0, 40), (3, 33)])
def test_bias_of_padding_masks_keys(first, keys, real, emulate):
    sequence = 40
    padding, bias = padded(sequence), real.empty(BATCH, keys)
    sizes = {"keys": keys, "first": first, "sequence": sequence, "masked": -32768}
    emulate("padding_bias", BATCH, keys, bias=bias, padding=padding, **sizes)
    expected = np.where(padding[:, first : first + keys], -32768, 0)
    np.testing.assert_array_equal(real.back(bias), expected)


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (9, 64)])
def test_output_of_queries_without_keys_is_cleared(heads, width, real, draw, emulate):
    sequence, least = 6, -16384
    out, wide = draw(real, BATCH, sequence, heads, width)
    sums, before = draw(FLOAT, BATCH, heads, sequence)
    sums[0], sums[1, :, 3] = -32700, -32769
    sizes = {"heads": heads, "width": width, "sequence": sequence, "least": least}
    emulate("clear_masked", BATCH * sequence, heads * width, out=out, sums=sums, **sizes)
    none = np.zeros((BATCH, sequence), bool)
    none[0], none[1, 3] = True, True
    np.testing.assert_array_equal(real.back(out), np.where(none[..., None, None], 0, wide))
    np.testing.assert_array_equal(sums, np.where(none[:, None], least, before))


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_softmax_with_surrounding_products_equals_attention(rate):
    sequence, width = 5, 4
    mask, factors = masked(rate, sequence) if rate else (None, None)
    qkv = np.random.default_rng(2).normal(size=(BATCH * sequence, HEADS * 3 * width))
    dout = np.random.default_rng(3).normal(size=(BATCH * sequence, HEADS * width))
    form = HeadForm(width)
    out, p = attend(qkv, sequence, form, Pool().empty, mask)
    dqkv = attend_grad(dout, qkv, p, sequence, form, Pool().empty, mask)
    q, k, v = heads_of(qkv, sequence, form)
    q = q[:, :, 0]
    scale = width**-0.5
    p, weights = fused.causal_softmax(k @ q.swapaxes(-1, -2), scale, factors)
    ours = (weights.swapaxes(-1, -2) @ v).swapaxes(1, 2).reshape(out.shape)
    np.testing.assert_allclose(ours, out, atol=1e-6)
    d = dout.reshape(BATCH, sequence, HEADS, width).swapaxes(1, 2)
    ds = fused.causal_softmax_grad(p, v @ d.swapaxes(-1, -2), scale, factors)
    for gradient, whole in zip(
        (ds.swapaxes(-1, -2) @ k, ds @ q, weights @ d), heads_of(dqkv, sequence, form)
    ):
        np.testing.assert_allclose(gradient, whole.reshape(gradient.shape), atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("flash", [None, rules.Flash()], ids=["products", "with cuDNN"])
@pytest.mark.parametrize("sees", MASKS)
@pytest.mark.parametrize(("queries", "cap"), strided([(1, 0.0), (2, 0.0), (2, 0.7)], 3, 1))
def test_attention_with_grouped_queries_matches_numpy(flash, rate, sees, queries, cap, launcher):
    """With dropout, documents or a cap, products are used even if there is a fused kernel. With
    padding, all keys of the first sample are masked."""
    rules.register(launcher, flash)
    sequence, form, empty = 5, HeadForm(4, queries, cap), Pool().empty
    seen = MASKS[sees](sequence)
    mask = masked(rate, sequence, queries * HEADS)[0] if rate else None
    random = np.random.default_rng(2)
    qkv = random.normal(size=(BATCH * sequence, HEADS * form.columns)).astype(np.float16)
    dout = random.normal(size=(BATCH * sequence, HEADS * queries * form.width)).astype(np.float16)
    wide = qkv.astype(np.float64)
    expected, p = attend(wide, sequence, form, empty, mask, seen)
    wide_d = dout.astype(np.float64)
    expected_grad = attend_grad(wide_d, wide, p, sequence, form, empty, mask, seen)
    qkv, dout = (each.view(rules.CudaArray) for each in (qkv, dout))
    if seen.padding is not None:
        seen = seen._replace(padding=seen.padding.view(rules.CudaArray))
    if seen.starts is not None:
        seen = seen._replace(starts=seen.starts.view(rules.CudaArray))
    launcher.count.clear()
    out, kept = attend(qkv, sequence, form, rules.empty, mask, seen)
    fused_whole = flash and seen.starts is None and not rate and not cap
    assert launcher.count["causal_softmax"] == (not fused_whole)
    np.testing.assert_allclose(plain(out), expected, atol=4e-3)
    again = attend_again(qkv, sequence, form, rules.empty, mask, seen)
    if not fused_whole:
        np.testing.assert_array_equal(plain(again), plain(kept))
    found = attend_grad(dout, qkv, again, sequence, form, rules.empty, mask, seen)
    np.testing.assert_allclose(plain(found), expected_grad, atol=1e-2)
    rules.register(launcher)


# Heads by their width and queries: a pair, halves of less than a pack, of one and a bit, of packs.
ROTARY = [HeadForm(2), HeadForm(4, 2), HeadForm(26), HeadForm(80, 2)]


@pytest.mark.parametrize("form", ROTARY, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("sign", [1, -1])
def test_rotary_positions_match_numpy(form, share, sign, real, draw, emulate):
    """The rows begin within a sequence and end in the next."""
    rows, columns, first, period = 7, 2 * form.columns, 2, 5
    x, wide = draw(real, rows, columns)
    rotation = Rotation(share=max(share, 2 / form.width))
    cosines, sines = table = rotary_table(rotation, period, form.width, np.float32)
    parts, turned = form.turned(columns)
    sizes = {"parts": parts, "turned": turned, "half": table.shape[2], "width": form.width}
    given = {"cosines": cosines, "sines": sines, "first": first, "period": period, **sizes}
    emulate("rotate", rows, columns, x=x, columns=columns, sign=sign, **given)
    positions = (first + np.arange(rows)) % period
    real.same(x, rotate(wide, table[:, positions], form, sign))
