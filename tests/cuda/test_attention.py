"""Attention's softmax and rotary positions on the host against their NumPy twins, and these
against the whole attention and torch."""

import numpy as np
import pytest
import torch

from hpc3d.arrays.pool import Pool
from hpc3d.ops.attention import HeadForm, attend, attend_grad, heads_of
from hpc3d.ops.random import Mask, philox_key
from tests.cuda.test_random import drawn_by
from tests.reference import fused_ops as fused

BATCH, HEADS = 2, 3
SEQUENCES = [1, 5, 33, 72]
SCALE = 0.3


def masked(rate, sequence):
    """Dropout on the second of three ranks, and its factors [B, heads, key, query]."""
    columns = HEADS * sequence**2
    mask = Mask(
        philox_key((3, "p")), rate, range(4, 4 + BATCH), range(columns, 2 * columns), 3 * columns
    )
    factors = mask.factors(slice(None), slice(None), np.float32)
    return mask, factors.reshape(BATCH, HEADS, sequence, sequence)


def dropout_of(mask):
    """The parameters of dropout, of none at all without a mask."""
    if mask is None:
        names = "first_row", "first_column", "width", "limit", "factor"
        return {"dropout_key": None, **dict.fromkeys(names, 0)}
    given = drawn_by(mask)
    return {"dropout_key": given.pop("key"), **given}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_softmax_and_its_gradient(sequence, rate, real, draw, emulate):
    shape = BATCH, HEADS, sequence, sequence
    mask, factors = masked(rate, sequence) if rate else (None, None)
    scores, wide = draw(real, *shape)
    weights = real.empty(*shape) if rate else None
    sizes = {"heads": HEADS, "sequence": sequence, "scale": SCALE, **dropout_of(mask)}
    work = BATCH * HEADS, sequence
    emulate("causal_softmax", *work, scores=scores, weights=weights, **sizes)
    p, weighted = fused.causal_softmax(wide, SCALE, factors)
    real.same(scores, p)
    if rate:
        np.testing.assert_array_equal(real.back(weights) == 0, weighted == 0)
        real.same(weights, real.back(scores) * real.back(real.cast(factors)))
    dweights, wide_d = draw(real, *shape)
    emulate("causal_softmax_grad", *work, p=scores, dweights=dweights, **sizes)
    rounded = None if factors is None else real.back(real.cast(factors))
    expected = fused.causal_softmax_grad(real.back(scores), wide_d, SCALE, rounded)
    real.same(dweights, expected, atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_products_around_it_are_attention(rate):
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


ROTARY = [(3, 2, 2), (1, 1, 4), (3, 2, 26), (1, 1, 80)]  # parts, turned, width


@pytest.mark.parametrize("case", ROTARY, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_rotary_positions(case, sign, real, draw, emulate):
    parts, turned, width = case
    rows, columns, first, period = 7, 2 * parts * width, 2, 5
    x, wide = draw(real, rows, columns)
    table = fused.turns(period, width)
    cosines, sines = np.ascontiguousarray(table[0]), np.ascontiguousarray(table[1])
    sizes = {"parts": parts, "turned": turned, "width": width, "columns": columns}
    place = {"first": first, "period": period, "sign": sign, **sizes}
    emulate("rotate", rows, columns, x=x, cosines=cosines, sines=sines, **place)
    real.same(x, fused.rotate(wide, table, first, parts, turned, sign))


def test_rotary_positions_are_those_of_torch():
    """By complex numbers: the pair (a, b) is a + ib, a turn is a product with exp(i angle)."""
    rows, width, base = 6, 8, 500.0
    x = np.random.default_rng(4).normal(size=(rows, 2, 3, width))
    i = torch.arange(width // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(rows, dtype=torch.float64), base ** (-2 * i / width))
    leaf = torch.tensor(x[:, :, :2], requires_grad=True)
    a, b = leaf.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.exp(1j * angles)[:, None, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    table = fused.turns(rows, width, base)
    got = fused.rotate(x.reshape(rows, -1).copy(), table, 0, 3, 2).reshape(x.shape)
    np.testing.assert_allclose(got[:, :, :2], expected.detach().numpy(), atol=1e-6)
    np.testing.assert_array_equal(got[:, :, 2], x[:, :, 2])
    (gradient,) = torch.autograd.grad(expected, leaf, torch.tensor(x[:, :, :2]))
    back = fused.rotate(x.reshape(rows, -1).copy(), table, 0, 3, 2, sign=-1).reshape(x.shape)
    np.testing.assert_allclose(back[:, :, :2], gradient.numpy(), atol=1e-6)
