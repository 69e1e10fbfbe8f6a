"""Local kernels: what one rank does to its own block between two products.

NumPy at the speed of the cache: every function works through its rows in blocks that stay in the
cache, in place, without a power and without a temporary of the whole size.  Each backward stands
under its forward.
"""

from math import pi, sqrt

import numpy as np

from hpc3d.arrays.pool import kernel

CACHE = 1 << 17  # bytes of one operand of a block

GELU_C = sqrt(2 / pi)
GELU_A = 0.044715


def row_blocks(x):
    """Slices of the rows of `x` that fit the cache."""
    rows = max(1, CACHE // max(1, x[:1].nbytes))
    return [slice(start, start + rows) for start in range(0, x.shape[0], rows)]


@kernel
def add_bias(y, bias, out):
    """y + b, of a bias or of a block like y."""
    return np.add(y, bias, out=out)


@kernel
def sum_rows(y):
    """The sum over rows, the gradient of a bias; one product with a vector of ones."""
    return np.ones(y.shape[0], y.dtype) @ y


@kernel
def dropped(x, mask, out):
    """x times the factors of a `Mask`; the same for a gradient."""
    for rows in row_blocks(x):
        np.multiply(x[rows], mask.factors(rows, slice(None), x.dtype), out=out[rows])
    return out


@kernel
def add_repeated(x, table, first, out):
    """x plus the rows of a table again and again, from its row `first` on."""
    return np.add(x, table[(first + np.arange(len(x))) % len(table)], out=out)


@kernel
def sum_repeated(dx, first, period):
    """The sum of all rows of x that `add_repeated` adds the same row of its table to."""
    rows = -(-(first + len(dx)) // period) * period
    whole = np.zeros((rows, dx.shape[1]), dx.dtype)
    whole[first : first + len(dx)] = dx
    return whole.reshape(-1, period, dx.shape[1]).sum(0)


@kernel
def gelu_tanh(h, out):
    """out = h s with s = (1 + tanh u) / 2, u = c (h + a h^3); h becomes the slope d out / d h.

    d out / d h = s (1 + (1 - s) 2 h u'), h u' = 3 u - 2 c h   (Hendrycks and Gimpel 2016, GPT-2's
    form).  Forward has all that the slope needs; backward is one multiplication.
    """
    for rows in row_blocks(h):
        x, s = h[rows], out[rows]
        u = x * x
        u *= GELU_C * GELU_A
        u += GELU_C
        u *= x
        np.tanh(u, out=s)
        s += 1
        s *= 0.5
        u *= 6
        u -= x * (4 * GELU_C)
        u *= 1 - s
        u += 1
        u *= s
        s *= x
        x[...] = u
    return out


@kernel
def gelu_exact(h, out):
    """out = h Phi(h), Phi the normal distribution; h becomes the slope Phi(h) + h phi(h)."""
    from scipy.special import erf

    for rows in row_blocks(h):
        x, s = h[rows], out[rows]
        np.multiply(x, sqrt(0.5), out=s)
        erf(s, out=s)
        s += 1
        s *= 0.5
        slope = x * x
        slope *= -0.5
        np.exp(slope, out=slope)
        slope *= 1 / sqrt(2 * pi)
        slope *= x
        slope += s
        s *= x
        x[...] = slope
    return out


GELU = {"tanh": gelu_tanh, "exact": gelu_exact}


@kernel
def gelu_grad(slope, dg):
    """dh = slope dg, in the memory of the slope."""
    return np.multiply(slope, dg, out=slope)


@kernel
def norm(x, gamma, beta, epsilon, empty):
    """y = (x - mean) / sqrt(var + epsilon) gamma + beta of whole rows, and what `norm_grad` needs
    between dy and the residual."""
    mean, squares = moments(x)
    rstd = 1 / np.sqrt(squares / x.shape[1] + epsilon)
    n, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    normalise(x, mean, rstd, gamma, beta, n, y)
    return y, (n, rstd, gamma)


@kernel
def norm_grad(dy, n, rstd, gamma, residual, dgamma, dbeta, empty):
    """dx plus `residual` unless None; adds the gradients of gamma and beta to theirs."""
    sums, *vectors = normalise_sums(n, dy, gamma)
    for total, vector in zip((dgamma, dbeta), vectors, strict=True):
        total += vector
    means = sums / n.shape[1]
    return normalise_grad(n, rstd, dy, gamma, means, residual, empty(n.shape, n.dtype))


@kernel
def moments(x):
    """Mean and sum of squared deviations of every row, [2, rows]: two passes, never E[x^2]."""
    result = np.empty((2, x.shape[0]), x.dtype)
    average = np.full(x.shape[1], 1 / x.shape[1], x.dtype)
    for rows in row_blocks(x):
        mean = np.matmul(x[rows], average, out=result[0, rows])
        centred = x[rows] - mean[:, None]
        np.einsum("ij,ij->i", centred, centred, out=result[1, rows])
    return result


@kernel
def combine_moments(parts, count):
    """Moments of the whole rows from those of `parts` [g, 2, rows], `count` numbers each.

    Chan, Golub and LeVeque 1979: M2 = sum M2_i + count sum (mean_i - mean)^2.
    """
    means, squares = parts[:, 0], parts[:, 1]
    mean = means.mean(0)
    spread = means - mean
    return mean, squares.sum(0) + count * np.einsum("gi,gi->i", spread, spread)


@kernel
def normalise(x, mean, rstd, gamma, beta, n, y):
    """n = (x - mean) rstd and y = n gamma + beta."""
    for rows in row_blocks(x):
        np.subtract(x[rows], mean[rows, None], out=n[rows])
        n[rows] *= rstd[rows, None]
        np.multiply(n[rows], gamma, out=y[rows])
        y[rows] += beta
    return n, y


@kernel
def normalise_sums(n, dy, gamma):
    """What the backward of a norm sums: over features [2, rows], and dgamma, dbeta over rows."""
    sums = np.empty((2, n.shape[0]), n.dtype)
    dgamma, dbeta = np.zeros_like(gamma), np.zeros_like(gamma)
    ones = np.ones(n.shape[0], n.dtype)
    for rows in row_blocks(n):
        d, one = dy[rows], ones[rows]
        np.matmul(d, gamma, out=sums[0, rows])
        product = d * n[rows]
        np.matmul(product, gamma, out=sums[1, rows])
        dgamma += one @ product
        dbeta += one @ d
    return sums, dgamma, dbeta


@kernel
def normalise_grad(n, rstd, dy, gamma, means, residual, dx):
    """(residual +) rstd (dn - mean(dn) - n mean(dn n)) with dn = dy gamma; `means` [2, rows]."""
    for rows in row_blocks(n):
        d = np.multiply(dy[rows], gamma, out=dx[rows])
        d -= means[0, rows, None]
        d -= n[rows] * means[1, rows, None]
        d *= rstd[rows, None]
        if residual is not None:
            d += residual[rows]
    return dx
