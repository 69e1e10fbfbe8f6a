"""States of slices of the flat gradient array."""

import numpy as np
import pytest

from hpc3d.model.parameters import Parameters
from hpc3d.predict.proof.flat_gradient import FlatGradient
from hpc3d.predict.proof.states import PARTIAL, PARTS
from hpc3d.tensor.layout import Layout
from tests.predict.proof.programs import block, mesh_of


def gradients(*states):
    """Return the flat gradient of parameters whose gradients have these states."""
    parameters = Parameters(mesh_of(d=2, x=2), np.float64)
    for number in range(len(states)):
        parameters.add(f"w{number}", (2, 3), Layout("", ""))
    parameters.allocate(0)
    items = sorted(parameters, key=lambda item: parameters.slices[item].grad.start)
    for item, given in zip(items, states, strict=True):
        item.grad = block(parameters.mesh, (2, 3), **given)
    return FlatGradient(parameters), items


def test_a_slice_has_the_states_of_its_gradients():
    flat, _ = gradients({"d": PARTIAL, "x": PARTS}, {"d": PARTIAL})
    assert flat[slice(0, 6)].states == {"d": PARTIAL, "x": 0}
    assert flat[slice(6, 12)].states == flat[slice(6, 7)].states == {"d": PARTIAL}
    assert flat[:0].shape == (0,)


def test_a_reduced_slice_sets_the_states_of_its_gradients():
    flat, (first, second) = gradients({"d": PARTIAL}, {"d": PARTIAL})
    flat[slice(0, 6)] = block(flat.parameters.mesh, (6,))
    assert (first.grad.states, second.grad.states) == ({}, {"d": PARTIAL})


def test_a_slice_of_partial_and_complete_gradients_is_refused():
    flat, _ = gradients({"d": PARTIAL}, {})
    with pytest.raises(ValueError, match="a partial sum and a replicated block along axis d"):
        flat[slice(0, 12)]
