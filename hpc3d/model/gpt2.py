"""GPT-2's two ends: token and position embeddings; final norm, tied head and loss.

Radford et al. 2019.  Between them lie the blocks (hpc3d.model.block); hpc3d.model.stage puts the
three together.
"""

from dataclasses import dataclass

import numpy as np

from hpc3d.arrays.pool import writeable
from hpc3d.model.layers import Dropout, Embedding, LayerNorm, gradient, row_axes
from hpc3d.model.loss import CrossEntropy
from hpc3d.ops.rows import add_repeated, sum_repeated
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Matmul


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model; `std` is that of the initial weights.  With `fused_gelu` a device does
    GELU within products, where it has whole matrices."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tied: bool = True
    gelu: str = "tanh"
    dropout: float = 0.0
    std: float = 0.02
    fused_gelu: bool = False

    @property
    def width(self):
        return self.hidden // self.heads

    @property
    def ffn(self):
        return 4 * self.hidden


def add_table(mesh, parameters, shape, split, name, **how):
    """A table W[v, h]: one row per token, padded so that the vocabulary divides over its axes."""
    matmul = Matmul(mesh, split.whole().next())
    count = mesh.count(matmul.dw_layout[0])
    size = (-(-shape.vocabulary // count) * count, shape.hidden)
    how |= {"std": shape.std, "decay": True, "rows": shape.vocabulary, **gradient(matmul)}
    return parameters.add(name, size, matmul.w_layout, **how)


class Embeddings:
    """X[m, h] = table[token] + positions, and dropout."""

    name = "embedding"

    def __init__(self, mesh, parameters, shape, split, table, seed):
        self.mesh, self.shape = mesh, shape
        self.lookup = Embedding(mesh, table, split.whole().next())
        self.position = parameters.add(
            "embedding.position",
            (shape.sequence, shape.hidden),
            Layout("", " ".join(split.x[1])),
            std=shape.std,
            decay=True,
            partial=row_axes(split.x),
        )
        self.layout = split.x
        self.drop = Dropout(mesh, "embedding.drop", split.x, shape.dropout, seed)

    def forward(self, micro):
        self.mesh.trace.layer = -1
        x, saved = self.lookup.forward(micro)
        with self.mesh.trace.span("embedding", "lookup"):
            out = self.mesh.empty(x.shape, x.dtype)
            x = add_repeated(x, self.position.value, self.first(micro), out)
        return self.drop.apply(x, micro, self.shape.sequence, self.shape.hidden), saved

    def backward(self, dx, saved, micro, later):
        self.mesh.trace.layer = -1
        dx = self.drop.apply(dx, micro, self.shape.sequence, self.shape.hidden)
        later(self.weigh, dx, saved, micro)

    def weigh(self, dx, saved, micro):
        with self.mesh.trace.span("embedding", "lookup"):
            first, period = self.first(micro), self.shape.sequence
            self.position.grad += sum_repeated(dx, first, period)
        self.lookup.backward(dx, saved, micro)

    def first(self, micro):
        """The position in its sequence of the first token of this rank's rows."""
        shape = micro.sequences * self.shape.sequence, self.shape.hidden
        return self.layout.slices(shape, self.mesh)[0].start % self.shape.sequence


class Head:
    """Logits Y[m, v] = norm(X) table' and their cross-entropy."""

    name = "head"

    def __init__(self, mesh, parameters, shape, split, table, keep):
        self.mesh, self.table, self.layout = mesh, table, split.whole().y
        self.norm = LayerNorm(mesh, parameters, "head.norm", shape.hidden, split.x)
        self.matmul = Matmul(mesh, split.whole(), keep, transposed=True)
        self.loss = CrossEntropy(mesh, self.layout[1], shape.vocabulary)

    def forward(self, x, micro):
        """The summed loss of this rank's rows, 0 where another rank counts the same rows."""
        self.mesh.trace.layer = -1
        x, saved_norm = self.norm.forward(x)
        logits, saved = self.matmul.apply(x, self.table.value)
        if not writeable(logits):
            logits, shared = self.mesh.empty(logits.shape, logits.dtype), logits
            logits[...] = shared
        targets = micro.bring("head.targets", self.targets)
        loss, saved_loss = self.loss.forward(logits, targets, micro.factor())
        return loss if self.counts() else 0.0, (saved_norm, saved, saved_loss)

    def targets(self, micro):
        """Those of this rank's rows."""
        return micro.rows(micro.targets, self.layout, self.mesh).ravel().astype(np.int64)

    def backward(self, micro, saved, later):
        """The gradient of X, of the summed loss times its factor."""
        self.mesh.trace.layer = -1
        saved_norm, saved, saved_loss = saved
        dx, rest = self.matmul.adjoint_x(saved, self.loss.backward(saved_loss, micro.factor()))
        later(self.weigh, rest)
        return self.norm.backward(dx.wait(), saved_norm, residual=None)

    def weigh(self, rest):
        if self.matmul.sums:
            return self.matmul.add_w(rest, self.table.grad)
        self.table.grad += self.matmul.adjoint_w(rest).wait()

    def counts(self):
        """Whether this rank's rows of the loss are the copy that counts."""
        split = (*row_axes(self.layout), "p")
        return all(self.mesh.coord(axis) == 0 for axis in self.mesh.sizes if axis not in split)
