"""NumPy versions of fused operations, which a GPU computes in one pass through memory.

They require that no communication occurs between the parts. Their CUDA kernels are in
hpc3d/cuda/kernels.
"""

import numpy as np

from hpc3d.ops.attention import CAUSAL
from hpc3d.ops.cross_entropy import IGNORE, local_sums, row_max, softmax_grad
from hpc3d.ops.embedding import gather_rows
from hpc3d.ops.gelu import GELU
from hpc3d.ops.norm import moments, normalise, normalise_grad, normalise_sums
from hpc3d.ops.rows import add_bias, add_repeated, soft_cap


def add_norm(x, residual, gamma, beta, epsilon):
    """Return s = x + residual and y = norm(s), with the mean and rstd of every row of s.

    If residual is None, s is x itself. If beta is None, the norm is RMSNorm, and the mean is None.
    """
    s = x if residual is None else x + residual
    mean, squares = (None, np.square(s).sum(1)) if beta is None else moments(s)
    rstd = 1 / np.sqrt(squares / s.shape[1] + epsilon)
    _, y = normalise(s, mean, rstd, gamma, beta, np.empty_like(s), np.empty_like(s))
    return s, y, mean, rstd


def norm_grad(s, mean, rstd, dy, gamma, residual):
    """Return the gradients of s (plus `residual` unless None), gamma and beta. If the mean is
    None, the norm is RMSNorm, which has no beta."""
    n = (s if mean is None else s - mean[:, None]) * rstd[:, None]
    sums, dgamma, dbeta = normalise_sums(n, dy, gamma, mean is not None)
    means = sums / s.shape[1]
    dx = normalise_grad(n, rstd, dy, gamma, means, residual, np.empty_like(s))
    return dx, dgamma, dbeta


def bias_gelu(h, bias, out, kind):
    """Compute out = gelu(h + bias); h is replaced by the derivative."""
    return GELU[kind](add_bias(h, bias, h), out)


def embed(table, index, positions, first):
    """Return rows of the table by token, plus rows of the positions, repeated from `first` on."""
    x = gather_rows(table, index)
    return add_repeated(x, positions, first, x)


def cross_entropy(logits, targets, vocabulary, scale):
    """Return the loss of every row; logits are replaced by their gradient times `scale`.

    Columns from `vocabulary` on are padding, and rows with the target IGNORE do not count.
    """
    top, valid = row_max(logits, vocabulary), targets != IGNORE
    sums, at = local_sums(logits, top, targets)
    softmax_grad(logits, (sums[0], valid, at), scale)
    return np.where(valid, np.log(sums[0]) - sums[1], 0)


def causal_softmax(scores, scale, factors=None, mask=CAUSAL, cap=0):
    """Compute p = softmax(scale scores + mask) over the keys of [B, heads, key, query], in place,
    and p times the dropout factors (p itself without dropout). Queries that see no key get 0. The
    scaled scores have a soft cap, unless it is 0."""
    scores *= scale
    if cap:
        soft_cap(scores, cap)
    if mask.causal:
        scores += np.tril(np.full(scores.shape[-2:], -np.inf, scores.dtype), -1)
    if mask.window:
        scores += np.triu(np.full(scores.shape[-2:], -np.inf, scores.dtype), mask.window)
    if mask.starts is not None:
        earlier = np.arange(scores.shape[-2])[:, None] < mask.starts[:, None, :]
        scores[...] = np.where(earlier[:, None], -np.inf, scores)
    if mask.padding is not None:
        scores[...] = np.where(mask.padding[:, None, :, None], -np.inf, scores)
    top = scores.max(-2, keepdims=True)
    scores -= np.where(np.isneginf(top), 0, top)
    np.exp(scores, out=scores)
    scores /= np.maximum(scores.sum(-2, keepdims=True), np.finfo(scores.dtype).tiny)
    return scores, scores if factors is None else scores * factors


def causal_softmax_grad(p, dweights, scale, factors=None):
    """Compute ds = scale p (dp - sum(dp p)) in place, with dp = dweights times the factors."""
    if factors is not None:
        dweights *= factors
    dweights -= (dweights * p).sum(-2, keepdims=True)
    dweights *= p
    dweights *= scale
    return dweights
