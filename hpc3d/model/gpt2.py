"""Embeddings and head of decoder-only models.

The head consists of the final norm, the output projection and the loss.  GPT-2 (Radford et al.
2019) and Llama share this code; GPT-2 also has learned position embeddings.  The blocks are in
hpc3d.model.block; hpc3d.model.stage combines embeddings, blocks and head.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array
from hpc3d.model.layers import Dropout, Embedding, NormSaved, gradient, owned
from hpc3d.model.loss import CrossEntropy, LossSaved
from hpc3d.model.positions import Positions
from hpc3d.ops.rows import soft_cap, soft_cap_grad
from hpc3d.tensor.matmul import Saved, sharded_matmul

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.layers import EmbeddingSaved
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.matmul import SavedForWeight


def add_table(
    mesh: Mesh, parameters: Parameters, spec: ModelSpec, name: str, **how: Any
) -> Parameter:
    """Register a matrix of token embeddings W[v, h], with one row per vocabulary entry.

    h is the hidden dimension. The number of rows is padded to a multiple of the number of ranks
    that shard the rows.
    """
    matmul, sizes = sharded_matmul(mesh, spec.splits["dense"].without_panels().next()), spec.sizes
    count = mesh.count(matmul.dw_layout[0])
    rows = -(-sizes.vocabulary // count) * count  # type: ignore[operator]  # resolved
    shape = (rows, sizes.hidden)
    how |= {"std": sizes.std, "decay": True, "rows": sizes.vocabulary, **gradient(matmul)}
    return parameters.add(name, shape, matmul.w_layout, **how)


class Embeddings:
    """Token embeddings X[m, h], plus learned position embeddings if any, with dropout."""

    name = "embedding"

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        shape, split = spec.sizes, spec.splits["dense"]
        self.mesh, self.shape = mesh, shape
        scale = sqrt(shape.hidden) if spec.family.scales_embedding else 1.0
        self.lookup = Embedding(mesh, table, split.without_panels().next(), spec.reduced, scale)
        self.positions = None if spec.family.rotary else Positions(mesh, parameters, spec)
        self.drop = Dropout(mesh, "embedding.drop", split.x, spec)

    def forward(self, micro: Microbatch) -> tuple[Array, Any]:
        x, saved = self.placed(micro)
        return self.drop.apply(x, micro, self.shape.hidden), saved

    def placed(self, micro: Microbatch) -> tuple[Array, EmbeddingSaved]:
        """Return the sum of token and position embeddings, and the data that the lookup saves."""
        x, saved = self.lookup.forward(micro)
        if self.positions:
            with self.mesh.trace.span("embedding", "lookup"):
                x = self.positions.add(x, micro)
        return x, saved

    def backward(
        self, dx: Array, saved: Any, micro: Microbatch, defer: Callable[..., None]
    ) -> None:
        dx = self.drop.apply(dx, micro, self.shape.hidden)
        defer(self.weight_grad, dx, saved, micro)

    def weight_grad(self, dx: Array, saved: EmbeddingSaved, micro: Microbatch) -> None:
        if self.positions:
            with self.mesh.trace.span("embedding", "lookup"):
                self.positions.weight_grad(dx, micro)
        self.lookup.backward(dx, saved, micro)


class LogitsSaved(NamedTuple):
    """Data saved for the backward pass of the logits."""

    norm: NormSaved
    product: Saved


class HeadSaved(NamedTuple):
    """Data saved for the backward pass of the head."""

    logits: Any
    loss: LossSaved
    capped: Array | None


class Head:
    """Head of a decoder-only model: logits Y[m, v] = norm(X) W^T, and their cross-entropy.

    `table` is the matrix W[v, h] from `add_table`; it may be tied to the token embeddings. If
    `sizes.logit_cap` is set, the logits have a soft cap. The loss overwrites the logits, so the
    head then saves a copy of them, which determines the derivative of the cap.
    """

    name = "head"

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        sizes, split = spec.sizes, spec.splits["dense"]
        whole = split.without_panels()
        self.mesh, self.table, self.layout = mesh, table, whole.y
        self.counts = whole.y.rows.is_first_copy(mesh)  # one rank contributes the loss of its rows
        self.norm = spec.family.norm(
            mesh, parameters, "head.norm", sizes.hidden, split.x, sizes.epsilon
        )
        self.matmul = sharded_matmul(mesh, whole, spec.keep, True, reduced=spec.reduced)
        vocabulary: Any = sizes.vocabulary  # set in every resolved configuration
        self.loss = CrossEntropy(mesh, self.layout[1], vocabulary)
        self.cap = sizes.logit_cap

    def forward(self, x: Array, micro: Microbatch) -> tuple[Any, HeadSaved | None]:
        """Return the loss summed over this rank's tokens, or 0 if another rank contributes it.

        For an evaluation microbatch, also return the number of correctly predicted tokens
        (`CrossEntropy.score`).
        """
        logits, saved = self.logits(x)
        targets = micro.cached("head.targets", self.targets)
        if not micro.training:
            score = self.loss.score(logits, targets)
            return score if self.counts else 0.0, None
        capped = None
        if self.cap:
            with self.mesh.trace.span("logit cap"):
                capped = self.mesh.empty(logits.shape, logits.dtype)
                capped[...] = logits
        loss, saved_loss = self.loss.forward(logits, targets, micro.factor())
        return loss if self.counts else 0.0, HeadSaved(saved, saved_loss, capped)

    def logits(self, x: Array) -> tuple[Array, Any]:
        """Return the logits Y and the data saved for `logits_grad`."""
        x, saved_norm = self.norm.forward(x)
        logits, saved_product = self.matmul.forward_saving(x, self.table.value)
        logits = owned(self.mesh, logits)
        if self.cap:
            with self.mesh.trace.span("logit cap"):
                soft_cap(logits, self.cap)
        return logits, LogitsSaved(saved_norm, saved_product)

    def targets(self, micro: Microbatch) -> np.ndarray:
        """Return the target tokens of this rank's rows of the logits, as an int64 vector."""
        return micro.rows(micro.targets, self.layout, self.mesh).ravel().astype(np.int64)

    def backward(self, micro: Microbatch, saved: HeadSaved, defer: Callable[..., None]) -> Array:
        """Return the gradient of `micro.scale` * loss with respect to the input X."""
        dlogits = self.loss.backward(saved.loss, micro.factor())
        if self.cap:
            with self.mesh.trace.span("logit cap"):
                soft_cap_grad(dlogits, saved.capped, self.cap)
        return self.logits_grad(dlogits, saved.logits, defer)

    def logits_grad(self, dlogits: Array, saved: Any, defer: Callable[..., None]) -> Array:
        """Return the gradient with respect to the input X, given the gradient of the logits Y."""
        dx, rest = self.matmul.backward_input(saved.product, dlogits)
        defer(self.weight_grad, rest)
        return self.norm.backward(dx.wait(), saved.norm, residual=None)

    def weight_grad(self, rest: SavedForWeight) -> None:
        if self.matmul.dw_is_complete:
            self.matmul.add_w(rest, self.table.grad)
            return
        self.table.grad += self.matmul.backward_weight(rest).wait()
