"""Newton-Schulz steps towards the nearest matrix whose singular values are 1."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import composite
from hpc3d.ops.product import product

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty

# Of x -> a x + b x^3 + c x^5, which brings singular values in (0, 1] to about 0.7 to 1.2 in five
# steps (Jordan et al., https://kellerjordan.github.io/posts/muon).
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_STEPS = 5
_SMALLEST = 1e-7  # norm that is divided by: a matrix of zeros stays one


@composite
def orthogonalize(matrix: Array, empty: Empty) -> None:
    """X[m, n] = U V^T, nearly, where X = U S V^T; in place.

    X / |X| is multiplied, five times, from its shorter side: with A = X X^T,
    X = a X + (b A + c A A) X.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    x, moved = (empty(wide.shape, wide.dtype) for _ in range(2))
    x[...] = wide
    gram, square = (empty((len(x), len(x)), x.dtype) for _ in range(2))
    np.multiply(x, x, out=moved)
    x /= np.maximum(np.sqrt(moved.sum()), _SMALLEST)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        product(x, x.T, gram)
        product(gram, gram, square)
        square *= c
        gram *= b
        square += gram
        product(square, x, moved)
        x *= a
        x += moved
    wide[...] = x


@orthogonalize.cuda
def _(gpu, matrix, empty):
    orthogonalize.numpy(matrix, empty)


def orthogonalize_flops(shape: tuple[int, int]) -> int:
    """Of the products of `orthogonalize`."""
    short = min(shape)
    return _STEPS * (4 * prod(shape) * short + 2 * short**3)


@composite
def nesterov(grad: Array, momentum: Array, out: Array, scale: float, beta: float) -> None:
    """g = scale grad;  m = b m + (1 - b) g;  out = b m + (1 - b) g, one more step ahead."""
    np.multiply(grad, scale * (1 - beta), out=out)
    momentum *= beta
    momentum += out
    out += beta * momentum


@nesterov.cuda
def _(gpu, grad, momentum, out, scale, beta):
    nesterov.numpy(grad, momentum, out, scale, beta)
