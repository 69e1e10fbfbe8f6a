"""Norms of q and k, compared with NumPy; tests.model.test_stage compares gradients with torch."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.families import QWEN3
from hpc3d.model.parameters import Parameters
from hpc3d.model.qkv.query_norm import HeadNorm
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.tensor.split import Split
from tests.ops.by_head import by_head

EPSILON = 0.1


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_query_and_key_has_the_norm_of_its_weights(kv_heads):
    sizes = ModelSizes(1, 24, 4, 3, 29, kv_heads=kv_heads, head_dim=6, epsilon=EPSILON)
    qkv = np.random.default_rng(3).normal(size=(5, sizes.qkv))

    def rank(mesh):
        parameters = Parameters(mesh, "float64")
        norms = HeadNorm(mesh, parameters, ModelSpec(QWEN3, sizes, {"dense": Split()}), "layers.0")
        parameters.allocate(1)
        assert sum(item.value.size for item in parameters) == HeadNorm.weights(sizes)
        for factor, item in zip((2, 3), norms.norms, strict=True):
            item.gamma.value[...] = factor * np.arange(1, 7)
        found = qkv.copy()
        norms.forward(found)
        return found

    (found,) = run({}, rank)
    before, after = (by_head(each, kv_heads, sizes.form) for each in (qkv, found))
    np.testing.assert_array_equal(after[:, :, -1], before[:, :, -1])
    scale = np.sqrt((before**2).mean(-1, keepdims=True) + EPSILON)
    expected = before / scale * np.arange(1, 7)
    np.testing.assert_allclose(after[:, :, :-2], 2 * expected[:, :, :-2], rtol=1e-12)
    np.testing.assert_allclose(after[:, :, -2], 3 * expected[:, :, -2], rtol=1e-12)
