"""Norms compared with torch, and moments of full and split rows."""

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from hpc3d.arrays.pool import Pool
from hpc3d.ops.norm import (
    combine_moments,
    moments,
    norm,
    norm_grad,
    normalise,
    normalise_grad,
    normalise_sums,
    row_squares,
)

RNG = np.random.default_rng(7)
ROWS, COLUMNS, EPSILON = 5, 12, 1e-3
EMPTY = Pool().empty


class Case:
    """Norm in torch with its arguments; for RMSNorm, beta is None."""

    def __init__(self, centred):
        self.x, self.dy, self.residual = RNG.normal(size=(3, ROWS, COLUMNS)) + 0.5
        self.gamma, beta = RNG.normal(size=(2, COLUMNS)) + 1
        self.beta = beta if centred else None
        leaves = [
            torch.tensor(each, requires_grad=True)
            for each in (self.x, self.gamma, self.beta)
            if each is not None
        ]
        function = layer_norm if centred else rms_norm
        y = function(leaves[0], (COLUMNS,), *leaves[1:], eps=EPSILON)
        self.y = y.detach().numpy()
        dx, dgamma, *dbeta = torch.autograd.grad(y, leaves, torch.tensor(self.dy))
        self.dx, self.dgamma = dx.numpy() + self.residual, dgamma.numpy()
        self.dbeta = dbeta[0].numpy() if centred else None


@pytest.fixture(params=[True, False], ids=["layer", "RMS"])
def case(request):
    return Case(request.param)


def same(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_norm_and_gradient_of_full_rows_match_torch(case, blocks):
    y, saved = norm(case.x, case.gamma, case.beta, EPSILON, EMPTY)
    same(y, case.y)
    dgamma, dbeta = np.ones(COLUMNS), None if case.beta is None else np.ones(COLUMNS)
    same(norm_grad(case.dy, saved, case.residual, dgamma, dbeta, EMPTY), case.dx)
    same(dgamma, case.dgamma + 1)
    same(dbeta, None if case.beta is None else case.dbeta + 1)


def test_norm_and_gradient_of_split_columns_match_torch(case, blocks):
    """Each rank has some of the columns."""
    parts = [slice(at, at + 4) for at in range(0, COLUMNS, 4)]
    x, dy, residual = (
        [np.ascontiguousarray(each[:, part]) for part in parts]
        for each in (case.x, case.dy, case.residual)
    )
    gamma = [case.gamma[part] for part in parts]
    beta = [case.beta if case.beta is None else case.beta[part] for part in parts]
    if case.beta is None:
        mean, squares = None, sum(row_squares(each) for each in x)
    else:
        mean, squares = combine_moments(np.stack([moments(each) for each in x]), 4)
    rstd = 1 / np.sqrt(squares / COLUMNS + EPSILON)
    done = [
        normalise(part, mean, rstd, *vectors, np.empty_like(part), np.empty_like(part))
        for part, *vectors in zip(x, gamma, beta, strict=True)
    ]
    same(np.hstack([y for _, y in done]), case.y)
    given = [(n, *rest) for (n, _), *rest in zip(done, dy, gamma, strict=True)]
    summed = [normalise_sums(*each, case.beta is not None) for each in given]
    means = sum(sums for sums, _, _ in summed) / COLUMNS
    dx = [
        normalise_grad(n, rstd, d, g, means, r, np.empty_like(n))
        for (n, d, g), r in zip(given, residual, strict=True)
    ]
    same(np.hstack(dx), case.dx)
    same(np.hstack([dgamma for _, dgamma, _ in summed]), case.dgamma)
    if case.beta is not None:
        same(np.hstack([dbeta for *_, dbeta in summed]), case.dbeta)


def test_moments_avoid_cancellation(blocks):
    """The mean is 1e8 and the deviation 1, so E[x^2] - E[x]^2 would lose all digits."""
    x = RNG.normal(size=(50, 64)) + 1e8
    mean, squares = moments(x)
    exact = x - x.mean(1, keepdims=True)
    np.testing.assert_allclose(mean, x.mean(1))
    np.testing.assert_allclose(squares, (exact**2).sum(1), rtol=1e-6)


def test_combined_moments_of_column_blocks_match_full_rows():
    x = RNG.normal(size=(5, 12)) + 1e6
    parts = np.stack([moments(np.ascontiguousarray(x[:, at : at + 4])) for at in (0, 4, 8)])
    for ours, whole in zip(combine_moments(parts, 4), moments(x), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-9)
