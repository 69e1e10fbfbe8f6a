"""The whole model on every scheme and mesh against the serial model, in float64."""

from itertools import product

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.gpt2 import ModelSizes
from hpc3d.model.gradient_buckets import Buckets
from hpc3d.model.layers import LayerNorm, Linear
from hpc3d.model.parameters import Parameters
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.tensor.split import Split
from tests.model.whole import Model
from tests.mpi import checked
from tests.strided import strided
from tests.tensor.cases import CUBOIDS, SPLITS, sizes

SEQUENCES = 48
SHAPE = {"layers": 2, "hidden": 48, "heads": 24, "sequence": 3, "vocabulary": 29, "std": 0.2}
KINDS = {
    "plain": ModelSizes(**SHAPE),
    "untied, exact, dropout": ModelSizes(**SHAPE, tied=False, gelu="exact", dropout=0.25),
}


def batch():
    """Uneven: some targets count for nothing."""
    tokens = np.random.default_rng(3).integers(0, 29, (2, SEQUENCES, 3))
    tokens[1, 0] = IGNORE
    tokens[1, 7, 1] = IGNORE
    return tokens


def gradients(mesh, split, shape):
    """Loss, norm of the gradient, and name -> (global shape, slices, value, gradient)."""
    model = Model(mesh, shape, split)
    totals = [model.gradients(*batch(), step=4), model.norm()]
    blocks = {
        item.name: (item.layout.slices(item.shape, mesh), item.value.copy(), item.grad.copy())
        for item in model.parameters
    }
    return totals, blocks


def serial(shape):
    return run({}, lambda mesh: gradients(mesh, Split(), shape))[0]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param], serial(KINDS[request.param])


def same(found, expected):
    """All blocks of a rank are the slices of the serial model's; padding is zero."""
    totals, blocks = found
    np.testing.assert_allclose(totals, expected[0], rtol=1e-10)
    assert blocks.keys() == expected[1].keys()
    for name, (where, value, gradient) in blocks.items():
        _, whole_value, whole_gradient = expected[1][name]
        bound = 1e-10 * np.abs(whole_gradient).max()
        np.testing.assert_array_equal(value, padded(whole_value, where)[where], name)
        np.testing.assert_allclose(
            gradient, padded(whole_gradient, where)[where], rtol=0, atol=bound, err_msg=name
        )


def padded(whole, where):
    """The serial tensor with rows of zeros as far as `where` reaches."""
    more = max(0, where[0].stop - whole.shape[0])
    return np.pad(whole, [(0, more)] + [(0, 0)] * (whole.ndim - 1))


def on_mesh(name, cuboid, data, kind):
    split = SPLITS[name] if data == 1 else SPLITS[name].over_data("d")
    shape, expected = kind
    for found in run(
        {"d": data, **sizes(name, cuboid)}, lambda mesh: gradients(mesh, split, shape)
    ):
        same(found, expected)


ON = [*product(SPLITS, CUBOIDS)]


@pytest.mark.parametrize(("name", "cuboid"), strided(ON, 3))
def test_parallel_is_serial(name, cuboid, kind):
    on_mesh(name, cuboid, 1, kind)


@pytest.mark.parametrize("name", strided(SPLITS, 3))
def test_parallel_is_serial_on_every_replica(name, kind):
    on_mesh(name, (2, 2, 2), 2, kind)


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        pytest.param(8, "auto", marks=pytest.mark.slow),
        pytest.param(8, "mpi", marks=pytest.mark.slow),
        pytest.param(12, "auto", marks=pytest.mark.slow),
        pytest.param(12, "mpi", marks=pytest.mark.slow),
    ],
)
def test_the_same_on_real_ranks(ranks, transport):
    out = checked(ranks, "-m", "tests.model.on_mpi", transport, timeout=250)
    assert out.split() == [*SPLITS, "done"]


def parameters_of(mesh, build):
    """The value of `build(mesh, parameters)` with the parameters' arrays in place."""
    parameters = Parameters(mesh, "float64")
    layers = build(mesh, parameters)
    parameters.allocate(1)
    return layers, parameters


def sum_gradients(parameters):
    Buckets(parameters, 1e4).wait()


def branches(mesh, split):
    """Y = A x * B x: two layers that share their input."""

    def build(mesh, parameters):
        return [Linear(mesh, parameters, name, (24, 24), split, 0.3) for name in ("gate", "up")]

    (gate, up), parameters = parameters_of(mesh, build)
    x, dy = inputs(mesh, split.x), inputs(mesh, split.y, seed=2)
    (a, saved_a), (b, saved_b) = gate.forward(x), up.forward(x)
    dx = gate.backward(dy * b, saved_a) + up.backward(dy * a, saved_b)
    return [(split.y, a * b), (split.x, dx)], parameters


def twice(mesh, split):
    """Y = A (B (A x)): a layer that is used twice, each use with what it saved."""

    def build(mesh, parameters):
        return [
            Linear(mesh, parameters, "shared", (24, 24), split, 0.3),
            Linear(mesh, parameters, "between", (24, 24), split.next(), 0.3),
        ]

    (shared, between), parameters = parameters_of(mesh, build)
    x, dy = inputs(mesh, split.x), inputs(mesh, split.y, seed=2)
    h1, saved1 = shared.forward(x)
    h2, saved2 = between.forward(h1)
    y, saved3 = shared.forward(h2)
    dx = shared.backward(between.backward(shared.backward(dy, saved3), saved2), saved1)
    return [(split.y, y), (split.x, dx)], parameters


def odd(mesh, split):
    """Three layers and a norm: the layout turns an odd number of times."""
    turns = [split, split.next(), split]

    def build(mesh, parameters):
        layers = [
            Linear(mesh, parameters, f"{number}", (24, 24), turn, 0.3)
            for number, turn in enumerate(turns)
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
def test_known_traps(name, cuboid, build):
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
