"""Lion compared with its published form in torch, and on every axis with one rank."""

import numpy as np
import pytest
import torch

from hpc3d.comm.threads import run
from tests.pipeline.mixes import Trained, alone, config_of, cover, same, serial, train, trainer_of
from tests.strided import strided

LINE = "optimizer=lion learning_rate=0.002"


class Lion(torch.optim.Optimizer):
    """Lion optimizer, program 1 of arXiv:2302.06675."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.data -= lr * (update + group["weight_decay"] * p.data)
                m.mul_(beta2).add_((1 - beta2) * p.grad)


@pytest.mark.parametrize(
    ("words", "betas"), [("", (0.9, 0.99)), ("beta1=0.8 beta2=0.5", (0.8, 0.5))]
)
def test_lion_steps_match_the_paper(words, betas):
    draw = np.random.default_rng(1)

    def rank(mesh):
        trainer = trainer_of(mesh, config_of(f"{LINE} {words} layers=1 weight_decay=0.3"))
        items = [*trainer.parameters]
        weights = [torch.tensor(item.value.copy()) for item in items]
        for weight in weights:
            weight.requires_grad_(False)
        wide = [weight for weight, item in zip(weights, items) if item.decay]
        rest = [weight for weight, item in zip(weights, items) if not item.decay]
        groups = [{"params": wide, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
        reference = Lion(groups, 0.01, betas)
        for _ in range(4):
            trainer.parameters.grad[:] = draw.standard_normal(trainer.parameters.grad.shape)
            for item, weight in zip(items, weights):
                weight.grad = torch.tensor(0.7 * item.grad)
            trainer.optimizer.update(0.01, 0.7)
            reference.step()
        for item, weight in zip(items, weights):
            np.testing.assert_allclose(item.value, weight.numpy(), rtol=0, atol=1e-12)

    run({}, rank)


def test_lion_has_one_state_array():
    (states,) = run({}, lambda mesh: trainer_of(mesh, config_of(LINE)).optimizer.states)
    assert [*states] == ["momentum"]


LAYOUTS = [
    "d=2 x=2 schedule=none microbatches=2 zero=1",
    "p=2 y=2 schedule=1f1b microbatches=2 kind=llama kv_heads=2 ffn=48",
    "d=2 x=2 z=2 schedule=none microbatches=2 zero=2 scheme=3d",
    "d=3 y=3 schedule=none microbatches=2 zero=3 kind=qwen2 kv_heads=1",
    "p=2 d=2 schedule=zb-h1 microbatches=4 zero=1 bucket_mb=0.01 tied=false",
    "d=2 e=2 schedule=none microbatches=2 zero=1 experts=4",
]


@pytest.mark.parametrize("layout", strided(LAYOUTS, 3, 1))
def test_lion_on_several_ranks_matches_one_rank(layout):
    line = f"{LINE} {layout}"
    config, expected = config_of(line), without_keys_bias(serial(alone(line)))
    found = run(config.sizes(), lambda mesh: without_keys_bias(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)


def without_keys_bias(trained):
    """Return the weights without the biases of keys, which add the same to all scores of a query.
    Their gradient is 0 up to rounding, so its sign is noise, but they do not affect results."""
    noise = ("qkv.bias", "qkv.k.bias")
    kept = {name: part for name, part in trained.weights.items() if not name.endswith(noise)}
    return Trained(trained.totals, kept)
