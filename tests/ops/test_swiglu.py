"""SwiGLU and GeGLU compared with their equations, and gradients with finite differences."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from hpc3d.ops.swiglu import geglu, swiglu, swiglu_grad
from tests.ops.differences import difference

RNG = np.random.default_rng(7)
ROWS, WIDTH = 5, 7


def forward(h, gated=swiglu):
    return gated(h.copy(), np.empty((len(h), h.shape[1] // 2), h.dtype))


def test_swiglu_gates_with_the_first_element_of_each_pair(blocks):
    h = RNG.normal(size=(ROWS, 2 * WIDTH)) * 3
    expected = [
        [a / (1 + np.exp(-a)) * b for a, b in zip(row[0::2], row[1::2], strict=True)] for row in h
    ]
    np.testing.assert_allclose(forward(h), expected, rtol=1e-13, atol=1e-15)
    gate, up = torch.tensor(h).unflatten(1, (WIDTH, 2)).unbind(-1)
    np.testing.assert_allclose(forward(h), silu(gate) * up, rtol=1e-13, atol=1e-15)


def test_geglu_gates_with_the_first_element_of_each_pair(blocks):
    h = RNG.normal(size=(ROWS, 2 * WIDTH)) * 3
    gate, up = torch.tensor(h).unflatten(1, (WIDTH, 2)).unbind(-1)
    expected = gelu(gate, approximate="tanh") * up
    rounding = np.finfo(float).eps * float((gate * up).abs().max())  # of 1 + tanh, near 0
    np.testing.assert_allclose(forward(h, geglu), expected, rtol=1e-13, atol=rounding)


@pytest.mark.parametrize("gated", [swiglu, geglu])
def test_gradient_matches_finite_differences(blocks, gated):
    h, dg = RNG.normal(size=(ROWS, 2 * WIDTH)) * 3, RNG.normal(size=(ROWS, WIDTH))
    slopes = h.copy()
    gated(slopes, np.empty(dg.shape))
    expected = difference(partial(forward, gated=gated), h, dg)
    np.testing.assert_allclose(swiglu_grad(slopes, dg), expected, atol=1e-8)


def test_swiglu_of_large_gates_does_not_overflow():
    """If exp(-a) overflows, no result is NaN."""
    h = np.array([[-800.0, 3.0, 800.0, 3.0]])
    out = np.empty((1, 2))
    with np.errstate(all="raise"):
        swiglu(h, out)
    assert out.tolist() == [[0, 2400]]
    assert h.tolist() == [[0, 0, 3, 800]]
