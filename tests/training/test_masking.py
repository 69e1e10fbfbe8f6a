"""Masked tokens: shares of each kind; masks depend only on the seed and the step."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hpc3d.config.input_file import Config
from hpc3d.data.batches import Batches
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.training.masking import MaskedBatches, Masking, batches_of, validation_of
from tests.data.test_batches import Numbers

SEQUENCE, BATCH, VOCABULARY, MASK = 100, 300, 50, 49


class Text(Numbers):
    """Text in which token i is i modulo 49, so that all but [MASK] are equally frequent."""

    def read(self, start, stop):
        return super().read(start, stop) % (VOCABULARY - 1)


TEXT = Text(SEQUENCE * BATCH)


def masked(step=0, seed=7, padding=None, batch=BATCH):
    return MaskedBatches(TEXT, SEQUENCE, batch, seed, Masking(VOCABULARY, MASK, padding)).batch(
        step
    )


def whole(step=0):
    """Return the batch before masking, which contains the full text."""
    numbers = MaskedBatches(TEXT, SEQUENCE, BATCH, 7, Masking(VOCABULARY, MASK))
    return super(MaskedBatches, numbers).batch(step)[0]


def near(share, expected, count):
    """Return True if a fraction is within five standard deviations of the expected one."""
    return abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5


def test_masking_shares_match_bert():
    inputs, targets = masked()
    text, chosen = whole(), targets != IGNORE
    assert inputs.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(targets[chosen], text[chosen])
    np.testing.assert_array_equal(inputs[~chosen], text[~chosen])
    count = int(chosen.sum())
    assert near(count / chosen.size, 0.15, chosen.size)
    hidden, kept = (inputs == MASK)[chosen], (inputs == text)[chosen]
    assert near(hidden.mean(), 0.8, count)
    assert near(kept.mean(), 0.1 + 0.1 / 49, count)  # one of 49 is replaced by itself
    other = inputs[chosen][~hidden & ~kept]
    assert len(np.unique(other)) == VOCABULARY - 1
    assert near((other < 7).mean(), 1 / 7, other.size)


def test_every_token_is_eventually_a_target():
    assert MaskedBatches(TEXT, SEQUENCE, BATCH, 7, Masking(VOCABULARY, MASK)).windows == [BATCH]
    chosen = sum((masked(step)[1] != IGNORE).astype(int) for step in range(80))
    assert chosen.min() > 0
    assert near(chosen.mean() / 80, 0.15, 80 * chosen.size)


def test_masking_depends_only_on_the_step():
    ahead = MaskedBatches(TEXT, SEQUENCE, BATCH, 7, Masking(VOCABULARY, MASK))
    ahead.batch(5)
    for found, expected in zip(ahead.batch(3), masked(3), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 8}])
def test_masks_differ_by_step_and_seed(other):
    same = (masked()[1] != IGNORE) == (masked(**other)[1] != IGNORE)
    assert near(same.mean(), 0.15**2 + 0.85**2, same.size)


def test_masking_is_stable_across_numpy_versions():
    """A run may be resumed with another NumPy version, so the masks must not change."""
    inputs, targets = MaskedBatches(TEXT, 8, 2, 1234, Masking(VOCABULARY, MASK, 3)).batch(0)
    assert np.argwhere(targets != IGNORE).tolist() == [[0, 0], [0, 7], [1, 2]]
    assert inputs.tolist() == [[49, 36, 37, 38, 39, 40, 41, 49], [14, 15, 49, 17, 18, 19, 20, 21]]


def test_padding_is_never_a_target_or_replacement():
    inputs, targets = masked(padding=3)
    text = whole()
    assert (targets[text == 3] == IGNORE).all() and (inputs[text == 3] == 3).all()
    assert not (inputs[text != 3] == 3).any()
    replaced = (targets != IGNORE) & (inputs != text) & (inputs != MASK)
    assert set(range(VOCABULARY - 1)) - {*inputs[replaced]} == {3}


@pytest.mark.parametrize("name", ["[MASK]", "<mask>"])
def test_mask_token_of_the_tokenizer_is_used(name):
    """In BERT's vocabulary, it is 103; other tokens are replaced by any token except this one."""
    config, text = Config(), Text(SEQUENCE * BATCH)
    text.json = json.dumps(
        {"added_tokens": [{"id": 1, "content": "a"}, {"id": 5, "content": name}]}
    )
    model = replace(config.model, kind="bert", vocabulary=VOCABULARY, sequence=SEQUENCE)
    inputs, targets = batches_of(replace(config, model=model), text).batch(0)
    chosen = targets != IGNORE
    count = int((chosen & (targets != 5)).sum())
    assert near((inputs == 5)[chosen & (targets != 5)].mean(), 0.8, count)
    assert set(inputs[chosen].tolist()) == set(range(VOCABULARY))


@pytest.mark.parametrize(("kind", "made"), [("gpt2", Batches), ("bert", MaskedBatches)])
def test_batch_type_follows_the_model_family(kind, made):
    config = Config()
    model = replace(config.model, kind=kind, vocabulary=VOCABULARY, padding=None)
    batches = batches_of(replace(config, model=model), TEXT)
    assert type(batches) is made
    tokens, targets = batches.batch(0)
    assert tokens.shape == targets.shape == (config.train.batch, model.sequence)
    assert (targets == IGNORE).any() == (kind == "bert")


def test_evaluation_masks_do_not_depend_on_the_seed():
    """Padding sequences of its last batch are excluded: 20 of the 192 sequences are real."""
    config, windows = Config(), 20
    model = replace(config.model, kind="bert", vocabulary=VOCABULARY)
    text = Text(windows * model.sequence + 1)
    one, other = (
        validation_of(replace(config, model=model, seed=seed), text).batch(0) for seed in (1, 2)
    )
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _, targets = one
    assert (targets[:windows] != IGNORE).any()
    assert (targets[windows:] == IGNORE).all()
