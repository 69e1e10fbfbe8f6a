"""Layers in unusual positions: reused, in branches, and in odd numbers."""

from functools import partial

import numpy as np
import pytest

from hpc3d.comm.communicator import ready
from hpc3d.comm.threads import run
from hpc3d.model import layers
from hpc3d.model.layers import LayerNorm, Linear
from hpc3d.model.parameters import Parameters
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.tensor.matmul import sharded_matmul
from hpc3d.tensor.split import Split
from tests.model.test_parallel import ON
from tests.strided import strided
from tests.tensor.cases import SPLITS, sizes


def parameters_of(mesh, build):
    """Return the result of `build(mesh, parameters)`, with allocated parameter arrays."""
    parameters = Parameters(mesh, "float64")
    layers = build(mesh, parameters)
    parameters.allocate(1)
    return layers, parameters


def sum_gradients(parameters):
    Buckets(parameters, 1e4).wait()


def branches(mesh, split):
    """Y = A x * B x: two layers that share their input."""

    def build(mesh, parameters):
        return [
            Linear(parameters, name, (24, 24), sharded_matmul(mesh, split), 0.3)
            for name in ("gate", "up")
        ]

    (gate, up), parameters = parameters_of(mesh, build)
    x, dy = inputs(mesh, split.x), inputs(mesh, split.y, seed=2)
    (a, saved_a), (b, saved_b) = gate.forward(x), up.forward(x)
    dx = gate.backward(dy * b, saved_a) + up.backward(dy * a, saved_b)
    return [(split.y, a * b), (split.x, dx)], parameters


def twice(mesh, split):
    """Y = A (B (A x)): a layer that is used twice, each time with its own saved data."""

    def build(mesh, parameters):
        return [
            Linear(parameters, "shared", (24, 24), sharded_matmul(mesh, split), 0.3),
            Linear(parameters, "between", (24, 24), sharded_matmul(mesh, split.next()), 0.3),
        ]

    (shared, between), parameters = parameters_of(mesh, build)
    x, dy = inputs(mesh, split.x), inputs(mesh, split.y, seed=2)
    h1, saved1 = shared.forward(x)
    h2, saved2 = between.forward(h1)
    y, saved3 = shared.forward(h2)
    dx = shared.backward(between.backward(shared.backward(dy, saved3), saved2), saved1)
    return [(split.y, y), (split.x, dx)], parameters


def odd(mesh, split):
    """Three layers and a norm, so that the layout changes an odd number of times."""
    splits = [split, split.next(), split]

    def build(mesh, parameters):
        layers = [
            Linear(parameters, f"{number}", (24, 24), sharded_matmul(mesh, each), 0.3)
            for number, each in enumerate(splits)
        ]
        return [*layers, LayerNorm(mesh, parameters, "norm", 24, split.y)]

    (*layers, norm), parameters = parameters_of(mesh, build)
    x, saved = inputs(mesh, split.x), []
    for layer in layers:
        x, kept = layer.forward(x)
        saved.append(kept)
    y, kept = norm.forward(x)
    dx = norm.backward(inputs(mesh, split.y, seed=2), kept, residual=None)
    for layer in reversed(layers):
        dx = layer.backward(dx, saved.pop())
    return [(split.y, y), (split.x, dx)], parameters


def inputs(mesh, layout, seed=1):
    whole = np.random.default_rng(seed).normal(size=(48, 24))
    return np.ascontiguousarray(whole[layout.slices(whole.shape, mesh)])


@pytest.mark.parametrize("build", [branches, twice, odd])
@pytest.mark.parametrize(("name", "cuboid"), strided(ON, 6, 1))
def test_branching_and_reused_layers_match_a_single_rank(name, cuboid, build):
    def rank(mesh, split=SPLITS[name]):
        arrays, parameters = build(mesh, split)
        sum_gradients(parameters)
        shape = (48, 24)
        found = [(layout.slices(shape, mesh), array) for layout, array in arrays]
        weights = [(p.name, p.layout.slices(p.shape, mesh), p.grad.copy()) for p in parameters]
        return found, weights

    (expected, whole), *_ = run({}, lambda mesh: rank(mesh, Split()))
    whole = {name: gradient for name, _, gradient in whole}
    for found, weights in run(sizes(name, cuboid), rank):
        for (where, ours), (_, full) in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, full[where], atol=1e-10)
        for key, where, gradient in weights:
            np.testing.assert_allclose(gradient, whole[key][where], atol=1e-10, err_msg=key)


def test_bias_of_expert_layers_is_added_without_a_copy_of_a_shared_product(monkeypatch):
    def rank(mesh, shared):
        matmul = sharded_matmul(mesh, Split(), stacked=True)
        parameters = Parameters(mesh, "float64")
        layer = Linear(parameters, "experts", (24, 3, 24), matmul, 0.3)
        parameters.allocate(1)
        layer.bias.value += np.arange(72).reshape(1, 3, 24)
        if shared:
            monkeypatch.setattr(matmul, "reduce", lambda block, *_: ready(read_only(block)))
            monkeypatch.setattr(layers, "owned", None)
        return layer.forward(inputs(mesh, Split().x).reshape(16, 3, 24))[0]

    ours, expected = (run({}, partial(rank, shared=each))[0] for each in (True, False))
    np.testing.assert_array_equal(ours, expected)


def read_only(block):
    block.flags.writeable = False
    return block
