"""The rules of kernels for arrays without data: what comes out, and which memory it takes.

Importing this module makes the model run on `hpc3d.arrays.abstract`.
"""

import numpy as np

from hpc3d.arrays.abstract import rule
from hpc3d.model import attention, layers, loss, ops, parameters
from hpc3d.tensor import product

rule(parameters.initialise)(lambda value, item, seed, mesh: None)
rule(product.accumulate)(lambda grad, dw: None)
rule(layers.gather_rows)(lambda table, index: table.like((index.size, table.shape[1])))
rule(layers.scatter_rows)(lambda dy, index, order, shape: dy.like(shape, wide(dy)))
rule(ops.dropped)(lambda x, mask, out: out)
rule(ops.add_repeated)(lambda x, table, first, out: out)
rule(ops.sum_repeated)(lambda dx, first, period: dx.like((period, dx.shape[1])))
rule(ops.gelu_tanh)(lambda h, out: out)
rule(ops.gelu_exact)(lambda h, out: out)
rule(ops.moments)(lambda x: x.like((2, x.shape[0])))
rule(ops.combine_moments)(lambda parts, count: parts[0])
rule(ops.normalise)(lambda x, mean, rstd, gamma, beta, n, y: (n, y))
rule(ops.normalise_grad)(lambda n, rstd, dy, gamma, means, residual, dx: dx)
rule(loss.row_max)(lambda logits, columns: logits.like(logits.shape[:1]))
rule(loss.negative_log)(lambda sums, valid: 0.0)
rule(loss.softmax_grad)(lambda exponentials, rest, scale: exponentials)


def wide(array):
    """Of the sum of many rows."""
    return np.promote_types(array.dtype, np.float32)


@rule(ops.normalise_sums)
def _(n, dy, gamma):
    return n.like((2, n.shape[0])), n.like(gamma.shape), n.like(gamma.shape)


@rule(loss.local_sums)
def _(logits, top, index):
    return logits.like((2, logits.shape[0])), None


@rule(attention.attend)
def _(qkv, sequence, width, empty, drop=None):
    batch, heads, probabilities = scored(qkv, sequence, width, empty)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    drawn(drop, probabilities)
    qkv.meter.product(sequence, width, sequence, qkv.dtype, batch * heads)
    return out.reshape(batch * sequence, heads * width), probabilities


@rule(attention.attend_again)
def _(qkv, sequence, width, empty, drop=None):
    return scored(qkv, sequence, width, empty)[-1]


@rule(attention.attend_grad)
def _(dout, qkv, probabilities, sequence, width, empty, drop=None):
    heads = qkv.size // (3 * width * sequence)
    drawn(drop, probabilities)
    for m, n, k in 2 * [(sequence, width, sequence), (sequence, sequence, width)]:
        qkv.meter.product(m, n, k, qkv.dtype, heads)
    return empty(qkv.shape, qkv.dtype)


def scored(qkv, sequence, width, empty):
    """Samples, heads and probabilities, of q k' and its softmax."""
    batch, heads = qkv.shape[0] // sequence, qkv.shape[1] // (3 * width)
    shape = attention.chunks_of(batch, heads, sequence, qkv.itemsize)
    qkv.meter.product(sequence, sequence, width, qkv.dtype, batch * heads)
    return batch, heads, empty(shape, qkv.dtype)


def drawn(drop, probabilities):
    """Dropout inside of attention takes the time of a kernel of its own."""
    if drop is not None:
        probabilities.meter.kernel(ops.dropped.__name__, 2 * probabilities.nbytes)
