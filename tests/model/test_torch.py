"""Our forward and backward, written by hand, against torch autograd in float64."""

import numpy as np
import pytest
import torch

from hpc3d.benchmarks import peer
from hpc3d.cluster.threads import run
from hpc3d.model.gpt2 import Shape
from hpc3d.model.loss import IGNORE
from hpc3d.tensor.split import Split
from hpc3d.training.optimizer import AdamW
from tests.model.whole import Model

SHAPE = {"layers": 3, "hidden": 24, "heads": 4, "sequence": 7, "vocabulary": 29}


def batch(shape, sequences=5, seed=3):
    tokens = np.random.default_rng(seed).integers(
        0, shape.vocabulary, (2, sequences, shape.sequence)
    )
    tokens[1, 0, :3] = IGNORE
    return tokens


def serial(shape):
    return run({}, lambda mesh: Model(mesh, shape, Split()))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_loss_and_every_gradient_are_those_of_torch(tied, gelu):
    shape = Shape(**SHAPE, tied=tied, gelu=gelu, std=0.3)
    model = serial(shape)
    tokens, targets = batch(shape)
    loss = model.gradients(tokens, targets)

    weights = peer.weights_of(model.parameters)
    expected = peer.loss(weights, shape, torch.tensor(tokens), torch.tensor(targets))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for item in model.parameters:
        gradient = weights[item.name].grad.numpy()
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(
            item.grad, gradient, atol=1e-10 * scale, rtol=0, err_msg=item.name
        )


def test_five_adamw_steps_are_those_of_torch():
    shape = Shape(**SHAPE, std=0.3)
    model = serial(shape)
    weights = peer.weights_of(model.parameters)
    decayed = [weights[item.name] for item in model.parameters if item.decay]
    others = [weights[item.name] for item in model.parameters if not item.decay]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(AdamW.BETA1, AdamW.BETA2), eps=1e-8)
    ours = AdamW(model.parameters, 0.1)
    for step in range(5):
        tokens, targets = batch(shape, seed=step)
        model.gradients(tokens, targets)
        ours.update(3e-3, 1.0)
        reference.zero_grad()
        peer.loss(weights, shape, torch.tensor(tokens), torch.tensor(targets)).backward()
        reference.step()
    # The gradient of a key's bias is 0; Adam divides its rounding by eps = 1e-8.
    for item in model.parameters:
        np.testing.assert_allclose(item.value, weights[item.name].detach(), atol=1e-10)
