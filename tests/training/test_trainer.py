"""The optimization common to all layouts, compared with torch and with published constants, but
not with code of hpc3d."""

from math import sqrt

import numpy as np
import pytest
import torch

from hpc3d.benchmarks import torch_reference
from hpc3d.comm.threads import run
from hpc3d.config.input_file import Config, TrainConfig
from hpc3d.model.stage import LayerRange
from hpc3d.pipeline.program import forward_program_of
from hpc3d.training.optimizers.optimizer import learning_rate
from hpc3d.training.trainer import Trainer, parts_of
from tests.pipeline.mixes import Tokens, Trained, alone, config_of, cover, trained_of, trainer_of

STEPS, WARMUP, RATE = 9, 3, 0.5


def test_training_defaults_match_gpt_3():
    """arXiv:2005.14165, appendix B: clip 1.0, weight decay 0.1, cosine to a tenth."""
    train = Config().train
    found = train.optimizer, train.clip, train.weight_decay, train.decay
    assert found == ("adamw", 1.0, 0.1, "cosine")


# The learning rate


def scheduled(optimizer, decay, steps=STEPS, warmup=WARMUP):
    """Return torch's schedule of an optimizer: linear warm-up, decay to a tenth at `steps`."""
    names, rest = torch.optim.lr_scheduler, steps - warmup
    rate = optimizer.param_groups[0]["lr"]
    after = {
        "cosine": lambda: names.CosineAnnealingLR(optimizer, rest, eta_min=rate / 10),
        "linear": lambda: names.LinearLR(optimizer, 1.0, 0.1, rest),
        "constant": lambda: names.ConstantLR(optimizer, 1.0),
    }[decay]()
    if not warmup:
        return after
    before = names.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1) if warmup > 1 else after
    return names.SequentialLR(optimizer, [before, after], [warmup])


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_learning_rate_matches_torch(decay):
    train = TrainConfig(steps=STEPS, warmup=WARMUP, learning_rate=RATE, decay=decay)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    schedule, expected = scheduled(optimizer, decay), []
    for _ in range(STEPS):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = [learning_rate(train, step) for step in range(STEPS)]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("decay", "warmup", "shares"),
    [
        ("cosine", 0, [1, 0.775, 0.325]),  # 0.1 + 0.9 (1 + cos(pi i / 3)) / 2
        ("linear", 0, [1, 0.7, 0.4]),
        ("linear", 1, [1, 1, 0.55]),
        ("cosine", 3, [1 / 3, 2 / 3, 1]),  # nothing but warm-up
        ("constant", 2, [0.5, 1, 1]),
    ],
)
def test_learning_rate_of_three_steps(decay, warmup, shares):
    train = TrainConfig(steps=3, warmup=warmup, learning_rate=RATE, decay=decay)
    found = [learning_rate(train, step) / RATE for step in range(3)]
    assert found == pytest.approx(shares, rel=1e-12)


# Steps of the whole trainer


def reference(config):
    """Return losses, norms, learning rates and final weights of a serial model trained by torch,
    with its own clipping, schedule and optimizer."""
    torch.set_num_threads(1)
    (trainer,) = run({}, lambda mesh: trainer_of(mesh, config))
    weights, settings = torch_reference.weights_of(trainer.parameters), config.train
    batches, totals, rates = Tokens(config), [], []
    optimizer = optimizer_of(weights, settings)
    schedule = scheduled(optimizer, settings.decay, settings.steps, settings.warmup)
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = torch_reference.loss(
            weights, trainer.shape, *map(torch.tensor, batches.batch(step))
        )
        loss.backward()
        limit = settings.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), limit)
        totals.append((loss.item(), norm.item()))
        rates += schedule.get_last_lr()[:1]
        optimizer.step()
        schedule.step()
    return rates, Trained(
        totals, {name: (None, w.detach().numpy()) for name, w in weights.items()}
    )


def optimizer_of(weights, settings):
    """Return torch's optimizer; only matrices decay. SGD adds the decay to the clipped gradient:
    w - lr (g + decay w) is (1 - lr decay) w - lr g."""
    groups = [
        {"params": [w for w in weights.values() if (w.ndim > 1) == many], "weight_decay": decay}
        for many, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    if settings.optimizer == "adamw":
        given = settings.beta1, settings.beta2, settings.epsilon
        usual = 0.9, 0.95, 1e-8  # GPT-3's
        *betas, eps = (b if a is None else a for a, b in zip(given, usual, strict=True))
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=eps)
    return torch.optim.SGD(groups, lr=settings.learning_rate)


