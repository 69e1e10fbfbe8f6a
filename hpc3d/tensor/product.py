"""Products of blocks on one rank, and what devices can do in the same pass through memory."""

import numpy as np

from hpc3d.arrays.pool import kernel


@kernel
def product(a, b, out):
    """out[m, n] = a[m, k] b[k, n]; of a `fused` pool (+ bias[n]) (+ onto[m, n]), too."""
    np.matmul(a, b, out=out)
    return out


@kernel
def accumulate(grad, dw):
    """Add dW to the sum of the microbatches' gradients."""
    grad += dw


@kernel
def accumulate_product(grad, a, b, sums=None):
    """Add a b to `grad`, and the sum of the rows of b to `sums`: of a `fused` pool alone."""
    raise NotImplementedError
