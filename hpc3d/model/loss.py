"""Cross-entropy loss over a vocabulary that is sharded across ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array
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
    from hpc3d.comm.mesh import Mesh


class LossSaved(NamedTuple):
    """Data saved for `softmax_grad`.

    `logits` contains the exponentiated logits, computed in place. If a GPU computes the gradient
    in the forward pass, `logits` contains the gradient instead, and `rows` is `None`.
    """

    logits: Array
    rows: LossRows | None


class CrossEntropy:
    """Cross-entropy -log softmax(Y)[target] of logits Y[m, v], sharded over the vocabulary.

    The mesh axes `axes` shard dimension v. Entries beyond `vocabulary` are padding with zero
    probability, and rows whose target is IGNORE are excluded (Megatron-LM's vocabulary-parallel
    loss, arXiv:1909.08053, section 3).
    """

    def __init__(self, mesh: Mesh, axes: Iterable[str], vocabulary: int) -> None:
        self.mesh, self.vocabulary = mesh, vocabulary
        self.axes = [axis for axis in axes if mesh.size(axis) > 1]

    def forward(self, logits: Array, targets: np.ndarray, scale: float) -> tuple[Any, LossSaved]:
        """Return this rank's summed loss and the saved data; the logits are overwritten."""
        if not self.axes:
            with self.mesh.trace.span("loss", "loss"):
                loss, saved = cross_entropy(logits, targets, self.vocabulary, scale)
            return loss, LossSaved(*saved)
        sums, at = self._sums(logits, targets)
        valid = targets != IGNORE
        return negative_log(sums, valid), LossSaved(logits, LossRows(sums[0], valid, at))

    def score(self, logits: Array, targets: np.ndarray) -> Array:
        """Return this rank's summed loss and its number of correct rows, as float64[2].

        The logits are overwritten, and no backward pass is possible. A row is correct if no logit
        exceeds the target's logit (`score_rows`). The loss needs the row maximum anyway, so the
        score requires no additional communication.
        """
        sums, _ = self._sums(logits, targets)
        with self.mesh.trace.span("loss", "loss"):
            return score_rows(sums, targets != IGNORE)

    def _sums(self, logits: Array, targets: np.ndarray) -> tuple[Array, Any]:
        """All-reduce the results of `local_sums` over the vocabulary shards; overwrite the logits.

        Returns the sums and `LossRows.at`, the indices of the targets in this rank's shard.
        """
        first = self.mesh.index(self.axes) * logits.shape[1]
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
        """Return the logits' gradient, `scale` * (softmax - onehot), with 0 for ignored rows."""
        with self.mesh.trace.span("loss", "loss"):
            return softmax_grad(saved.logits, saved.rows, scale)
