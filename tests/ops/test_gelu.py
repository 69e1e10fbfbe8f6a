"""GELU, and its derivative compared with finite differences."""

import numpy as np
import pytest

from hpc3d.ops.gelu import GELU
from tests.ops.differences import difference

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("name", GELU)
def test_gelu_and_its_slope(name, blocks):
    def forward(x):
        return GELU[name](x.copy(), np.empty_like(x))

    assert forward(np.array([[-40.0, 0.0, 40.0]])).tolist() == [[-0.0, 0.0, 40.0]]
    h = RNG.normal(size=(7, 9)) * 3
    expected = difference(forward, h, np.ones_like(h))
    GELU[name](h, np.empty_like(h))
    np.testing.assert_allclose(h, expected, atol=1e-8)
