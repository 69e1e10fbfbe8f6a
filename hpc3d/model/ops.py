"""Local kernels: what one rank does to its own block between two products.

NumPy at the speed of the cache: every function works through its rows in blocks that stay in the
cache, in place, without a power and without a temporary of the whole size.  Each backward stands
under its forward.
"""

from math import pi, sqrt

import numpy as np

CACHE = 1 << 17  # bytes of one operand of a block

GELU_C = sqrt(2 / pi)
GELU_A = 0.044715


def row_blocks(x):
    """Slices of the rows of `x` that fit the cache."""
    rows = max(1, CACHE // max(1, x[:1].nbytes))
    return [slice(start, start + rows) for start in range(0, x.shape[0], rows)]


def add_bias(y, bias, out):
    """y + b."""
    return np.add(y, bias, out=out)


def sum_rows(y):
    """The sum over rows, the gradient of a bias; one product with a vector of ones."""
    return np.ones(y.shape[0], y.dtype) @ y


def gelu_tanh(h, out):
    """h (1 + tanh u) / 2 with u = c (h + a h^3)   (Hendrycks and Gimpel 2016, GPT-2's form)."""
    for rows in row_blocks(h):
        x, s = h[rows], out[rows]
        np.multiply(x, x, out=s)
        s *= GELU_C * GELU_A
        s += GELU_C
        s *= x
        np.tanh(s, out=s)
        s += 1
        s *= x
        s *= 0.5
    return out


def gelu_tanh_grad(h, dy, out):
    """dy (1 + t) / 2 (1 + h (1 - t) u') with t = tanh u, u' = c (1 + 3 a h^2)."""
    for rows in row_blocks(h):
        x, d = h[rows], out[rows]
        square = x * x
        slope = square * (3 * GELU_C * GELU_A)
        slope += GELU_C
        square *= GELU_C * GELU_A
        square += GELU_C
        square *= x
        t = np.tanh(square, out=square)
        slope *= x
        slope *= np.subtract(1, t)
        slope += 1
        t += 1
        slope *= t
        slope *= 0.5
        np.multiply(slope, dy[rows], out=d)
    return out


def gelu_exact(h, out):
    """h Phi(h), Phi the normal distribution."""
    from scipy.special import erf

    for rows in row_blocks(h):
        x, s = h[rows], out[rows]
        np.multiply(x, sqrt(0.5), out=s)
        erf(s, out=s)
        s += 1
        s *= x
        s *= 0.5
    return out


def gelu_exact_grad(h, dy, out):
    """dy (Phi(h) + h phi(h))."""
    from scipy.special import erf

    for rows in row_blocks(h):
        x, d = h[rows], out[rows]
        phi = x * x
        phi *= -0.5
        np.exp(phi, out=phi)
        phi *= x
        phi *= 1 / sqrt(2 * pi)
        np.multiply(x, sqrt(0.5), out=d)
        erf(d, out=d)
        d += 1
        d *= 0.5
        d += phi
        d *= dy[rows]
    return out


GELU = {"tanh": (gelu_tanh, gelu_tanh_grad), "exact": (gelu_exact, gelu_exact_grad)}


def moments(x):
    """Mean and sum of squared deviations of every row, [2, rows]: two passes, never E[x^2]."""
    result = np.empty((2, x.shape[0]), x.dtype)
    average = np.full(x.shape[1], 1 / x.shape[1], x.dtype)
    for rows in row_blocks(x):
        mean = np.matmul(x[rows], average, out=result[0, rows])
        centred = x[rows] - mean[:, None]
        np.einsum("ij,ij->i", centred, centred, out=result[1, rows])
    return result


def combine_moments(parts, count):
    """Moments of the whole rows from those of `parts` [g, 2, rows], `count` numbers each.

    Chan, Golub and LeVeque 1979: M2 = sum M2_i + count sum (mean_i - mean)^2.
    """
    means, squares = parts[:, 0], parts[:, 1]
    mean = means.mean(0)
    spread = means - mean
    return mean, squares.sum(0) + count * np.einsum("gi,gi->i", spread, spread)


def normalise(x, mean, rstd, gamma, beta, n, y):
    """n = (x - mean) rstd and y = n gamma + beta."""
    for rows in row_blocks(x):
        np.subtract(x[rows], mean[rows, None], out=n[rows])
        n[rows] *= rstd[rows, None]
        np.multiply(n[rows], gamma, out=y[rows])
        y[rows] += beta
    return n, y


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
