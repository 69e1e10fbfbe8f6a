"""Cross-entropy over a vocabulary that is split over ranks."""

from typing import NamedTuple

import numpy as np

from hpc3d.arrays.pool import kernel

IGNORE = -100


class LossRows(NamedTuple):
    """Of every row of logits the sum of its exponentials, whether it is `valid`, and where its
    target is: the indices of these entries, or what a device finds them by."""

    sums: np.ndarray
    valid: np.ndarray
    at: tuple


class LossSaved(NamedTuple):
    """What `softmax_grad` works with: the logits' memory, which holds their exponentials; on a
    device that has the gradient at once this itself, and None as `rows`."""

    logits: np.ndarray
    rows: LossRows | None


class CrossEntropy:
    """-log softmax(logits)[target], on logits Y[m, v] with the vocabulary split over n's axes.

    Entries beyond `vocabulary` are padding and get no probability; targets equal to IGNORE count
    for nothing (Megatron-LM's vocabulary-parallel loss, arXiv:1909.08053, section 3).
    """

    def __init__(self, mesh, axes, vocabulary):
        self.mesh, self.vocabulary = mesh, vocabulary
        self.place = list(axes)
        self.axes = [axis for axis in axes if mesh.size(axis) > 1]

    def forward(self, logits, targets, scale):
        """The summed loss of this rank's rows, and what backward needs; overwrites the logits."""
        if not self.axes:
            with self.mesh.trace.span("loss", "loss"):
                loss, saved = cross_entropy(logits, targets, self.vocabulary, scale)
            return loss, LossSaved(*saved)
        first = self.mesh.index(self.place) * logits.shape[1]
        with self.mesh.trace.span("loss", "loss"):
            top = row_max(logits, max(0, self.vocabulary - first))
        for axis in self.axes:
            top = self.mesh.comm(axis).all_reduce(top, "max").wait()
        with self.mesh.trace.span("loss", "loss"):
            sums, at = local_sums(logits, top, targets - first)
        for axis in self.axes:
            sums = self.mesh.comm(axis).all_reduce(sums).wait()
        valid = targets != IGNORE
        return negative_log(sums, valid), LossSaved(logits, LossRows(sums[0], valid, at))

    def backward(self, saved, scale):
        """scale (softmax - onehot) for valid rows, 0 for the others, in the logits' memory."""
        with self.mesh.trace.span("loss", "loss"):
            return softmax_grad(saved.logits, saved.rows, scale)


@kernel
def cross_entropy(logits, targets, vocabulary, scale):
    """The summed loss where the vocabulary is whole, and logits with what `softmax_grad` needs."""
    top, valid = row_max(logits, vocabulary), targets != IGNORE
    sums, at = local_sums(logits, top, targets)
    return negative_log(sums, valid), (logits, LossRows(sums[0], valid, at))


@kernel
def row_max(logits, columns):
    """The maximum of each row; columns from `columns` on are padding and become -inf."""
    logits[:, columns:] = -np.inf
    return logits.max(1, initial=-np.inf)


@kernel
def local_sums(logits, top, index):
    """Sum of exponentials and target logit a row, [2, rows]; logits become exponentials."""
    rows = np.flatnonzero((index >= 0) & (index < logits.shape[1]))
    logits -= top[:, None]
    sums = np.zeros((2, logits.shape[0]), logits.dtype)
    sums[1, rows] = logits[rows, index[rows]]
    np.exp(logits, out=logits)
    sums[0] = logits @ np.ones(logits.shape[1], logits.dtype)
    return sums, (rows, index[rows])


@kernel
def negative_log(sums, valid):
    """The sum over valid rows of log(sum of exponentials) - target logit."""
    return float(np.where(valid, np.log(sums[0]) - sums[1], 0).sum(dtype=np.float64))


@kernel
def softmax_grad(exponentials, rest, scale):
    """scale (softmax - onehot) for valid rows, 0 for the others, in the exponentials' memory."""
    total, valid, at = rest
    factor = np.where(valid, scale / total, 0).astype(exponentials.dtype)
    exponentials *= factor[:, None]
    exponentials[at] -= np.asarray(scale, exponentials.dtype)
    return exponentials
