"""Optimizer kernels: gradient norms, updates of flat arrays, and orthogonalization of matrices.

Orthogonalization applies Newton-Schulz iterations, which approximate the nearest matrix whose
singular values are all 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for, slices
from hpc3d.ops.product import product

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty
    from hpc3d.cuda.gpu import Gpu

_CHUNK = 1 << 14  # elements per chunk; a chunk stays in the cache during its update
_SQUARES = 1 << 20  # elements per chunk of `sum_of_squares`
# Coefficients of x -> a x + b x^3 + c x^5 (https://kellerjordan.github.io/posts/muon).
# Five iterations map singular values in (0, 1] to values between about 0.7 and 1.2.
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7  # minimum divisor, so that a zero matrix stays zero


@composite
def sum_of_squares(flat: Array, parts: Iterable[slice]) -> Any:
    """Return the sum of squares over slices of a flat array."""
    shares = [flat[part] for part in parts]
    return sum((float(np.dot(share, share)) for share in shares), 0.0)


@sum_of_squares.threads
def _(flat, parts):
    ranges = [flat[part] for part in parts]
    chunks = [each[at] for each in ranges for at in slices(each.size, _SQUARES)]
    sums = np.empty(len(chunks))

    def block(number):
        sums[number] = np.dot(chunks[number], chunks[number])

    parallel_for(block, range(len(chunks)))
    return float(sums.sum())


@sum_of_squares.cuda
def _(gpu, flat, parts):
    total = gpu.empty((1,), np.float64)
    total.fill(0)
    for part in _joined_slices(parts):
        grad = flat[part]
        blocks = gpu.blocks("sum_squares", grad.size)
        partial = gpu.empty((blocks,), np.float32)
        gpu.launch("sum_squares", 1, grad.size, grad=grad, partial=partial, size=grad.size)
        sum_parts(gpu, partial, total)
    return total


def _joined_slices(parts: Iterable[slice]) -> list[slice]:
    joined: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            part = slice(joined.pop().start, part.stop)
        if part.start < part.stop:
            joined.append(part)
    return joined


@composite
def step_by_sign(value: Array, grad: Array, rate: float) -> None:
    """Subtract rate * sign(gradient) from each value."""
    value -= rate * np.sign(grad)


step_by_sign.cuda_as_numpy()


def sum_parts(gpu: Gpu, partial: Array, total: Array | None = None) -> Array:
    """Sum the float32 vector `partial` [n]; if `total` is given, add the sum to `total`."""
    add, total = total is not None, gpu.empty((1,), np.float64) if total is None else total
    given = {"partial": partial, "total": total, "parts": partial.size, "add": add}
    gpu.launch("sum_parts", 1, partial.size, **given)
    return total


@primitive
def adamw(
    value: Array,
    master: Array | None,
    grad: Array,
    first: Array,
    second: Array,
    constants: Mapping[str, float],
    factors: Sequence[float],
) -> None:
    """Apply an AdamW update to a slice of values and its state, in cache-sized chunks."""
    scale, rate, root, keep = factors
    beta1, beta2, epsilon = (constants[key] for key in ("beta1", "beta2", "epsilon"))
    exact = value if master is None else master

    def block(part):
        w, g, m, v = exact[part], grad[part] * scale, first[part], second[part]
        m *= beta1
        m += g * (1 - beta1)
        v *= beta2
        g *= g
        g *= 1 - beta2
        v += g
        np.sqrt(v, out=g)
        g *= root
        g += epsilon
        np.divide(m, g, out=g)
        g *= rate
        w *= keep
        w -= g
        if master is not None:
            value[part] = w

    parallel_for(block, slices(value.size, _CHUNK))


adamw.narrow(adamw.numpy)
adamw.abstract(lambda value, *rest: None)


@adamw.cuda
def _(gpu, value, master, grad, first, second, constants, factors):
    given = {"first": first, "second": second, "factors": gpu.bring(np.float32(factors))}
    given |= {"size": grad.size, **constants}
    gpu.launch("adamw", 1, grad.size, value=value, master=master, grad=grad, **given)


@primitive
def lion(
    value: Array,
    master: Array | None,
    grad: Array,
    momentum: Array,
    constants: Mapping[str, float],
    factors: Sequence[float],
) -> None:
    """Apply a Lion update to a slice of values and its momentum, in cache-sized chunks."""
    scale, rate, keep = factors
    beta1, beta2 = constants["beta1"], constants["beta2"]
    exact = value if master is None else master

    def block(part):
        w, g, m = exact[part], grad[part] * scale, momentum[part]
        step = m * beta1
        step += g * (1 - beta1)
        np.sign(step, out=step)
        step *= rate
        w *= keep
        w -= step
        m *= beta2
        g *= 1 - beta2
        m += g
        if master is not None:
            value[part] = w

    parallel_for(block, slices(value.size, _CHUNK))


lion.narrow(lion.numpy)
lion.abstract(lambda value, *rest: None)


@lion.cuda
def _(gpu, value, master, grad, momentum, constants, factors):
    given = {"momentum": momentum, "factors": gpu.bring(np.float32(factors))}
    given |= {"size": grad.size, **constants}
    gpu.launch("lion", 1, grad.size, value=value, master=master, grad=grad, **given)


@primitive
def descend(value: Array, master: Array | None, grad: Array, factors: Sequence[float]) -> None:
    """Update w = keep * w - rate * grad in cache-sized chunks."""
    rate, keep = factors
    exact = value if master is None else master

    def block(part):
        w = exact[part]
        w *= keep
        w -= grad[part] * rate
        if master is not None:
            value[part] = w

    parallel_for(block, slices(value.size, _CHUNK))


descend.narrow(descend.numpy)
descend.abstract(lambda value, *rest: None)


@descend.cuda
def _(gpu, value, master, grad, factors):
    given = {"factors": gpu.bring(np.float32(factors)), "size": grad.size}
    gpu.launch("descend", 1, grad.size, value=value, master=master, grad=grad, **given)


@composite
def orthogonalize(matrix: Array, empty: Empty) -> None:
    """Overwrite X[m, n] = U S V^T with an approximation of U V^T (Newton-Schulz iteration).

    X is first divided by its Frobenius norm, and transposed if m > n. Each of five iterations
    computes A = X X^T and X = a X + (b A + c A A) X.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    x, moved = (empty(wide.shape, wide.dtype) for _ in range(2))
    x[...] = wide
    gram, square = (empty((len(x), len(x)), x.dtype) for _ in range(2))
    np.multiply(x, x, out=moved)
    x /= np.maximum(np.sqrt(moved.sum()), SMALLEST_NORM)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        product(x, x.T, gram)
        product(gram, gram, square)
        square *= c
        gram *= b
        square += gram
        product(square, x, moved)
        x *= a
        x += moved
    wide[...] = x


orthogonalize.cuda_as_numpy()


def orthogonalize_flops(shape: tuple[int, int]) -> int:
    """Return the FLOPs of the matrix products in `orthogonalize` for a matrix of this shape."""
    short = min(shape)
    return NEWTON_SCHULZ_STEPS * (4 * prod(shape) * short + 2 * short**3)


@composite
def nesterov(grad: Array, momentum: Array, out: Array, scale: float, beta: float) -> None:
    """Apply Nesterov momentum: g = scale * grad; m = b m + (1 - b) g; out = b m + (1 - b) g."""
    np.multiply(grad, scale * (1 - beta), out=out)
    momentum *= beta
    momentum += out
    out += beta * momentum


nesterov.cuda_as_numpy()
