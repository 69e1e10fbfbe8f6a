"""The learning rate over the steps of a run, also if the run is extended."""

from dataclasses import replace
from math import cos, pi, sqrt

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from hpc3d.checkpoints.resume import rate_notes, with_decay_steps
from hpc3d.config.input_file import Config, TrainConfig
from hpc3d.training.optimizers.optimizer import learning_rate

TRAIN = TrainConfig(steps=6, warmup=2, learning_rate=1.0)
LONGER = replace(TRAIN, steps=10, decay_steps=6)


def curve(train, steps):
    return [learning_rate(train, step) for step in range(steps)]


def cosine(part):
    return 0.1 + 0.9 * (1 + cos(pi * part)) / 2


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("cosine", [0.5, 1, 1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("wsd", [0.5, 1, 1, 1, 1, 0.1 + 0.9 * (1 - sqrt(1 / 2))]),
        ("wsd-linear", [0.5, 1, 1, 1, 1, 0.55]),
    ],
)
def test_learning_rate_decays_once(decay, rates):
    """Without decay_steps, it decays over the whole run; afterwards, it stays constant."""
    train = replace(TRAIN, decay=decay)
    last = 1 if decay == "constant" else 0.1
    assert curve(train, 6) == pytest.approx(rates, rel=1e-12)
    extended = curve(replace(train, steps=10, decay_steps=6), 12)
    assert extended == pytest.approx([*rates, *[last] * 6], rel=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_learning_rate_decays_to_its_minimum(decay):
    train = replace(TRAIN, decay=decay, min_learning_rate=0.25, cooldown=3)
    found = curve(train, 8)
    assert found[6:] == [0.25, 0.25] and min(found[1:6]) > 0.25
    assert found[2:4] == [1, 1] if decay == "wsd" else found[3] < 1
    none = replace(train, min_learning_rate=0.0)
    assert curve(none, 7)[-1] == 0
    assert curve(none, 6)[2:] == pytest.approx([(each - 0.25) / 0.75 for each in found[2:6]])


@pytest.mark.parametrize(("cooldown", "stable"), [(1, 19), (5, 15), (18, 2), (None, 16)])
def test_learning_rate_is_stable_until_the_cooldown(cooldown, stable):
    found = curve(replace(TRAIN, steps=20, decay="wsd", cooldown=cooldown), 21)
    assert found[1 : stable + 1] == [1] * stable and found[stable + 1] < 1
    assert found[-1] == pytest.approx(0.1)


def test_learning_rate_matches_torch():
    """Compared with torch's cosine and linear schedulers; their step 0 is the end of warm-up."""
    weight = torch.zeros(1, requires_grad=True)
    ends = {
        "cosine": {"T_max": 4, "eta_min": 0.1},
        "linear": {"end_factor": 0.1, "total_iters": 4},
    }
    for decay, how in ends.items():
        sgd = torch.optim.SGD([weight], lr=1.0)
        kind = CosineAnnealingLR if decay == "cosine" else LinearLR
        scheduler = kind(sgd, **({"start_factor": 1.0} if kind is LinearLR else {}), **how)
        found = []
        for _ in range(5):
            found += scheduler.get_last_lr()
            sgd.step()
            scheduler.step()
        assert curve(replace(TRAIN, decay=decay), 7)[2:] == pytest.approx(found, rel=1e-12)


def test_learning_rate_may_decay_over_more_steps_than_the_run():
    longer = replace(TRAIN, steps=20)
    assert curve(replace(TRAIN, decay_steps=20), 6) == curve(longer, 6) != curve(TRAIN, 6)


def test_extended_warmup_only_run_decays_immediately():
    config = with_decay_steps(replace(Config(), train=replace(TRAIN, steps=1)))
    assert config.train.decay_steps == 2
    extended = replace(config.train, steps=4)
    assert curve(extended, 4) == pytest.approx([0.5, 1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("asked", "begun", "steps"),
    [
        (TRAIN, None, 6),  # a run that begins
        (replace(TRAIN, decay_steps=30), None, 30),
        (LONGER, TRAIN, 6),
        (replace(TRAIN, steps=10), TRAIN, 6),  # of a version without the key
        (replace(TRAIN, steps=10), replace(TRAIN, decay_steps=8), 8),  # with an input file
        (replace(TRAIN, steps=10, decay_steps=10), TRAIN, 10),
    ],
)
def test_decay_steps_are_fixed_when_a_run_starts(asked, begun, steps):
    assert with_decay_steps(replace(Config(), train=asked), begun).train.decay_steps == steps


def test_warmup_beyond_the_decay_is_rejected():
    with pytest.raises(ValueError, match=r"^train.decay_steps = 6 .* train.warmup = 7$"):
        with_decay_steps(replace(Config(), train=replace(TRAIN, warmup=7)), TRAIN)


STAYS = (
    "the learning rate decays over train.decay_steps = 6; from step {} it stays at its minimum, "
    "1.000e-01; to decay over all steps, set --train.decay_steps 10"
)
OTHER = "the learning rate schedule has changed: {} in step 6, {} in step 9"
AGAIN = OTHER.format("5.500e-01 instead of 1.000e-01", "1.343e-01 instead of 1.000e-01")
LAST = "the learning rate schedule has changed: 1.000e+00 instead of 2.318e-01 in step 5"
TEN = replace(LONGER, decay_steps=10)


@pytest.mark.parametrize(
    ("begun", "train", "done", "lines"),
    [
        (TRAIN, LONGER, 4, [STAYS.format(6)]),
        (TRAIN, LONGER, 6, [STAYS.format(6)]),
        (LONGER, LONGER, 8, [STAYS.format(8)]),
        (TRAIN, TEN, 6, [AGAIN]),
        (TRAIN, replace(LONGER, steps=6), 4, []),
        (replace(TRAIN, decay_steps=10), TEN, 4, []),
        (TEN, replace(TEN, min_learning_rate=0.1, steps=8), 4, []),
        (TRAIN, replace(TRAIN, decay="constant", cooldown=3), 5, [LAST]),
        (replace(TEN, decay="constant"), replace(LONGER, decay="constant", steps=12), 6, []),
    ],
)
def test_resumed_run_reports_its_learning_rate(begun, train, done, lines):
    assert [*rate_notes(begun, train, done)] == lines


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 2.0),
        ("warmup", 3),
        ("min_learning_rate", 0.0),
        ("decay", "linear"),
        ("cooldown", 3),
        ("decay_steps", 11),
    ],
)
def test_every_changed_learning_rate_key_is_reported(key, value):
    """Tests also a key that the run did not set; 8 of 10 steps are done, 2 of them cool down."""
    begun = replace(TEN, decay="wsd")
    changed = replace(begun, **{key: value})
    (line,) = rate_notes(begun, changed, 8)
    now, was = (learning_rate(train, 8) for train in (changed, begun))
    assert f" {now:.3e} instead of {was:.3e} in step 8" in line
