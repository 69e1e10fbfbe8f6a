"""The position table: its rows on each rank, and its gradient."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.context import Context
from hpc3d.model.families import GPT2
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.parameters import Parameters
from hpc3d.model.positions import Positions
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.tensor.split import Split

T, H, SEQUENCES = 8, 3, 4
TABLE = np.random.default_rng(2).normal(size=(T, H))


@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ({}, Context(T)),
        ({"x": 2}, Context(T)),
        ({"x": 8}, Context(T)),  # parts of sequences
        ({"c": 2}, Context(T, 2)),
        ({"c": 4, "x": 2}, Context(T, 2, 2)),
        ({"c": 2, "x": 8}, Context(T, 1, 2)),
    ],
    ids=str,
)
def test_position_table_rows_and_gradient_on_every_layout(sizes, context):
    """dX of a row is its number in the batch, so that sums show which rows they contain."""
    split = Split(m="c x", replicate="c x")
    spec = ModelSpec(GPT2, ModelSizes(1, H, 1, T, 5), {"dense": split}, context=context)
    numbers = np.arange(SEQUENCES * T).reshape(SEQUENCES, T)

    def rank(mesh):
        parameters = Parameters(mesh, "float64")
        positions = Positions(mesh, parameters, spec)
        parameters.allocate(1)
        positions.table.value[...] = TABLE
        tokens = context.cut(numbers)
        micro = Microbatch(0, 0, tokens, tokens, 1.0)
        here = split.x.slices((tokens.size, H), mesh)[0]
        mine = tokens.ravel()[here]
        x = np.zeros((len(mine), H))
        np.testing.assert_array_equal(positions.add(x, micro), TABLE[mine % T])
        positions.weight_grad(np.repeat(mine[:, None], H, 1).astype(float), micro)
        return positions.table.grad.copy()

    total = sum(run(sizes, rank))
    np.testing.assert_array_equal(total, np.repeat(numbers.sum(0)[:, None], H, 1))
