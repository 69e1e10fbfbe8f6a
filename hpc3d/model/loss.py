"""Cross-entropy over a vocabulary that is split over ranks."""

import numpy as np

IGNORE = -100


class CrossEntropy:
    """-log softmax(logits)[target], on logits Y[m, v] with the vocabulary split over n's axes.

    Entries beyond `vocabulary` are padding and get no probability; targets equal to IGNORE count
    for nothing (Megatron-LM's vocabulary-parallel loss, arXiv:1909.08053, section 3).
    """

    def __init__(self, mesh, axes, vocabulary):
        self.mesh, self.vocabulary = mesh, vocabulary
        self.place = list(axes)
        self.axes = [axis for axis in axes if mesh.size(axis) > 1]

    def forward(self, logits, targets):
        """The summed loss of this rank's rows, and what backward needs; overwrites the logits."""
        first = self.mesh.index(self.place) * logits.shape[1]
        with self.mesh.trace.span("loss", "loss"):
            logits[:, max(0, self.vocabulary - first) :] = -np.inf
            top = logits.max(1, initial=-np.inf)
        for axis in self.axes:
            top = self.mesh.comm(axis).all_reduce(top, "max").wait()
        with self.mesh.trace.span("loss", "loss"):
            sums, at = self.local_sums(logits, top, targets - first)
        for axis in self.axes:
            sums = self.mesh.comm(axis).all_reduce(sums).wait()
        valid = targets != IGNORE
        losses = np.where(valid, np.log(sums[0]) - sums[1], 0)
        return float(losses.sum(dtype=np.float64)), (logits, sums[0], valid, at)

    def local_sums(self, logits, top, index):
        """Sum of exponentials and target logit a row, [2, rows]; logits become exponentials."""
        rows = np.flatnonzero((index >= 0) & (index < logits.shape[1]))
        logits -= top[:, None]
        sums = np.zeros((2, logits.shape[0]), logits.dtype)
        sums[1, rows] = logits[rows, index[rows]]
        np.exp(logits, out=logits)
        sums[0] = logits @ np.ones(logits.shape[1], logits.dtype)
        return sums, (rows, index[rows])

    def backward(self, saved, scale):
        """scale (softmax - onehot) for valid rows, 0 for the others, in the logits' memory."""
        exponentials, total, valid, at = saved
        with self.mesh.trace.span("loss", "loss"):
            factor = np.where(valid, scale / total, 0).astype(exponentials.dtype)
            exponentials *= factor[:, None]
            exponentials[at] -= np.asarray(scale, exponentials.dtype)
        return exponentials
