"""Products of blocks on one rank, and what can be done in the same pass through memory."""

import numpy as np

from hpc3d.cluster.arrays import kernel


@kernel
def product(a, b, out, bias=None, onto=None):
    """out[m, n] = a[m, k] b[k, n] (+ bias[n]) (+ onto[m, n])."""
    np.matmul(a, b, out=out)
    for term in (bias, onto):
        if term is not None:
            np.add(out, term, out=out)
    return out


@kernel
def accumulate(grad, dw):
    """Add dW to the sum of the microbatches' gradients."""
    grad += dw


@kernel
def accumulate_product(grad, a, b, sums=None):
    """Add a b to `grad`, and the sum of the rows of b to `sums`."""
    grad += a @ b
    if sums is not None:
        sums += b.sum(0)
