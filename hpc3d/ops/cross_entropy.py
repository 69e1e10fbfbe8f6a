"""Local operations of the cross-entropy loss, on a rank's shard of the logit columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import WIDE, wide
from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for
from hpc3d.data.batches import IGNORE
from hpc3d.ops.rows import in_float32, row_blocks
from hpc3d.ops.update import sum_parts

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array


class LossRows(NamedTuple):
    """Per-row values saved for the backward pass of the loss.

    `sums` are the sums of exponentials. `valid` is True if the row has a target. `at` holds the
    indices of the target entries or, on a GPU, the arrays from which the kernel computes these
    indices.
    """

    sums: Array
    valid: Array
    at: Any


@composite
def cross_entropy(
    logits: Array, targets: Array, vocabulary: int, scale: float
) -> tuple[Any, tuple[Array, LossRows | None]]:
    """Return the summed loss over an unsharded vocabulary, and the inputs of `softmax_grad`."""
    top, valid = row_max(logits, vocabulary), targets != IGNORE
    sums, at = local_sums(logits, top, targets)
    return negative_log(sums, valid), (logits, LossRows(sums[0], valid, at))


@cross_entropy.cuda
def _(gpu, logits, targets, vocabulary, scale):
    """Compute the loss and, in the same pass, overwrite the logits with their gradient."""
    rows, columns = logits.shape
    losses = gpu.empty((rows,), np.float32)
    given = {"targets": targets, "scale": scale, "loss": losses}
    sizes = {"columns": columns, "vocabulary": vocabulary}
    gpu.launch("cross_entropy", rows, columns, logits=logits, **given, **sizes)
    return sum_parts(gpu, losses), (logits, None)


@primitive
def row_max(logits: Array, columns: int) -> Array:
    """Set padding columns (index >= `columns`) to -inf; return the maximum of each row."""
    logits[:, columns:], top = -np.inf, np.empty(len(logits), wide(logits.dtype))

    def block(rows):
        top[rows] = logits[rows].max(1, initial=-np.inf)

    parallel_for(block, row_blocks(logits))
    return top


row_max.narrow(row_max.numpy)
row_max.states("mn -> m", sums=False)


@row_max.abstract
def _(logits, columns):
    return logits.like(logits.shape[:1], wide(logits.dtype))


@row_max.cuda
def _(gpu, logits, columns):
    top = gpu.empty(logits.shape[:1], np.float32)
    given = {"columns": logits.shape[1], "valid": min(columns, logits.shape[1])}
    gpu.launch("row_max", *logits.shape, logits=logits, top=top, **given)
    return top


@primitive
def local_sums(logits: Array, top: Array, index: Array) -> tuple[Array, Any]:
    """Return the sum of exponentials and the target logit of each row, [2, rows].

    `top` is subtracted from the logits, which are then overwritten with their exponentials. The
    second result is `LossRows.at`.
    """
    sums, ones = np.zeros((2, len(logits)), logits.dtype), np.ones(logits.shape[1], logits.dtype)

    def block(rows):
        part, of_part = logits[rows], sums[:, rows]
        part -= top[rows, None]
        at = _targets(part, index[rows])
        of_part[1, at[0]] = part[at]
        np.exp(part, out=part)
        np.matmul(part, ones, out=of_part[0])

    parallel_for(block, row_blocks(logits))
    return sums, _targets(logits, index)


def _targets(logits: Array, index: Array) -> tuple[Array, Array]:
    """Return the indices of the targets in this shard of the logits, as (rows, columns)."""
    rows = np.flatnonzero((index >= 0) & (index < logits.shape[1]))
    return rows, index[rows]


@local_sums.narrow
def _(logits, top, index):
    sums = np.empty((2, len(logits)), WIDE)

    def block(rows, part):
        sums[:, rows], _ = local_sums(part, top[rows], index[rows])

    in_float32(block, logits)
    return sums, _targets(logits, index)


local_sums.states("mn m m -> .m")


@local_sums.abstract
def _(logits, top, index):
    return logits.like((2, logits.shape[0]), wide(logits.dtype)), None


@local_sums.cuda
def _(gpu, logits, top, index):
    """Compute the sums of exponentials without changing the logits."""
    sums = gpu.empty((2, logits.shape[0]), np.float32)
    given = {"top": top, "index": index, "sums": sums, "columns": logits.shape[1]}
    gpu.launch("local_sums", *logits.shape, logits=logits, **given)
    return sums, (top, index)


@primitive
def negative_log(sums: Array, valid: Array) -> Any:
    """Return the sum of log(sum of exponentials) - target logit over the valid rows."""
    return float(np.where(valid, np.log(sums[0]) - sums[1], 0).sum(dtype=np.float64))


negative_log.abstract(lambda sums, valid: 0.0)


@negative_log.cuda
def _(gpu, sums, valid):
    total, rows = gpu.empty((1,), np.float64), sums.shape[1]
    gpu.launch("negative_log", 1, rows, sums=sums, valid=valid, loss=total, rows=rows)
    return total


@primitive
def score_rows(sums: Array, valid: Array) -> Array:
    """Return float64[2]: summed loss and number of correct predictions of the valid rows.

    A prediction is correct if no logit exceeds the target's logit, so ties count as correct.
    """
    right = np.count_nonzero(valid & (sums[1] == 0))  # sums[1] is target logit - row maximum
    return np.array([negative_log(sums, valid), right], np.float64)


score_rows.abstract(lambda sums, valid: np.zeros(2))


@score_rows.cuda
def _(gpu, sums, valid):
    score, rows = gpu.empty((2,), np.float64), sums.shape[1]
    gpu.launch("score_rows", 1, rows, sums=sums, valid=valid, score=score, rows=rows)
    return score


@primitive
def softmax_grad(exponentials: Array, rest: LossRows | None, scale: float) -> Array:
    """Compute scale * (softmax - onehot) for valid rows, and 0 for other rows.

    The result overwrites the exponentials.
    """
    total, valid, at = rest
    real = wide(exponentials.dtype)
    factors = np.where(valid, scale / total, 0).astype(real)

    def block(rows):
        part = exponentials[rows]
        part *= factors[rows, None]

    parallel_for(block, row_blocks(exponentials))
    exponentials[at] -= np.asarray(scale, real)
    return exponentials


softmax_grad.narrow(softmax_grad.numpy)
softmax_grad.abstract(lambda exponentials, rest, scale: exponentials)


@softmax_grad.cuda
def _(gpu, logits, rest, scale):
    if rest is not None:
        total, valid, (top, index) = rest
        given = {"top": top, "total": total, "index": index, "valid": valid, "scale": scale}
        gpu.launch("softmax_grad", *logits.shape, logits=logits, columns=logits.shape[1], **given)
    return logits
