"""Kernels of weight updates and the global norm on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.config.input_file import CONSTANTS
from hpc3d.cuda import launch_table
from hpc3d.ops.quantize import BLOCK, LEVELS, adamw_8bit
from hpc3d.ops.update import adamw, descend, lion
from tests.cuda.conftest import FLOAT

SIZES = [1, 7, 16, 5003]


@pytest.fixture(params=SIZES)
def arrays(request, real, draw):
    """Return gradient, state and values; in 16 bits, also master weights, and an odd offset."""
    size = request.param
    grad, first, second, master = (draw(FLOAT, size)[0] for _ in range(4))
    value = master if real.name == "float32" else real.empty(size, offset=1)
    return value, master, grad, first, np.abs(second)


def stored(real, value, master):
    return {"value": value, "master": None if real.name == "float32" else master}


def test_adamw_kernel(arrays, real, emulate):
    value, master, grad, first, second = arrays
    factors = np.float32([0.7, 1e-2, 1.3, 0.999])
    w, m, v = master.copy(), first.copy(), second.copy()
    adamw(w, None, grad, m, v, CONSTANTS["adamw"], [float(factor) for factor in factors])
    given = {"grad": grad, "first": first, "second": second, "factors": factors}
    given |= CONSTANTS["adamw"]
    emulate("adamw", 1, grad.size, size=grad.size, **stored(real, value, master), **given)
    FLOAT.same(first, m, atol=3e-7)
    FLOAT.same(second, v, atol=3e-7)
    FLOAT.same(master, w, atol=3e-7)
    np.testing.assert_array_equal(value, real.cast(master))


def test_lion_kernel(arrays, real, emulate):
    value, master, grad, momentum, _ = arrays
    grad[0], momentum[0] = 0, 0  # no sign: it decays and does not move
    factors = np.float32([0.7, 1e-2, 0.999])
    w, m = master.copy(), momentum.copy()
    lion(w, None, grad, m, CONSTANTS["lion"], [float(factor) for factor in factors])
    given = {"grad": grad, "momentum": momentum, "factors": factors, **CONSTANTS["lion"]}
    emulate("lion", 1, grad.size, size=grad.size, **stored(real, value, master), **given)
    FLOAT.same(momentum, m, atol=3e-7)
    FLOAT.same(master, w, atol=3e-7)
    np.testing.assert_array_equal(value, real.cast(master))


@pytest.mark.parametrize("rows, columns", [(1, 256), (5, 256), (2, 512), (3, 300), (2, 517)])
def test_8_bit_adamw_kernel(rows, columns, real, emulate, draw):
    """Codes are equal, unless a number is halfway between two levels up to rounding."""
    size, blocks = rows * columns, rows * -(-columns // BLOCK)
    grad, master = (draw(FLOAT, size)[0] for _ in range(2))
    grad[:BLOCK] = 0
    value = master if real.name == "float32" else real.empty(size, offset=1)
    states = np.random.default_rng(3)
    codes = states.integers(0, 256, (2, size), np.uint8)
    scales = states.random((2, blocks), np.float32)
    scales[:, :1] = 0
    factors = np.float32([0.7, 1e-2, 1.3, 0.999])
    w, (m, v), (m_scales, v_scales) = master.copy(), codes.copy(), scales.copy()
    how = CONSTANTS["adamw-8bit"], [float(factor) for factor in factors]
    w, g, m, v, m_scales, v_scales = (
        each.reshape(rows, -1) for each in (w, grad, m, v, m_scales, v_scales)
    )
    adamw_8bit(w, None, g, (m, v, m_scales, v_scales), *how)
    w, m, v, m_scales, v_scales = (each.ravel() for each in (w, m, v, m_scales, v_scales))
    given = {"grad": grad, "first": codes[0], "second": codes[1], "levels": LEVELS}
    given |= {"first_scales": scales[0], "second_scales": scales[1], "factors": factors}
    given |= {**stored(real, value, master), **CONSTANTS["adamw-8bit"]}
    emulate("adamw_8bit", blocks, BLOCK, columns=columns, **given)
    FLOAT.same(master, w, atol=3e-7)
    np.testing.assert_array_equal(value, real.cast(master))
    for found, expected in zip([*codes, *scales], [m, v, m_scales, v_scales]):
        assert np.abs(found.astype(float) - expected).max() <= 1
    assert (codes != [m, v]).mean() < 0.01
    np.testing.assert_allclose(scales, [m_scales, v_scales], rtol=1e-6)


def test_gradient_descent_kernel(arrays, real, emulate):
    value, master, grad, _, _ = arrays
    factors = np.float32([0.3, 0.999])
    w = master.copy()
    descend(w, None, grad, [float(factor) for factor in factors])
    given = {"grad": grad, "factors": factors, "size": grad.size}
    emulate("descend", 1, grad.size, **stored(real, value, master), **given)
    FLOAT.same(master, w, atol=3e-7)
    np.testing.assert_array_equal(value, real.cast(master))


@pytest.mark.parametrize("size", SIZES)
def test_sum_of_squares_kernels(size, draw, emulate):
    grad, wide = draw(FLOAT, size, offset=1)
    blocks = launch_table.kernels()["sum_squares"].launch(None, 1, size).grid[0]
    partial, total = FLOAT.empty(blocks), np.full(1, np.nan)
    emulate("sum_squares", 1, size, grad=grad, partial=partial, size=size)
    exact = (wide.astype(np.float64) ** 2).sum()
    for add, expected in [(False, exact), (True, 2 * exact)]:
        emulate("sum_parts", 1, blocks, partial=partial, total=total, parts=blocks, add=add)
        assert total[0] == pytest.approx(expected, rel=1e-6)
