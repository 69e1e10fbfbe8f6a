"""Sampling as in transformers; random numbers depend only on seed, sample and position."""

import numpy as np
import pytest
from scipy import stats

from hpc3d.console.exit_codes import BadData
from hpc3d.generation.sampling import Sampling

LOGITS = np.array([0.5, 2.0, -1.0, 1.0, 2.0, 0.0])


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def test_temperature_0_takes_the_largest_logit():
    assert Sampling(temperature=0, top_k=3).draw(np.array([0.0, 3.0, 2.9]), 7, 7) == 1


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_logits_are_reported_as_divergence(odd, temperature):
    with pytest.raises(BadData, match="diverged"):
        Sampling(temperature=temperature).draw(np.array([0.0, odd, 2.9]), 0, 0)


def test_logits_are_divided_by_the_temperature():
    found = Sampling(temperature=0.5).probabilities(LOGITS)
    np.testing.assert_allclose(found, softmax(2 * LOGITS), rtol=1e-12)


def test_top_k_keeps_ties_with_the_last_logit():
    found = Sampling(top_k=1).probabilities(LOGITS)
    np.testing.assert_allclose(found, [0, 0.5, 0, 0, 0.5, 0])
    kept = Sampling(top_k=3).probabilities(LOGITS)
    assert [*np.flatnonzero(kept)] == [1, 3, 4]
    np.testing.assert_allclose(kept[kept > 0], softmax(LOGITS[[1, 3, 4]]))
    assert np.array_equal(Sampling(top_k=99).probabilities(LOGITS), softmax(LOGITS))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    for p, kept in [(0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (0, [1])]:
        found = Sampling(top_p=p).probabilities(logits)
        assert [*np.flatnonzero(found)] == kept
        assert found.sum() == pytest.approx(1)


def test_top_p_applies_after_temperature_and_top_k():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    found = Sampling(temperature=2.0, top_k=3, top_p=0.6).probabilities(logits)
    assert [*np.flatnonzero(found)] == [1, 3]  # of roots 0.63, 0.45, 0.55: 0.39, 0.27, 0.34
    assert [*np.flatnonzero(Sampling(top_p=0.6).probabilities(logits))] == [1, 3]
    assert [*np.flatnonzero(Sampling(2.0, 3, 0.35).probabilities(logits))] == [1]


def test_sampled_token_frequencies_match_the_probabilities():
    how = Sampling(seed=5)
    drawn = [how.draw(LOGITS, sample, place) for sample in range(4) for place in range(1500)]
    counts = np.bincount(drawn, minlength=6)
    assert stats.chisquare(counts, 6000 * softmax(LOGITS)).pvalue > 1e-3


def test_draws_depend_only_on_seed_sample_and_position():
    def row(seed, sample):
        return [Sampling(seed=seed).draw(np.zeros(1000), sample, place) for place in range(8)]

    assert row(1, 0) == row(1, 0)
    rows = [*row(1, 0), *row(1, 1), *row(2, 0)]
    assert len({*rows}) > 20


@pytest.mark.parametrize(("bits", "token"), [(0, 10), (2**64 - 1, 289)])
def test_rounding_never_samples_a_token_of_probability_0(bits, token, monkeypatch):
    """Draws the lowest and the highest random number, with sums that do not round to 1."""
    monkeypatch.setattr(
        "hpc3d.generation.sampling.philox_draws", lambda *_: np.array([bits], np.uint64)
    )
    for seed in range(50):
        logits = np.random.default_rng(seed).normal(size=300)
        logits[:10] = logits[290:] = -np.inf
        assert Sampling().draw(logits, 0, 0) == token
