"""Cross-entropy over a vocabulary that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.ops.cross_entropy import (
    IGNORE,
    LossRows,
    cross_entropy,
    local_sums,
    negative_log,
    row_max,
    score_rows,
    softmax_grad,
)

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh


class LossSaved(NamedTuple):
    """What `softmax_grad` works with: the logits' memory, which holds their exponentials; on a
    device that has the gradient at once this itself, and None as `rows`."""

    logits: Array
    rows: LossRows | None


class CrossEntropy:
    """-log softmax(logits)[target], on logits Y[m, v] with the vocabulary split over n's axes.

    Entries beyond `vocabulary` are padding and get no probability; targets equal to IGNORE count
    for nothing (Megatron-LM's vocabulary-parallel loss, arXiv:1909.08053, section 3).
    """

    def __init__(self, mesh: Mesh, axes: Iterable[str], vocabulary: int) -> None:
        self.mesh, self.vocabulary = mesh, vocabulary
        self.place = list(axes)
        self.axes = [axis for axis in axes if mesh.size(axis) > 1]

    def forward(self, logits: Array, targets: np.ndarray, scale: float) -> tuple[Any, LossSaved]:
        """The summed loss of this rank's rows, and what backward needs; overwrites the logits."""
        if not self.axes:
            with self.mesh.trace.span("loss", "loss"):
                loss, saved = cross_entropy(logits, targets, self.vocabulary, scale)
            return loss, LossSaved(*saved)
        sums, at = self._sums(logits, targets)
        valid = targets != IGNORE
        return negative_log(sums, valid), LossSaved(logits, LossRows(sums[0], valid, at))

    def score(self, logits: Array, targets: np.ndarray) -> Array:
        """[the summed loss of this rank's rows, how many of them are predicted right], float64,
        for a pass without backward; overwrites the logits.

        A row is right where no logit is above that of its target (`score_rows`): its maximum is
        known for the loss, so that this takes no further message.
        """
        sums, _ = self._sums(logits, targets)
        with self.mesh.trace.span("loss", "loss"):
            return score_rows(sums, targets != IGNORE)

    def _sums(self, logits: Array, targets: np.ndarray) -> tuple[Array, Any]:
        """`local_sums` over the whole vocabulary, and where the targets are in this rank's part;
        the logits become exponentials."""
        first = self.mesh.index(self.place) * logits.shape[1]
        with self.mesh.trace.span("loss", "loss"):
            top = row_max(logits, max(0, self.vocabulary - first))
        for axis in self.axes:
            top = self.mesh.comm(axis).all_reduce(top, "max").wait()
        with self.mesh.trace.span("loss", "loss"):
            sums, at = local_sums(logits, top, targets - first)
        for axis in self.axes:
            sums = self.mesh.comm(axis).all_reduce(sums).wait()
        return sums, at

    def backward(self, saved: LossSaved, scale: float) -> Array:
        """scale (softmax - onehot) for valid rows, 0 for the others, in the logits' memory."""
        with self.mesh.trace.span("loss", "loss"):
            return softmax_grad(saved.logits, saved.rows, scale)
