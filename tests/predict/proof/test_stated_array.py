"""States of views, copies, and results of NumPy functions."""

import numpy as np
import pytest

from hpc3d.predict.proof.stated_array import Varying
from hpc3d.predict.proof.states import LOCAL, PARTIAL, PARTS, UNKNOWN
from tests.predict.proof.programs import block, mesh_of

ROWS, COLUMNS = 0, PARTS


@pytest.fixture(name="mesh")
def _mesh():
    return mesh_of(x=2)


@pytest.mark.parametrize(
    ("view", "states"),
    [
        (lambda a: a.T, ROWS),
        (lambda a: a.swapaxes(0, 1), ROWS),
        (lambda a: a[2:, :], COLUMNS),
        (lambda a: a[..., :3], COLUMNS),
        (lambda a: a[None], 2 * PARTS),
        (lambda a: a[0], ROWS),
        (lambda a: a[:, 0], UNKNOWN),
        (lambda a: a.reshape(4, 1, 6), 2 * PARTS),
        (lambda a: a.reshape(4, 2, 3), COLUMNS),
        (lambda a: a.reshape(2, 2, 6), 2 * PARTS),
        (lambda a: a.reshape(24), 1),  # the second one of the merged dimensions
    ],
)
def test_views_have_the_states_of_their_array(mesh, view, states):
    assert view(block(mesh, (4, 6), x=COLUMNS)).states == {"x": states}


def test_a_write_to_a_view_sets_the_states_of_the_array(mesh):
    out = mesh.empty((4, 2, 3), np.float64)
    out.reshape(8, 3)[...] = block(mesh, (8, 3), x=COLUMNS)
    assert out.states == {"x": 2 * PARTS}
    out[...] = block(mesh, (4, 2, 3))
    assert out.states == {}


def test_parts_of_an_array_may_not_be_partial_and_complete(mesh):
    out = mesh.empty((4, 2), np.float64)
    out[:2] = block(mesh, (2, 2), x=PARTIAL)
    out[2:] = 0
    assert out.states == {"x": PARTIAL}
    with pytest.raises(ValueError, match="here: a partial sum and a replicated block"):
        out[2:] = block(mesh, (2, 2))


def test_numpy_functions_derive_states(mesh):
    a, b = block(mesh, (4, 6), x=COLUMNS), block(mesh, (6, 2), x=ROWS)
    assert (a @ b).states == {"x": PARTIAL}
    assert (np.ones(4) @ a).states == {"x": ROWS}
    assert (np.ones(6) @ b).states == {"x": PARTIAL}
    assert (a + np.ones(6)).states == {"x": COLUMNS}
    assert np.sqrt(a).states == {"x": COLUMNS}
    assert a.sum(1).states == {"x": PARTIAL}
    assert a.max(1).states == {"x": LOCAL}
    assert np.add.reduce(a, axis=1).states == {"x": PARTIAL}
    assert np.stack([a, a]).states == {"x": 2 * PARTS}
    assert np.concatenate([a, a]).states == a.copy().states == a.astype(np.float32).states
    assert (a + np.zeros(6).view(Varying)).states == {"x": COLUMNS}


def test_zero_is_compatible_with_every_state(mesh):
    total = mesh.zeros((4, 6), np.float64)
    total += block(mesh, (4, 6), x=PARTIAL)
    assert total.states == {"x": PARTIAL}
    total.fill(1)
    assert total.states == {}


def test_partial_sums_may_be_scaled_but_not_shifted_or_inverted(mesh):
    partial = block(mesh, (4,), x=PARTIAL)
    assert (partial / 2).states == (2 * partial).states == (-partial).states == {"x": PARTIAL}
    for function in (lambda: partial + 1, lambda: 1 / partial, lambda: np.exp(partial)):
        with pytest.raises(ValueError, match="axis x"):
            function()
