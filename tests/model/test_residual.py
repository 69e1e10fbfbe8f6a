"""Residual connections: where the norm is, and which norms can be recomputed."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.families import LLAMA
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.parameters import Parameters
from hpc3d.model.residual import BranchNorm, PostNorm, PreNorm, SandwichNorm
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.tensor.split import Split


class Squared:
    """Last layer of a branch that returns 3 x^2 and cannot add the residual."""

    adds_residual = False

    def forward(self, x):
        return 3 * x**2, "saved"


def normed(x):
    return x / np.sqrt((x**2).mean(1, keepdims=True))


EXPECTED = {
    PreNorm: lambda x: x + 3 * normed(x) ** 2,
    PostNorm: lambda x: normed(x + 3 * x**2),
    BranchNorm: lambda x: x + normed(3 * x**2),
    SandwichNorm: lambda x: x + normed(3 * normed(x) ** 2),
}


@pytest.mark.parametrize("connection", EXPECTED)
def test_norm_is_where_the_formula_has_it(connection):
    x = np.random.default_rng(2).normal(size=(4, 6))
    tokens = np.zeros((2, 2), np.int32)

    def rank(mesh):
        parameters = Parameters(mesh, "float64")
        spec = ModelSpec(LLAMA, ModelSizes(1, 6, 2, 2, 9, epsilon=0.0), {"dense": Split()})
        residual = connection(mesh, parameters, spec, "layers.0", 1, again=False)
        parameters.allocate(1)
        inputs, saved = residual.branch_input(x)
        y, of_layer, of_norm = residual.add(
            x, Microbatch(0, 0, tokens, tokens, 1.0), saved, Squared(), inputs
        )
        assert of_layer == "saved" and of_norm is not None
        return y

    (found,) = run({}, rank)
    np.testing.assert_allclose(found, EXPECTED[connection](x), rtol=1e-12)
