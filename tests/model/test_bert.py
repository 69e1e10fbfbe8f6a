"""The input and output layers of BERT: head product, segments and padding."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.families import BERT
from hpc3d.model.spec import ModelSizes
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.tensor.matmul import sharded_matmul
from hpc3d.tensor.split import SCHEMES, Split
from tests.model.whole import Model

SHAPE = {"layers": 1, "hidden": 24, "heads": 4, "sequence": 6, "vocabulary": 29, "std": 0.3}
PADDING = 5


def model(**more):
    sizes = ModelSizes(**SHAPE | more)
    return run({}, lambda mesh: Model(mesh, sizes, Split(), family=BERT))[0]


def batch(seed=3):
    """Two samples without padding tokens."""
    tokens, targets = np.random.default_rng(seed).integers(6, 28, (2, 2, 6))
    return tokens, targets


def gradients(made, tokens, targets):
    """Return the loss, and {name: gradient}."""
    made.parameters.grad[...] = 0
    loss = made.gradients(tokens, targets)
    return loss, {item.name: item.grad.copy() for item in made.parameters}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("zero", [None, 0, 2, 3])
def test_head_product_has_equal_input_and_output_layouts(scheme, zero):
    """If blocks have owners, its rows are split over more ranks, and only the owner has rows."""
    split = SCHEMES[scheme] if zero is None else SCHEMES[scheme].over("d", zero)
    alike = split.alike()
    assert alike.x == alike.y
    assert alike.x[1] == split.x[1]
    assert {*alike.x[0]} == {*split.x[0], *split.x.owned}
    assert (alike.defer, alike.scatter) == (split.defer, split.scatter)


def test_head_product_weights_are_sharded_over_all_tensor_axes():
    """W of the head is sharded over all ranks, except along axes of full replicas."""
    for name, split in SCHEMES.items():
        axes = {axis for dim in split.alike().w for axis in dim}
        loops = {axis for letter in (split.m, split.n, split.k) for axis in letter.split()}
        assert axes == loops - {*split.replicate.split()}, name


@pytest.mark.parametrize("scheme", ["1d-sequence", "2d-summa", "3d", "3d-broadcast"])
def test_head_product_matches_a_single_rank(scheme):
    """With integers, the results are bitwise equal; X has the layout of a block's output."""
    random = np.random.default_rng(2)
    x, w, dy = (random.integers(-4, 5, shape).astype(float) for shape in ((8, 8), (8, 8), (8, 8)))
    split = SCHEMES[scheme]
    sizes = {axis: 2 for axis in "xyz" if axis in (split.m + split.n + split.k)}

    def rank(mesh):
        matmul = sharded_matmul(mesh, split.alike())
        here, part = split.x.slices(x.shape, mesh), matmul.w_layout.slices(w.shape, mesh)
        y = matmul.forward(x[here].copy(), w[part].copy())
        dx, dw = matmul.backward(x[here].copy(), w[part].copy(), dy[here].copy())
        np.testing.assert_array_equal(y, (x @ w)[here])
        np.testing.assert_array_equal(dx, (dy @ w.T)[here])
        np.testing.assert_array_equal(dw, (x.T @ dy)[part])

    run(sizes, rank)


def test_every_token_belongs_to_segment_0():
    made = model()
    _, found = gradients(made, *batch())
    assert found["embedding.segment"].shape == (2, 24)
    assert found["embedding.segment"][0].any() and not found["embedding.segment"][1].any()


def test_bert_attention_is_bidirectional():
    """With a single target, the first token, the gradient reaches the last position."""
    tokens, targets = batch()
    targets[...] = IGNORE
    targets[0, 0] = 3
    _, found = gradients(model(), tokens, targets)
    assert np.abs(found["embedding.position"][5]).max() > 1e-3


def test_padding_is_masked_and_has_no_gradient():
    """Position rows of padding get no gradient, and padding does not affect other tokens. A sample
    of padding only does not cause NaN."""
    made, (tokens, targets) = model(padding=PADDING), batch()
    tokens[0, 4:], targets[0, 4:] = PADDING, IGNORE
    tokens[1], targets[1] = PADDING, IGNORE
    loss, found = gradients(made, tokens, targets)
    assert np.isfinite(loss)
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
    assert not found["embedding.position"][4:].any()
    alone, kept = gradients(made, tokens[:1], targets[:1])
    assert alone == pytest.approx(loss, rel=1e-12)
    for name, gradient in kept.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-14, err_msg=name)


def test_gradient_descent_reduces_the_loss():
    """Gradient descent with the model's own gradients reduces the loss."""
    made, (tokens, targets) = model(), batch()
    first = 0.0
    for _ in range(30):
        loss, _ = gradients(made, tokens, targets)
        first = first or loss
        made.parameters.value -= 0.1 * made.parameters.grad
    assert loss < 0.5 * first
