"""Newton-Schulz steps, compared with the singular value decomposition."""

import numpy as np
import pytest

from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.ops.update import nesterov, orthogonalize, orthogonalize_flops


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 6)])
def test_orthogonalize_keeps_singular_vectors_and_scales_values_near_1(shape):
    x = np.random.default_rng(1).standard_normal(shape)
    u, values, v = np.linalg.svd(x, full_matrices=False)
    s = values / np.sqrt((values**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    orthogonalize(x, np.empty)
    np.testing.assert_allclose(x, u * s @ v, atol=1e-12)
    assert shape == (8, 8) or ((s > 0.6).all() and (s < 1.3).all())


def test_orthogonalize_keeps_zeros():
    x = np.zeros((3, 4))
    orthogonalize(x, np.empty)
    assert not x.any()


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_orthogonalize_flops_match_the_counted_products(shape):
    class Counting(CostMeter):
        flops = 0

        def product(self, m, n, k, dtype, batch=1):
            self.flops += 2 * m * n * k * batch

    pool = AbstractPool(Counting())
    orthogonalize(pool.empty(shape, "float32"), pool.empty)
    assert pool.meter.flops == orthogonalize_flops(shape)


def test_nesterov_step_matches_its_equation():
    g, m, out = np.array([2.0, -4.0]), np.array([1.0, 3.0]), np.empty(2)
    nesterov(g, m, out, scale=0.5, beta=0.75)
    np.testing.assert_allclose(m, [1.0, 1.75])
    np.testing.assert_allclose(out, [1.0, 0.8125])
