"""LayerNorm and RMSNorm, for complete rows and for rows whose features are sharded over ranks.

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) is LayerNorm with mean 0 and without beta:
`mean` and `beta` are `None`, and only one of the two row sums is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import wide, widened
from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for
from hpc3d.ops.rows import add_strips, in_float32, row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty
    from hpc3d.cuda.gpu import Gpu


@composite
def norm(
    x: Array, gamma: Array, beta: Array | None, epsilon: float, empty: Empty
) -> tuple[Array, tuple[Array, Any, Array]]:
    """Compute y = (x - mean) / sqrt(var + epsilon) gamma + beta for complete rows.

    Returns y and the `saved` argument of `norm_grad`.
    """
    mean, squares = (None, row_squares(x)) if beta is None else moments(x)
    rstd = 1 / np.sqrt(squares / x.shape[1] + epsilon)
    n, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    normalise(x, mean, rstd, gamma, beta, n, y)
    return y, (n, rstd, gamma)


@norm.threads
def _(x, gamma, beta, epsilon, empty):
    """Read x once: compute the moments of a block of rows, and normalize it in the cache."""
    n, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    rstd, average = np.empty(len(x), x.dtype), np.full(x.shape[1], 1 / x.shape[1], x.dtype)

    def block(rows):
        centred, normal, scaled = x[rows], n[rows], y[rows]
        if beta is not None:
            centred = np.subtract(centred, (centred @ average)[:, None], out=normal)
        squares = np.einsum("ij,ij->i", centred, centred)
        rstd[rows] = 1 / np.sqrt(squares / x.shape[1] + epsilon)
        np.multiply(centred, rstd[rows, None], out=normal)
        np.multiply(normal, gamma, out=scaled)
        if beta is not None:
            scaled += beta

    parallel_for(block, row_blocks(x))
    return y, (n, rstd, gamma)


@norm.cuda
def _(gpu, x, gamma, beta, epsilon, empty):
    """Compute the norm; save x and, per row, mean and 1 / std instead of the normalized rows."""
    y = empty(x.shape, x.dtype)
    rstd = gpu.empty(x.shape[:1], np.float32)
    mean = None if beta is None else gpu.empty(x.shape[:1], np.float32)
    given = {"mean": mean, "rstd": rstd, "columns": x.shape[1], "epsilon": epsilon}
    vectors = {"gamma": gamma, "beta": beta}
    gpu.launch("add_norm", *x.shape, x=x, r=None, s=None, y=y, **vectors, **given)
    return y, (x, (mean, rstd), gamma)


@composite
def norm_grad(
    dy: Array,
    saved: tuple[Array, Any, Array],
    residual: Array | None,
    dgamma: Array,
    dbeta: Array | None,
    empty: Empty,
) -> Array:
    """Return dx, plus `residual` if given, using the values saved by `norm`.

    The gradients of gamma and beta are added to `dgamma` and `dbeta`.
    """
    n, rstd, gamma = saved
    sums, *vectors = normalise_sums(n, dy, gamma, dbeta is not None)
    for total, vector in zip((dgamma, dbeta), vectors, strict=True):
        if total is not None:
            total += vector
    means = sums / n.shape[1]
    return normalise_grad(n, rstd, dy, gamma, means, residual, empty(n.shape, n.dtype))


@norm_grad.threads
def _(dy, saved, residual, dgamma, dbeta, empty):
    """Read n and dy once: compute the sums of a block of rows, and its gradient in the cache."""
    n, rstd, gamma = saved
    dx, blocks = empty(n.shape, n.dtype), row_blocks(n)
    ones, averages = np.ones(len(n), n.dtype), gamma / n.shape[1]
    totals = [each for each in (dgamma, dbeta) if each is not None]
    vectors = np.empty((len(totals), len(blocks), n.shape[1]), n.dtype)

    def block(each):
        number, rows = each
        d, normal, grad = dy[rows], n[rows], dx[rows]
        product = np.multiply(d, normal, out=grad)
        np.matmul(ones[rows], product, out=vectors[0, number])
        means = product @ averages
        np.multiply(d, gamma, out=grad)
        if dbeta is not None:
            np.matmul(ones[rows], d, out=vectors[1, number])
            grad -= (d @ averages)[:, None]
        grad -= normal * means[:, None]
        grad *= rstd[rows, None]
        if residual is not None:
            grad += residual[rows]

    parallel_for(block, [*enumerate(blocks)])
    for total, parts in zip(totals, vectors, strict=True):
        total += parts.sum(0)
    return dx


@norm_grad.cuda
def _(gpu, dy, saved, residual, dgamma, dbeta, empty):
    x, (mean, rstd), gamma = saved
    dx = empty(x.shape, x.dtype)
    rows = {"mean": mean, "rstd": rstd, "dy": dy}
    given = {"gamma": gamma, "residual": residual, "dx": dx, "columns": x.shape[1]}
    gpu.launch("norm_grad", *x.shape, s=x, **rows, **given)
    _add_columns(gpu, x, rows, dgamma, dbeta, add=True)
    return dx


@primitive
def moments(x: Array) -> Array:
    """Return the mean and the sum of squared deviations of every row, [2, rows].

    The deviations are summed in a second pass, because E[x^2] - E[x]^2 loses precision.
    """
    result = np.empty((2, x.shape[0]), wide(x.dtype))
    average = np.full(x.shape[1], 1 / x.shape[1], result.dtype)

    def block(rows):
        mean = np.matmul(x[rows], average, out=result[0, rows])
        centred = x[rows] - mean[:, None]
        np.einsum("ij,ij->i", centred, centred, out=result[1, rows])

    parallel_for(block, row_blocks(x))
    return result


moments.narrow(moments.numpy)
moments.states("mn -> .m", sums=False)


@moments.abstract
def _(x):
    return x.like((2, x.shape[0]), wide(x.dtype))


@moments.cuda
def _(gpu, x):
    result = gpu.empty((2, x.shape[0]), np.float32)
    gpu.launch("moments", *x.shape, x=x, result=result, columns=x.shape[1])
    return result


@primitive
def row_squares(x: Array) -> Array:
    """Return the sum of squares of every row, [rows]."""
    result = np.empty(x.shape[0], wide(x.dtype))

    def block(rows):
        np.einsum("ij,ij->i", x[rows], x[rows], out=result[rows])

    parallel_for(block, row_blocks(x))
    return result


row_squares.narrow(row_squares.numpy)
row_squares.states("mn -> m")


@row_squares.abstract
def _(x):
    return x.like(x.shape[:1], wide(x.dtype))


@row_squares.cuda
def _(gpu, x):
    result = gpu.empty(x.shape[:1], np.float32)
    gpu.launch("row_squares", *x.shape, x=x, result=result, columns=x.shape[1])
    return result


@primitive
def combine_moments(parts: Array, count: int) -> tuple[Array, Array]:
    """Combine the moments of g ranks, `parts` [g, 2, rows], each taken over `count` elements.

    Chan, Golub and LeVeque 1979: M2 = sum M2_i + count sum (mean_i - mean)^2.
    """
    means, squares = parts[:, 0], parts[:, 1]
    mean = means.mean(0)
    spread = means - mean
    return mean, squares.sum(0) + count * np.einsum("gi,gi->i", spread, spread)


combine_moments.abstract(lambda parts, count: parts[0])


@combine_moments.cuda
def _(gpu, parts, count):
    ranks, _, rows = parts.shape
    result = gpu.empty((2, rows), np.float32)
    given = {"ranks": ranks, "rows": rows, "count": count}
    gpu.launch("combine_moments", rows, 1, parts=parts, result=result, **given)
    return result[0], result[1]


@primitive
def normalise(
    x: Array,
    mean: Array | None,
    rstd: Array,
    gamma: Array,
    beta: Array | None,
    n: Array,
    y: Array,
) -> tuple[Array, Array]:
    """Compute n = (x - mean) rstd and y = n gamma + beta."""

    def block(rows):
        centred = x[rows] if mean is None else np.subtract(x[rows], mean[rows, None], out=n[rows])
        np.multiply(centred, rstd[rows, None], out=n[rows])
        np.multiply(n[rows], gamma, out=y[rows])
        if beta is not None:
            y[rows] += beta

    parallel_for(block, row_blocks(x))
    return n, y


@normalise.narrow
def _(x, mean, rstd, gamma, beta, n, y):
    gamma, beta = widened((gamma, beta))

    def block(rows, *blocks):
        centre = None if mean is None else mean[rows]
        normalise(widened(x[rows]), centre, rstd[rows], gamma, beta, *blocks)

    in_float32(block, n, y)
    return n, y


normalise.abstract(lambda x, mean, rstd, gamma, beta, n, y: (n, y))
normalise.states("mn m m n n mn mn")


@normalise.cuda
def _(gpu, x, mean, rstd, gamma, beta, n, y):
    given = {"gamma": gamma, "beta": beta, "n": n, "y": y, "columns": x.shape[1]}
    gpu.launch("normalise", *x.shape, x=x, mean=mean, rstd=rstd, **given)
    return n, y


@primitive
def normalise_sums(
    n: Array, dy: Array, gamma: Array, centred: bool = True
) -> tuple[Array, Array, Array | None]:
    """Return row sums [1 or 2, rows], dgamma and dbeta for a norm's backward pass.

    With dn = dy gamma, the row sums are the sums of dn (if `centred`) and of dn n over features.
    dgamma and dbeta are the sums of dy n and of dy over rows.
    """
    real, blocks = wide(n.dtype), row_blocks(n)
    sums, ones = np.empty((1 + centred, n.shape[0]), real), np.ones(n.shape[0], real)
    vectors = np.empty((1 + centred, len(blocks), n.shape[1]), real)

    def block(each):
        number, rows = each
        d, one = dy[rows], ones[rows]
        product = d * n[rows]
        np.matmul(product, gamma, out=sums[-1, rows])
        np.matmul(one, product, out=vectors[0, number])
        if centred:
            np.matmul(d, gamma, out=sums[0, rows])
            np.matmul(one, d, out=vectors[1, number])

    parallel_for(block, [*enumerate(blocks)])
    dgamma, dbeta = vectors[0].sum(0), vectors[1].sum(0) if centred else None
    return sums, dgamma, dbeta


normalise_sums.narrow(normalise_sums.numpy)
normalise_sums.states("mn mn n -> .m n n")


@normalise_sums.abstract
def _(n, dy, gamma, centred=True):
    real = wide(n.dtype)
    sums, dgamma = n.like((1 + centred, n.shape[0]), real), n.like(gamma.shape, real)
    return sums, dgamma, n.like(gamma.shape, real) if centred else None


@normalise_sums.cuda
def _(gpu, n, dy, gamma, centred=True):
    sums = gpu.empty((2, n.shape[0]), np.float32)
    gpu.launch("normalise_sums", *n.shape, n=n, dy=dy, gamma=gamma, sums=sums, columns=n.shape[1])
    dgamma, dbeta = (gpu.empty(gamma.shape, np.float32) for _ in range(2))
    _add_columns(gpu, n, {"mean": None, "rstd": None, "dy": dy}, dgamma, dbeta, add=False)
    return (sums, dgamma, dbeta) if centred else (sums[1:], dgamma, None)


def _add_columns(
    gpu: Gpu,
    x: Array,
    rows: Mapping[str, Array | None],
    dgamma: Array,
    dbeta: Array | None,
    add: bool,
) -> None:
    """Accumulate (or, if `add` is False, overwrite) the gradients `dgamma` and `dbeta`."""
    count, columns = x.shape
    dbeta = gpu.empty(dgamma.shape, dgamma.dtype) if dbeta is None else dbeta
    partial = gpu.empty((gpu.strips(count), 2 * columns), np.float32)
    given = {"partial": partial, "rows": count, "columns": columns, **rows}
    gpu.launch("norm_columns", *x.shape, x=x, **given)
    add_strips(gpu, partial, add, dgamma, dbeta)


@primitive
def normalise_grad(
    n: Array, rstd: Array, dy: Array, gamma: Array, means: Array, residual: Array | None, dx: Array
) -> Array:
    """Return dx = rstd (dn - mean(dn) - n mean(dn n)) + residual, where dn = dy gamma.

    `means` [1 or 2, rows] are the row sums of `normalise_sums`, divided by the number of features.
    """

    def block(rows):
        d = np.multiply(dy[rows], gamma, out=dx[rows])
        if len(means) == 2:
            d -= means[0, rows, None]
        d -= n[rows] * means[-1, rows, None]
        d *= rstd[rows, None]
        if residual is not None:
            d += residual[rows]

    parallel_for(block, row_blocks(n))
    return dx


@normalise_grad.narrow
def _(n, rstd, dy, gamma, means, residual, dx):
    gamma = widened(gamma)

    def block(rows, part):
        added = None if residual is None else widened(residual[rows])
        normal, d = widened(n[rows]), widened(dy[rows])
        normalise_grad(normal, rstd[rows], d, gamma, means[:, rows], added, part)

    in_float32(block, dx)
    return dx


normalise_grad.abstract(lambda n, rstd, dy, gamma, means, residual, dx: dx)
normalise_grad.states("mn m mn n .m mn mn")


@normalise_grad.cuda
def _(gpu, n, rstd, dy, gamma, means, residual, dx):
    dn = means[0] if len(means) == 2 else None
    given = {"mean_dn": dn, "mean_product": means[-1], "residual": residual, "dx": dx}
    given |= {"rstd": rstd, "dy": dy, "gamma": gamma, "columns": n.shape[1]}
    gpu.launch("normalise_grad", *n.shape, n=n, **given)
    return dx
