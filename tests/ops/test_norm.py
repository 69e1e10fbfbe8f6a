"""Moments of rows, whole and in parts."""

import numpy as np

from hpc3d.ops.norm import combine_moments, moments

RNG = np.random.default_rng(7)


def test_moments_have_no_cancellation(blocks):
    """Mean 1e8, deviation 1: E[x^2] - E[x]^2 would leave nothing of it."""
    x = RNG.normal(size=(50, 64)) + 1e8
    mean, squares = moments(x)
    exact = x - x.mean(1, keepdims=True)
    np.testing.assert_allclose(mean, x.mean(1))
    np.testing.assert_allclose(squares, (exact**2).sum(1), rtol=1e-6)


def test_moments_of_parts_are_those_of_the_whole():
    x = RNG.normal(size=(5, 12)) + 1e6
    parts = np.stack([moments(np.ascontiguousarray(x[:, at : at + 4])) for at in (0, 4, 8)])
    for ours, whole in zip(combine_moments(parts, 4), moments(x), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-9)
