"""An MLP on one rank and on a cube, compared with torch in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpc3d.comm.threads import run
from hpc3d.model.families import GPT2, LLAMA
from hpc3d.model.layers import immediately
from hpc3d.model.mlp import Activation, Mlp
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.tensor.split import SCHEMES

ROWS, HIDDEN, FFN = 8, 8, 16
X, DY = np.random.default_rng(1).normal(size=(2, ROWS, HIDDEN))


def spec_of(family, gelu="tanh", **how):
    sizes = ModelSizes(1, HIDDEN, 4, 4, 10, ffn=FFN, gelu=gelu, std=0.3)
    split = SCHEMES["3d"]
    return ModelSpec(family, sizes, {"dense": split, "experts": split}, **how)


def activated(h, family, gelu):
    if family.gated:
        return functional.silu(h[..., ::2]) * h[..., 1::2]
    return functional.gelu(h, approximate="tanh" if gelu == "tanh" else "none")


def passes(mesh, family, gelu):
    """Return (slices of its blocks, Y, dX, {name: (slices, value, gradient)}) of a rank."""
    parameters = Parameters(mesh, "float64")
    spec = spec_of(family, gelu)
    mlp = Mlp(mesh, parameters, spec, "mlp", FFN, 0.2)
    parameters.allocate(3)
    for item in parameters:
        item.value += 0.1  # biases, too
    where = SCHEMES["3d"].x.slices(X.shape, mesh)
    y, saved = mlp.forward(X[where].copy(), None)
    dx = mlp.backward(DY[where].copy(), saved, None, immediately)
    items = {
        item.name: (item.layout.slices(item.shape, mesh), item.value, item.grad)
        for item in parameters
    }
    return where, y, dx, items


def of_torch(weights, family, gelu):
    """Return (Y, dX, {name: gradient})."""
    weights = {name: torch.tensor(each, requires_grad=True) for name, each in weights.items()}
    x = torch.tensor(X, requires_grad=True)

    def linear(part, x):
        return x @ weights[f"mlp.{part}.weight"] + weights.get(f"mlp.{part}.bias", 0.0)

    y = linear("down", activated(linear("up", x), family, gelu))
    y.backward(torch.tensor(DY))
    return y.detach(), x.grad, {name: each.grad for name, each in weights.items()}


@pytest.mark.parametrize(
    ("family", "gelu"),
    [(GPT2, "tanh"), (GPT2, "exact"), (LLAMA, "tanh")],
    ids=["tanh", "exact", "swiglu"],
)
@pytest.mark.parametrize("axes", [{}, {"x": 2, "y": 2, "z": 2}], ids=["1", "8"])
def test_mlp_forward_and_backward_match_torch(axes, family, gelu):
    serial = run({}, lambda mesh: passes(mesh, family, gelu))[0][-1]
    y, dx, gradients = of_torch({name: each[1] for name, each in serial.items()}, family, gelu)
    for where, my_y, my_dx, items in run(axes, lambda mesh: passes(mesh, family, gelu)):
        np.testing.assert_allclose(my_y, y[where], rtol=0, atol=1e-12)
        np.testing.assert_allclose(my_dx, dx[where], rtol=0, atol=1e-12)
        for name, (place, _, gradient) in items.items():
            if name.endswith("weight"):  # those of biases are summed when the step ends
                np.testing.assert_allclose(
                    gradient, gradients[name][place], rtol=0, atol=1e-12, err_msg=name
                )


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gelu", "swiglu"])
def test_batched_activation_matches_each_matrix(family):
    h = np.random.default_rng(2).normal(size=(5, 3, 8))

    def both(mesh):
        activation = Activation(mesh, spec_of(family))
        stack, matrices = h.copy(), h.swapaxes(0, 1).copy()
        out = activation.forward(stack)
        dh = activation.backward(stack, np.ones_like(out))
        for n, matrix in enumerate(matrices):
            part = activation.forward(matrix)
            np.testing.assert_array_equal(out[:, n], part)
            slopes = activation.backward(matrix, np.ones_like(part))
            np.testing.assert_array_equal(dh[:, n], slopes)

    run({}, both)
