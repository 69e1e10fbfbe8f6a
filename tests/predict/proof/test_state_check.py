"""States of the results of primitives."""

import numpy as np
import pytest

from hpc3d.arrays.primitive import Primitive
from hpc3d.ops.embedding import gather_rows
from hpc3d.ops.norm import row_squares
from hpc3d.ops.random import Mask
from hpc3d.ops.rows import dropped
from hpc3d.predict.proof.stated_array import Varying
from hpc3d.predict.proof.states import PARTIAL, PARTS
from tests.predict.proof.programs import block, mesh_of


def test_a_primitive_has_the_states_of_its_index_notation():
    mesh = mesh_of(x=2)
    assert row_squares(block(mesh, (4, 6), x=PARTS)).states == {"x": PARTIAL}
    assert row_squares(block(mesh, (4, 6), x=0)).states == {"x": 0}


def test_a_primitive_without_notation_is_elementwise_and_not_linear():
    double = Primitive(lambda x, out: None, lambda x, out: out)
    mesh = mesh_of(x=2)
    out, other = mesh.empty((4, 6), np.float64), mesh.empty((4, 6), np.float64)
    assert double(block(mesh, (4, 6), x=0), out).states == out.states == {"x": 0}
    with pytest.raises(ValueError, match="an operand is a partial sum along axis x"):
        double(block(mesh, (4, 6), x=PARTIAL), out)
    double.states(linear="product")
    assert double(block(mesh, (4, 6), x=PARTIAL), other).states == {"x": PARTIAL}


def mask():
    return Mask(np.zeros(2, np.uint64), 0.5, range(4), range(6), 6)


@pytest.mark.parametrize(
    ("sharded", "varied", "message"),
    [
        ({}, {"x"}, "the dropout masks of the ranks along axis x differ, but x is replicated"),
        ({"x": 0}, set(), "the ranks along axis x have the same dropout mask, but x is sharded"),
    ],
)
def test_a_dropout_mask_varies_along_the_axes_that_shard_its_rows(sharded, varied, message):
    def drop(varied):
        mesh = mesh_of([frozenset(varied)], x=2)
        x = block(mesh, (4, 6), **sharded)
        return dropped(x, mask(), mesh.empty(x.shape, x.dtype))

    assert drop({*sharded}).states == sharded
    with pytest.raises(ValueError, match=message):
        drop(varied)


def test_indices_vary_along_the_axes_that_shard_the_table():
    table, index = block(mesh_of(x=2), (4, 6), x=0), np.arange(3).view(Varying)
    index.axes = frozenset("x")
    assert gather_rows(table, index).states == {"x": PARTIAL}
    with pytest.raises(ValueError, match="ranks along axis x have the same indices"):
        gather_rows(table, np.arange(3))