SGD = "optimizer=sgd learning_rate=0.3 weight_decay=0.2"
# With how many of the five norms lie above the limit.
CLIPPED = {
    f"{SGD} clip=2.5": 2,
    f"{SGD} clip=2.5 decay=linear warmup=3 schedule=none microbatches=3": 3,
    f"{SGD} clip=2.5 p=2 d=2 schedule=1f1b microbatches=4 zero=1": 2,
    f"{SGD} clip=100 tied=false": 0,
    f"{SGD} clip=0 decay=constant warmup=0": 5,
    "clip=2.5 learning_rate=0.01 weight_decay=0.3": 2,
    "clip=0.05 decay=linear weight_decay=0": 5,
    "clip=0.05 beta1=0.5 beta2=0.8 epsilon=0.01 d=2 zero=1": 5,
}


@pytest.mark.parametrize(("line", "above"), CLIPPED.items(), ids=CLIPPED)
def test_training_matches_torch(line, above):
    """The norms are on both sides of the clipping limit with SGD. Adam normalizes gradients, so it
    would hardly detect a wrong scale."""
    line = f"{line} steps=5"
    config, (rates, expected) = config_of(line), reference(config_of(alone(line)))
    assert sum(norm > config.train.clip for _, norm in expected.totals) == above
    found = run(config.sizes(), lambda mesh: steps_of(mesh, config))
    for ours, trained in found:
        assert ours == pytest.approx(rates, rel=1e-12)
        close(trained, expected)
    cover([trained for _, trained in found], expected)


def steps_of(mesh, config):
    """Return the learning rate of every step, and the results of the steps."""
    trainer = trainer_of(mesh, config)
    steps = [trainer.step(number) for number in range(config.train.steps)]
    return [step.learning_rate for step in steps], trained_of(trainer, steps)


def close(found, expected):
    """Compare with a tolerance for torch's clipping, which divides by the norm plus 1e-6."""
    np.testing.assert_allclose(found.totals, expected.totals, rtol=1e-6)
    for name, (where, block) in found.weights.items():
        part = expected.weights[name][1][where]
        np.testing.assert_allclose(block[: len(part)], part, rtol=0, atol=1e-6, err_msg=name)


def test_stages_have_their_layers_and_the_peer_of_a_tied_table():
    """Tests two pipeline stages."""
    config = config_of("p=2 layers=4")
    placement = forward_program_of(config).placement
    found = run(config.sizes(), lambda mesh: parts_of(mesh, config, placement))
    first, last = LayerRange(range(2), True, False), LayerRange(range(2, 4), False, True)
    assert found == [([first], 1), ([last], 0)]


# What decays, and how weights start

WIDE = "hidden=192 heads=4 vocabulary=500 sequence=40 layers=8 tied=false"


@pytest.fixture(scope="module")
def started():
    """Return a new trainer of 8 layers."""
    config = config_of(WIDE)
    return run({}, lambda mesh: Trainer(mesh, config, config.model.vocabulary, None))[0]


@pytest.mark.parametrize(
    ("ends", "mean", "std"),
    [
        (("embedding.token", "embedding.position", "head.table"), 0, 0.02),
        (("qkv.weight", "up.weight"), 0, 0.02),
        (("proj.weight", "down.weight"), 0, 0.02 / 4),  # sqrt(2 * 8 layers)
        (("bias", "beta"), 0, 0),
        (("gamma",), 1, 0),
    ],
    ids=str,
)
def test_initial_weights_match_gpt_2(started, ends, mean, std):
    """Normal numbers with std 0.02. Those of residual layers, two per block, are scaled by
    1 / sqrt(N); N is the number of residual layers (Radford et al. 2019, section 2.3)."""
    found = [item for item in started.parameters if item.name.endswith(ends)]
    assert {end for end in ends if any(item.name.endswith(end) for item in found)} == {*ends}
    for item in found:
        draws = item.value.size
        assert item.value.mean() == pytest.approx(mean, abs=5 * std / sqrt(draws)), item.name
        assert item.value.std() == pytest.approx(std, rel=5 / sqrt(2 * draws)), item.name


def test_every_parameter_kind_has_a_known_initialization(started):
    known = ("token", "position", "table", "weight", "bias", "beta", "gamma")
    assert all(item.name.endswith(known) for item in started.parameters)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_matrices_decay_and_vectors_do_not(optimizer):
    """If the gradient is 0, a matrix is multiplied by 1 - lr decay."""
    config = config_of(f"optimizer={optimizer} weight_decay=0.25 tied=false")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.parameters.value += 1
        before = {item.name: item.value.copy() for item in trainer.parameters}
        trainer.optimizer.update(0.5, 1.0)
        return [(item.value / before[item.name], item.value.ndim) for item in trainer.parameters]

    for ratio, dimensions in run({}, rank)[0]:
        np.testing.assert_allclose(ratio, {1: 1, 2: 0.875}[dimensions], rtol=1e-12)
