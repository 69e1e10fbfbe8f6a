"""Normalization kernels on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.cuda import launch_table
from hpc3d.ops.norm import (
    combine_moments,
    moments,
    normalise,
    normalise_grad,
    normalise_sums,
    row_squares,
)
from tests.cuda.conftest import FLOAT
from tests.reference import fused_ops as fused

SIZES = [(0, 5), (1, 1), (3, 7), (2, 64), (3, 136), (2, 2060), (9, 33)]
RMS_SIZES = [(0, 5), (3, 7), (3, 136)]
CASES = [*((size, True) for size in SIZES), *((size, False) for size in RMS_SIZES)]
EPSILON = 1e-5


@pytest.fixture(params=SIZES, ids=str)
def size(request):
    return request.param


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'layer' if case[1] else 'RMS'}")
def case(request):
    """Size of a matrix, and whether its norm is centered, with a mean and beta."""
    return request.param


@pytest.fixture
def vectors(draw):
    """Return gamma and beta with their float32 values; beta is None if not `centred`."""

    def drawn(real, columns, centred):
        gamma, beta = draw(real, columns), draw(real, columns)
        return gamma, beta if centred else (None, None)

    return drawn


@pytest.mark.slow
def test_moments_kernel(size, real, draw, emulate):
    x, wide = draw(real, *size)
    result = FLOAT.empty(2, size[0])
    emulate("moments", *size, x=x, result=result, columns=size[1])
    FLOAT.same(result, moments(wide))


@pytest.mark.parametrize("size", RMS_SIZES, ids=str)
def test_row_squares_kernel(size, real, draw, emulate):
    x, wide = draw(real, *size)
    result = FLOAT.empty(size[0])
    emulate("row_squares", *size, x=x, result=result, columns=size[1])
    FLOAT.same(result, row_squares(wide))


def test_moments_kernel_avoids_cancellation(emulate):
    """The mean is 1e4 and the deviation 1, so E[x^2] - E[x]^2 would be wrong by several units."""
    x = np.random.default_rng(5).normal(size=(2, 300)).astype(np.float32) + np.float32(1e4)
    result = FLOAT.empty(2, 2)
    emulate("moments", 2, 300, x=x, result=result, columns=300)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(result[1] / 300, exact.var(1), rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 300])
def test_combine_moments_kernel(rows, draw, emulate):
    parts = np.abs(draw(FLOAT, 3, 2, rows)[0])
    result = FLOAT.empty(2, rows)
    given = {"ranks": 3, "rows": rows, "count": 12}
    emulate("combine_moments", rows, 1, parts=parts, result=result, **given)
    FLOAT.same(result, np.stack(combine_moments(parts, 12)))


def test_normalize_kernel_with_split_columns(case, real, draw, vectors, emulate):
    size, centred = case
    x, wide = draw(real, *size)
    (gamma, wide_gamma), (beta, wide_beta) = vectors(real, size[1], centred)
    mean = draw(FLOAT, size[0])[0] if centred else None
    rstd = np.abs(draw(FLOAT, size[0])[0]) + 1
    n, y = real.empty(*size), real.empty(*size)
    given = {"gamma": gamma, "beta": beta, "n": n, "y": y, "columns": size[1]}
    emulate("normalise", *size, x=x, mean=mean, rstd=rstd, **given)
    outs = np.empty_like(wide), np.empty_like(wide)
    expected = normalise(wide, mean, rstd, wide_gamma, wide_beta, *outs)
    real.same(n, expected[0], atol=1e-5)
    real.same(y, expected[1], atol=1e-5)


@pytest.mark.parametrize("residual", [True, False])
def test_normalize_gradient_kernel_with_split_columns(residual, case, real, draw, emulate):
    (rows, columns), centred = case
    (n, wide_n), (dy, wide_dy), (r, wide_r) = (draw(real, rows, columns) for _ in range(3))
    gamma, wide_gamma = draw(real, columns)
    sums = FLOAT.empty(2, rows)
    emulate("normalise_sums", *case[0], n=n, dy=dy, gamma=gamma, sums=sums, columns=columns)
    expected, _, _ = normalise_sums(wide_n, wide_dy, wide_gamma, centred)
    FLOAT.same(sums[-len(expected) :], expected, atol=1e-4)
    means, rstd, dx = expected / columns, np.abs(draw(FLOAT, rows)[0]), real.empty(*case[0])
    given = {"gamma": gamma, "mean_dn": means[0] if centred else None, "mean_product": means[-1]}
    given |= {"residual": r if residual else None, "dx": dx, "columns": columns}
    emulate("normalise_grad", *case[0], n=n, rstd=rstd, dy=dy, **given)
    added = wide_r if residual else None
    out = np.empty_like(wide_n)
    real.same(dx, normalise_grad(wide_n, rstd, wide_dy, wide_gamma, means, added, out), 1e-5)


@pytest.mark.parametrize("residual", [True, False])
def test_fused_residual_and_norm_kernel(residual, case, real, draw, vectors, emulate):
    (rows, columns), centred = size, _ = case
    (x, wide_x), (r, wide_r) = draw(real, *size), draw(real, *size)
    (gamma, wide_gamma), (beta, wide_beta) = vectors(real, columns, centred)
    s, y = real.empty(*size, offset=1), real.empty(*size)
    mean, rstd = FLOAT.empty(rows) if centred else None, FLOAT.empty(rows)
    given = {"gamma": gamma, "beta": beta, "mean": mean, "rstd": rstd, "columns": columns}
    given |= {"r": r if residual else None, "epsilon": EPSILON}
    emulate("add_norm", *size, x=x, s=s if residual else None, y=y, **given)
    added = real.back(real.cast(wide_x + wide_r)) if residual else wide_x
    _, out, centre, factor = fused.add_norm(added, None, wide_gamma, wide_beta, EPSILON)
    if residual:
        np.testing.assert_array_equal(real.back(s), added)
    real.same(y, out, atol=2e-5 if columns > 1 else 1e-3)
    if centred:
        FLOAT.same(mean, centre)
    FLOAT.same(rstd, factor, atol=1e-4 * factor.max(initial=0))


@pytest.mark.parametrize("residual", [True, False])
def test_fused_residual_and_norm_gradient_kernel(residual, case, real, draw, emulate):
    (rows, columns), centred = size, _ = case
    (s, wide_s), (dy, wide_dy), (r, wide_r) = (draw(real, *size) for _ in range(3))
    gamma, wide_gamma = draw(real, columns)
    mean = draw(FLOAT, rows)[0] if centred else None
    rstd, dx = np.abs(draw(FLOAT, rows)[0]), real.empty(*size)
    given = {"gamma": gamma, "residual": r if residual else None, "dx": dx, "columns": columns}
    emulate("norm_grad", *size, s=s, mean=mean, rstd=rstd, dy=dy, **given)
    added = wide_r if residual else None
    expected, _, _ = fused.norm_grad(wide_s, mean, rstd, wide_dy, wide_gamma, added)
    real.same(dx, expected, atol=2e-5)


@pytest.mark.parametrize("rows", [0, 1, 7, 150])
@pytest.mark.parametrize("columns", [1, 40, 300])
@pytest.mark.parametrize("given", ["n", "x"])
def test_gamma_and_beta_gradient_kernel(given, rows, columns, real, draw, emulate):
    mean, rstd = draw(FLOAT, rows)[0], np.abs(draw(FLOAT, rows)[0])
    stored = {"mean": mean, "rstd": rstd} if given == "x" else {"mean": None, "rstd": None}
    columns_are_summed(stored, rows, columns, real, draw, emulate)


def test_gamma_gradient_kernel_of_rms_norm(real, draw, emulate):
    """RMSNorm requires only x and rstd."""
    stored = {"mean": None, "rstd": np.abs(draw(FLOAT, 7)[0])}
    columns_are_summed(stored, 7, 300, real, draw, emulate)


def columns_are_summed(stored, rows, columns, real, draw, emulate):
    """Check norm_columns with this mean and rstd."""
    (x, wide), (dy, wide_dy) = draw(real, rows, columns), draw(real, rows, columns)
    centre, factor = stored["mean"], stored["rstd"]
    n = wide if centre is None else wide - centre[:, None]
    n = n if factor is None else n * factor[:, None]
    strips = launch_table.strips(rows)
    partial = FLOAT.empty(strips, 2, columns)
    (total, before), (other, before_other) = (draw(FLOAT, columns) for _ in range(2))
    sizes = {"rows": rows, "columns": columns}
    emulate("norm_columns", rows, columns, x=x, dy=dy, partial=partial, **stored, **sizes)
    sizes = {"strips": strips, "columns": columns, "add": True}
    emulate("sum_strips", 2, columns, partial=partial, total=total, other=other, **sizes)
    _, dgamma, dbeta = normalise_sums(n, wide_dy, np.ones(columns, np.float32))
    FLOAT.same(total, before + dgamma, atol=3e-5)
    FLOAT.same(other, before_other + dbeta, atol=3e-5)
