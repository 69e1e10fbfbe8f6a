"""Random numbers per sample: distributions, and independence of the requested rows."""

from math import erf

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.execution.random_numbers import Draw, RandomNumbers

COUNT = 20_000
WHOLE = Draw(seed=1, step=2, first=0, samples=COUNT)


def numbers(draw=WHOLE, dim=0, dtype=torch.float64, name="noise"):
    return RandomNumbers(name, draw, dim, dtype)


def distance(values, cumulative):
    """Return the Kolmogorov-Smirnov statistic times sqrt(n): below 1.95 in 99.9 % of samples."""
    values = np.sort(values.double().numpy().ravel())
    exact, count = np.array([cumulative(each) for each in values]), len(values)
    above = np.arange(1, count + 1) / count - exact
    below = exact - np.arange(count) / count
    return max(above.max(), below.max()) * count**0.5


DISTRIBUTIONS = {
    "uniform": (lambda z: z, 1 / 2, 1 / 12),
    "normal": (lambda z: (1 + erf(z / 2**0.5)) / 2, 0, 1),
    "exponential": (lambda z: 1 - np.exp(-z), 1, 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_have_their_distribution(name):
    cumulative, mean, variance = DISTRIBUTIONS[name]
    found = getattr(numbers(), name)([COUNT, 1])
    assert distance(found, cumulative) < 1.95
    assert abs(float(found.mean()) - mean) < 5 * (variance / COUNT) ** 0.5
    assert abs(float(found.var()) / variance - 1) < 0.07


def test_integers_and_events_have_their_probabilities():
    counts = torch.bincount(numbers().integers(-2, 3, [COUNT]) + 2)
    assert len(counts) == 5
    chi_squared = float(((counts - COUNT / 5) ** 2 / (COUNT / 5)).sum())
    assert chi_squared < 18.5  # 4 degrees of freedom, 1 of 1000
    for chance in (0.2, torch.full((COUNT,), 0.2)):
        happened = float(numbers().happens(chance, [COUNT]).double().mean())
        assert abs(happened - 0.2) < 5 * (0.16 / COUNT) ** 0.5
    assert not numbers().happens(0.0, [COUNT]).any() and numbers().happens(1.0, [COUNT]).all()
    assert not numbers().kept(1.0, [COUNT]).any() and numbers().kept(0.0, [COUNT]).all()


@pytest.mark.parametrize("kind", [*DISTRIBUTIONS, "integers"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_numbers_of_a_sample_do_not_depend_on_other_samples(kind, dim, rows):
    def made(first, samples):
        shape = [4, 4]
        shape[dim] = samples * rows
        bounds = (0, 1000) if kind == "integers" else ()
        return getattr(numbers(Draw(1, 2, first, samples), dim), kind)(*bounds, shape)

    whole = made(0, 12)
    assert len(whole.unique()) > 40
    for first, samples in [(0, 5), (5, 6), (11, 1)]:
        part = whole.narrow(dim, first * rows, samples * rows)
        assert made(first, samples).equal(part)


def test_numbers_without_a_batch_dimension_are_the_same_for_all_samples():
    first = numbers(Draw(1, 2, 0, 5), None).normal([3])
    assert numbers(Draw(1, 2, 5, 2), None).normal([3]).equal(first)
    assert numbers(Draw(1, 2, 5, 2), None).normal([]).dim() == 0
    assert not numbers(Draw(1, 3, 0, 5), None).normal([3]).equal(first)


def test_name_seed_and_step_change_the_numbers():
    first = numbers().normal([8])
    assert numbers().normal([8]).equal(first)
    for other in (numbers(WHOLE._replace(seed=2)), numbers(WHOLE._replace(step=3))):
        assert (other.normal([8]) != first).all()
    assert (numbers(name="other").normal([8]) != first).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_are_exact_in_their_type_and_less_than_1(dtype):
    found = numbers(dtype=dtype).uniform([COUNT])
    assert found.to(dtype).double().equal(found)
    assert float(found.to(dtype).max()) < 1 and float(found.min()) >= 0


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_exponential_numbers_are_greater_than_0(bits, monkeypatch):
    """Gumbel noise is -log of them."""
    draws = np.full(4, bits, np.uint64)
    place = "hpc3d.partition.execution.random_numbers.philox_draws"
    monkeypatch.setattr(place, lambda key, first, count: draws)
    found = numbers().exponential([4])
    assert (found > 0).all() and found.isfinite().all()
