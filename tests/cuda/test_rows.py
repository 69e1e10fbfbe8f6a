"""Biases, residuals, gradients, GELU and SwiGLU on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.cuda import launch_table
from hpc3d.ops.gelu import GELU
from hpc3d.ops.rows import sum_rows
from hpc3d.ops.swiglu import geglu, swiglu, swiglu_grad
from tests.cuda.conftest import FLOAT
from tests.reference import fused_ops as fused

SIZES = [(0, 5), (1, 1), (3, 7), (2, 64), (3, 1100)]


@pytest.mark.parametrize("size", SIZES)
def test_add_bias_kernel(size, real, draw, emulate):
    (y, wide), (bias, wide_bias) = draw(real, *size), draw(real, size[1])
    out = real.empty(*size)
    emulate("add_bias", *size, y=y, bias=bias, out=out, columns=size[1])
    real.same(out, wide + wide_bias)


FLAT = [0, 1, 5, 8, 1000, 3 * 256 * 4 + 1]


@pytest.mark.parametrize("size", FLAT)
@pytest.mark.parametrize("offset", [0, 1])
def test_elementwise_add_and_multiply_kernels(size, offset, real, draw, emulate):
    (x, wide_x), (y, wide_y) = draw(real, size), draw(real, size, offset=offset)
    out = real.empty(size)
    emulate("add", 1, size, x=x, y=y, out=out, size=size)
    real.same(out, wide_x + wide_y)
    grad, before = draw(FLOAT, size, offset=offset)
    emulate("accumulate", 1, size, grad=grad, dw=x, size=size)
    np.testing.assert_array_equal(grad, before + wide_x)
    emulate("scale_and_shift", 1, size, x=y, out=out, factor=2.5, offset=1.0, size=size)
    real.same(out, 2.5 * wide_y + 1)
    emulate("gelu_grad", 1, size, slope=x, dg=y, size=size)
    real.same(x, wide_x * wide_y)


@pytest.mark.parametrize("size", FLAT)
@pytest.mark.parametrize("offset", [0, 1])
def test_soft_cap_kernel_and_its_gradient(size, offset, real, draw, emulate):
    (x, wide_x), (dy, wide_dy) = draw(real, size), draw(real, size, offset=offset)
    emulate("soft_cap", 1, size, x=x, cap=0.7, size=size)
    real.same(x, 0.7 * np.tanh(wide_x / np.float32(0.7)))
    emulate("soft_cap_grad", 1, size, dy=dy, y=x, cap=0.7, size=size)
    real.same(dy, wide_dy * (1 - (real.back(x) / np.float32(0.7)) ** 2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_accumulate_columns_kernel_leaves_other_columns(size, offset, real, draw, emulate):
    """The sum is over some columns of wider matrices; their other columns are unchanged."""
    rows, columns = size
    (x, wide), (grad, before) = draw(real, rows, columns + 8), draw(FLOAT, rows, columns + 16)
    some, expected = slice(offset, offset + columns), before.copy()
    expected[:, some] += wide[:, 8:]
    sizes = {"grad_first": offset, "grad_columns": columns + 16}
    sizes |= {"dw_first": 8, "dw_columns": columns + 8, "columns": columns}
    emulate("accumulate_columns", *size, grad=grad, dw=x, **sizes)
    FLOAT.same(grad, expected)


def test_grid_stride_loop_covers_all_elements(draw, emulate, monkeypatch):
    monkeypatch.setattr(launch_table, "BLOCKS", 2)
    (x, wide_x), (y, wide_y) = draw(FLOAT, 5000), draw(FLOAT, 5000)
    out = FLOAT.empty(5000)
    emulate("add", 1, 5000, x=x, y=y, out=out, size=5000)
    np.testing.assert_array_equal(out, wide_x + wide_y)


@pytest.mark.parametrize("rows", [0, 1, 9, 150])
@pytest.mark.parametrize("columns", [1, 33, 520])
@pytest.mark.parametrize("add", [False, True])
def test_sum_of_rows_kernels(rows, columns, add, real, draw, emulate):
    y, wide = draw(real, rows, columns)
    partial = FLOAT.empty(launch_table.strips(rows), columns)
    total, before = draw(FLOAT, columns) if add else (FLOAT.empty(columns), 0)
    emulate("sum_rows", rows, columns, y=y, partial=partial, rows=rows, columns=columns)
    sizes = {"strips": len(partial), "columns": columns, "add": add}
    expected = before + sum_rows(wide)
    emulate("sum_strips", 1, columns, partial=partial, total=total, other=None, **sizes)
    FLOAT.same(total, expected, atol=2e-5)


@pytest.mark.parametrize("kind", GELU)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_gelu_kernel_and_its_slope(kind, bias, size, real, draw, emulate):
    h, wide = draw(real, *size)
    b, wide_b = draw(real, size[1])
    h[:1, 0], wide[:1, 0] = real.cast(np.float32([-40.0])), -40
    out, expected = real.empty(*size), np.empty_like(wide)
    emulate(f"gelu_{kind}", *size, h=h, bias=b if bias else None, out=out, columns=size[1])
    fused.bias_gelu(wide, wide_b if bias else np.zeros_like(wide_b), expected, kind)
    real.same(out, expected, atol=2e-6)
    real.same(h, wide, atol=2e-6)


# Of 12 features the pairs of every row are aligned, in 16 bits the features of every other row.
PAIRED = [(0, 5), (1, 1), (3, 7), (4, 12), (2, 64), (3, 1100)]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", PAIRED)
@pytest.mark.parametrize("gated", [swiglu, geglu], ids=["swiglu", "geglu"])
def test_gated_kernels_and_their_gradient(gated, size, offset, real, draw, emulate):
    rows, width = size
    h, wide = draw(real, rows, 2 * width)
    for gate, a in ((0, -200), (2, 40)):  # where exp(-a) is too large, and where s is 1
        h[:1, gate : gate + 1], wide[:1, gate : gate + 1] = real.cast(np.float32([a])), a
    out, expected = real.empty(*size, offset=offset), np.empty(size, np.float32)
    emulate(gated.__name__, *size, h=h, out=out, width=width)
    gated(wide, expected)
    real.same(out, expected)
    real.same(h, wide)
    dg, wide_dg = draw(real, *size, offset=offset)
    slopes = real.back(h)
    emulate("swiglu_grad", *size, slopes=h, dg=dg, width=width)
    real.same(h, swiglu_grad(slopes, wide_dg))
