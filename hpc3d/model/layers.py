"""Layers with hand-written `forward(x)` and `backward(dy, saved, defer)`.

`forward` returns y and the data saved for `backward`. A layer stores its parameters and mesh axes,
but no state of individual passes. A layer may therefore be used several times, in parallel
branches, or by several microbatches in flight. Gradients are accumulated in `Parameter.grad`. The
computation of weight gradients is passed to `defer`, which runs it immediately or later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.arrays.pool import writeable
from hpc3d.comm.mesh import EXPERTS
from hpc3d.ops.embedding import gather_rows, order_of, scatter_rows
from hpc3d.ops.norm import (
    combine_moments,
    moments,
    norm,
    norm_grad,
    normalise,
    normalise_grad,
    normalise_sums,
    row_squares,
)
from hpc3d.ops.product import accumulate
from hpc3d.ops.random import Mask
from hpc3d.ops.rows import add_bias, dropped, scale_and_shift, sum_rows
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import sharded_matmul

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.matmul import Matmul, Saved, SavedForWeight
    from hpc3d.tensor.split import Split


def row_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes that shard the rows of a block.

    Along these axes, each rank has a partial sum of the gradient of a bias or norm weight.
    """
    return (*layout[0], *layout.owned)


def immediately(function: Callable[..., object], *args: Any) -> None:
    """Call `function` immediately. This is the default `defer`, which defers nothing."""
    function(*args)


def owned(mesh: Mesh, y: Array) -> Array:
    """Return y, or a copy of y if y is stored in memory that other ranks read."""
    if writeable(y):
        return y
    out = mesh.empty(y.shape, y.dtype)
    out[...] = y
    return out


class Linear:
    """Linear layer Y = X W + b, or Y = X W if not `biased`, computed by a sharded `matmul`.

    If W has the shape [inputs, experts, outputs], the layer is a stack of linear layers, with the
    arrays X[m, E/e, k], W[k, E/e, n] and b[1, E/e, n] for the E/e experts of a rank.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        shape: tuple[int, ...],
        matmul: Matmul,
        std: float,
        biased: bool = True,
        interleaved: tuple[int, int] = (1, 1),
    ) -> None:
        self.mesh, self.matmul, split = matmul.mesh, matmul, matmul.split
        how: dict[str, Any] = {"std": std, "decay": True, "interleaved": interleaved}
        how |= gradient(matmul)
        w, b, outputs, replicas = split.w, split.y.columns, shape[1:], None
        if len(shape) == 3:
            w, how["grad_layout"] = (each.of_experts(EXPERTS) for each in (w, how["grad_layout"]))
            b, outputs = Layout("", EXPERTS, " ".join(b[0])), (1, *outputs)
            replicas = self.mesh.expert_data_axes
        self.weight = parameters.add(f"{name}.weight", shape, w, replicas=replicas, **how)
        rows = row_axes(split.y)
        self.bias = parameters.add(f"{name}.bias", outputs, b, rows, replicas) if biased else None

    @property
    def adds_residual(self) -> bool:
        """True if `forward` can add a residual, i.e. if Y needs no reduction."""
        return self.matmul.y_is_complete

    def forward(self, x: Array, residual: Array | None = None) -> tuple[Array, Saved]:
        """Return Y, plus `residual` if given, and the data saved for the backward pass.

        `residual` may be given only if `adds_residual` is True.
        """
        bias = self.bias.value if self.bias else None
        return self.affine(x, self.weight.value, bias, residual)

    def affine(
        self, x: Array, w: Array, bias: Array | None, residual: Array | None = None
    ) -> tuple[Array, Saved]:
        """Compute Y = X W + b with the given W and b; return Y and the data saved for backward."""
        if self.matmul.y_is_complete:
            return self.matmul.forward_saving(x, w, bias=bias, residual=residual)
        y, saved = self.matmul.forward_saving(x, w)
        if bias is None:
            return owned(self.mesh, y), saved
        out = y if writeable(y) else self.mesh.empty(y.shape, y.dtype)
        shape = len(y), bias.size
        with self.mesh.trace.span("bias"):
            add_bias(y.reshape(shape), bias.ravel(), out.reshape(shape))
        return out, saved

    def activated(self, x: Array) -> tuple[Array, Saved, Array]:
        """Compute Y = x W + b; return GELU(Y), the data saved for the backward pass, and Y.

        Bias and GELU are fused into the matrix product. x must be a matrix.
        """
        assert self.bias
        h = self.mesh.empty((x.shape[0], self.bias.value.size), x.dtype)
        y, saved = self.matmul.forward_saving(
            x, self.weight.value, bias=self.bias.value, gelu_input=h
        )
        return y, saved, h

    @staticmethod
    def with_input(saved: Any, x: Array | None) -> Any:
        """Return the saved data with the stored block `x` of X, or without X if x is `None`."""
        return saved._replace(x=x, kept=saved.kept.replace("x", ""))

    def stored_w(self, saved: Any = None) -> Array:
        """Return the stored block of W, or the block that the forward pass saved in `saved`."""
        return self.weight.value if saved is None else saved.w

    def backward(
        self, dy: Array, saved: Saved, defer: Callable[..., None] = immediately, **epilogue: Any
    ) -> Array:
        dx, rest = self.matmul.backward_input(saved, dy, **epilogue)
        defer(self.weight_grad, dy, rest)
        return dx.wait()

    def weight_grad(self, dy: Array, rest: SavedForWeight) -> None:
        """Accumulate the weight and bias gradients."""
        if self.matmul.y_is_complete and self.matmul.dw_is_complete:
            sums = self.bias.grad if self.bias else None
            self.matmul.add_w(rest, self.weight.grad, sums)
        else:
            self.reduce_weight_grad(dy, rest)

    def reduce_weight_grad(self, dy: Array, rest: SavedForWeight) -> None:
        """Compute and reduce dW; with prefetch, accumulate it after the next product."""
        if self.matmul.prefetch:
            pending = self.matmul.backward_weight(rest)
            self.matmul.prefetch.later(pending.then(partial(self.add_grads, dy)))
        else:
            self.add_grads(dy, self.matmul.backward_weight(rest).wait())

    def add_grads(self, dy: Array, dw: Array) -> None:
        """Accumulate dW and the bias gradient."""
        with self.mesh.trace.span("gradient"):
            accumulate(self.weight.grad, dw)
            if self.bias:
                grad = self.bias.grad
                grad += sum_rows(dy.reshape(len(dy), grad.size)).reshape(grad.shape)


def gradient(matmul: Matmul) -> dict[str, Any]:
    """Return the keyword arguments of `Parameters.add` that describe a weight gradient.

    The arguments are the layout of the gradient and the axes over which the gradient is reduced at
    the end of a step.
    """
    return {"grad_layout": matmul.dw_layout, "partial": tuple(matmul.split.defer.split())}


class NormSaved(NamedTuple):
    """Data saved for the backward pass of a norm: the arguments of `norm_grad`.

    On a CPU, the rows are (x - mean) / std, and `scales` is 1 / std.  On a GPU, unless features
    are sharded, the rows are X, and `scales` holds the mean and 1 / std.
    """

    rows: SavedActivation
    scales: Array | tuple
    gamma: Array


class NormInput(NamedTuple):
    """Data saved for a recomputed norm: its input X."""

    x: SavedActivation


class LayerNorm:
    """LayerNorm y = (x - mean) / sqrt(var + epsilon) gamma + beta over the columns of X[m, k]."""

    EPSILON = 1e-5
    INITIAL = 1.0  # value of gamma
    centred = True

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        name: str,
        width: int,
        layout: Layout,
        epsilon: float = EPSILON,
    ) -> None:
        self.mesh, self.width, self.epsilon = mesh, width, epsilon
        self.axes = [axis for axis in layout[1] if mesh.size(axis) > 1]
        how: dict[str, Any] = {"layout": layout.columns, "partial": row_axes(layout)}
        self.gamma = parameters.add(f"{name}.gamma", (width,), mean=self.INITIAL, **how)
        self.beta = parameters.add(f"{name}.beta", (width,), **how) if self.centred else None

    def forward(self, x: Array) -> tuple[Array, NormSaved]:
        """Return y and the data saved for the backward pass."""
        with self.mesh.trace.scope(part="norm"):
            return self._normalized(x)

    def _factors(self, gamma: Array) -> Array:
        """Return the factors of the normalized features."""
        return gamma

    def _normalized(self, x: Array) -> tuple[Array, NormSaved]:
        weights, beta = self.gamma.value, self.beta and self.beta.value
        gamma = self._factors(weights)
        if not self.axes:
            with self.mesh.trace.span("norm", "norm"):
                y, (rows, scales, _) = norm(x, gamma, beta, self.epsilon, self.mesh.empty)
            return y, NormSaved(rows, scales, weights)
        mean, squares = self._moments(x)
        rstd = 1 / np.sqrt(squares / self.width + self.epsilon)
        n, y = self.mesh.empty(x.shape, x.dtype), self.mesh.empty(x.shape, x.dtype)
        with self.mesh.trace.span("norm", "norm"):
            normalise(x, mean, rstd, gamma, beta, n, y)
        return y, NormSaved(n, rstd, weights)

    def _moments(self, x: Array) -> tuple[Array | None, Array]:
        """Return the mean and the sum of squared deviations of each row over all its features."""
        with self.mesh.trace.span("norm", "norm"):
            mean, squares = moments(x)
        count = x.shape[1]
        for axis in self.axes:
            parts = self.mesh.comm(axis).all_gather(np.stack([mean, squares])[None]).wait()
            mean, squares = combine_moments(parts, count)
            count *= self.mesh.size(axis)
        return mean, squares

    def backward(self, dy: Array, saved: NormSaved, residual: Array | None) -> Array:
        """Return the gradient of x, with `residual` added if it is not `None`."""
        with self.mesh.trace.scope(part="norm"):
            return self._input_grad(dy, saved, residual)

    def _input_grad(self, dy: Array, saved: NormSaved, residual: Array | None) -> Array:
        dbeta = self.beta and self.beta.grad
        n, rstd, gamma = saved._replace(gamma=self._factors(saved.gamma))
        if not self.axes:
            saved = NormSaved(n, rstd, gamma)
            with self.mesh.trace.span("norm", "norm"):
                return norm_grad(dy, saved, residual, self.gamma.grad, dbeta, self.mesh.empty)
        with self.mesh.trace.span("norm", "norm"):
            sums, *vectors = normalise_sums(n, dy, gamma, self.centred)
        for total, vector in zip((self.gamma.grad, dbeta), vectors, strict=True):
            if total is not None:
                total += vector
        for axis in self.axes:
            sums = self.mesh.comm(axis).all_reduce(sums).wait()
        dx = self.mesh.empty(n.shape, n.dtype)
        means = sums / self.width
        with self.mesh.trace.span("norm", "norm"):
            normalise_grad(n, rstd, dy, gamma, means, residual, dx)
        return dx


class RMSNorm(LayerNorm):
    """RMSNorm y = x / sqrt(mean(x^2) + epsilon) gamma (Zhang and Sennrich 2019, arXiv:1910.07467).

    RMSNorm needs one sum per row, whereas LayerNorm needs two.
    """

    centred = False

    def _moments(self, x: Array) -> tuple[Array | None, Array]:
        with self.mesh.trace.span("norm", "norm"):
            squares = row_squares(x)
        for axis in self.axes:
            squares = self.mesh.comm(axis).all_reduce(squares).wait()
        return None, squares


class OffsetRMSNorm(RMSNorm):
    """RMSNorm with the factors 1 + gamma, whose initial values are 1, as in Gemma.

    In 16-bit types, the sums 1 + gamma are rounded.
    """

    INITIAL = 0.0

    def _factors(self, gamma: Array) -> Array:
        with self.mesh.trace.span("norm", "norm"):
            return scale_and_shift(gamma, 1.0, 1.0, self.mesh.empty(gamma.shape, gamma.dtype))


class Dropout:
    """Scale each element by 0 or 1 / (1 - rate); the backward pass regenerates the factors.

    Random number e of the stream (seed, name, step) determines whether element e of the full-batch
    tensor is dropped. The dropped elements depend neither on the mesh nor on the number of
    microbatches.
    """

    def __init__(self, mesh: Mesh, name: str, layout: Layout, spec: ModelSpec) -> None:
        self.mesh, self.name, self.layout = mesh, name, layout
        self.rate, self.seed, self.context = spec.sizes.dropout, spec.seed, spec.context

    def mask(self, micro: Microbatch, columns: int) -> Mask | None:
        """Return the dropout `Mask` of this rank's block of a tensor with one row per token.

        Returns `None` if nothing is dropped: at rate 0, or outside of training.
        """
        if not self.rate or not micro.training:
            return None
        _, block = self.layout.slices((micro.tokens.size, columns), self.mesh)
        rows = self.rows(micro)
        if not isinstance(rows, range):
            rows = micro.cached(f"{self.layout}.rows", self.rows)
        key = micro.dropout_key(self.name, self.seed)
        return Mask(key, self.rate, rows, range(block.start, block.stop), columns)

    def rows(self, micro: Microbatch) -> range | np.ndarray:
        """Return the indices of this rank's microbatch rows in the full-batch tensor."""
        (here,) = self.layout.rows.slices((micro.tokens.size,), self.mesh)
        return self.context.rows(here, micro.sequences, micro.first)

    def apply(self, x: Array, micro: Microbatch, columns: int) -> Array:
        """Multiply x, or its gradient in the backward pass, by the scaled dropout mask."""
        mask = self.mask(micro, columns)
        if mask is None:
            return x
        with self.mesh.trace.span("dropout"):
            return dropped(x, mask, self.mesh.empty(x.shape, x.dtype))


class EmbeddingSaved(NamedTuple):
    """Data saved by a lookup: the row indices, and the shape of the gathered table block."""

    index: Array  # type: ignore[assignment]  # shadows tuple.index
    shape: tuple


class Embedding:
    """Embedding lookup, expressed as the product of a one-hot X[m, v] and W[v, h].

    The vocabulary v is sharded over the axes of k in the product's `split`. The result Y[m, h] has
    the layout of the first block's input, and is multiplied by `scale`. `reduced` is the type in
    which the data axes reduce dW in the backward pass (`sharded_matmul`).
    """

    def __init__(
        self,
        mesh: Mesh,
        table: Parameter,
        split: Split,
        reduced: str | None = None,
        scale: float = 1.0,
    ) -> None:
        self.mesh, self.table, self.split, self.scale = mesh, table, split, scale
        self.matmul = sharded_matmul(mesh, split, reduced=reduced)

    def index(self, micro: Microbatch) -> np.ndarray:
        """Return each token's row index in the table block that this rank gathers.

        The index of a token is out of range if its row is in another rank's block.
        """
        tokens = micro.rows(micro.tokens, Layout(self.split.m), self.mesh)
        axes = self.split.k.split()
        first = self.mesh.index(axes) * (self.table.shape[0] // self.mesh.count(axes))
        return tokens.reshape(-1).astype(np.int64) - first

    def order(self, micro: Microbatch) -> np.ndarray:
        """Return the permutation that sorts this rank's tokens by their table row (`index`)."""
        return order_of(self.index(micro))

    def forward(self, micro: Microbatch) -> tuple[Array, EmbeddingSaved]:
        """Return the embeddings Y and the data saved for the backward pass."""
        m, k = self.matmul.axes["m"], self.matmul.axes["k"]
        table = self.matmul.gather(self.table.value, self.split.w, m).wait()
        index = micro.cached("embedding.index", self.index)
        with self.mesh.trace.span("embedding", "lookup"):
            partial = self._scaled(gather_rows(table, index))
        saved = EmbeddingSaved(index, table.shape)
        return self.matmul.reduce(partial, self.split.y, k).wait(), saved

    def _scaled(self, rows: Array) -> Array:
        return rows if self.scale == 1 else scale_and_shift(rows, self.scale, 0.0, rows)

    def backward(self, dy: Array, saved: EmbeddingSaved, micro: Microbatch) -> None:
        order = micro.cached("embedding.order", self.order)
        dy = self.matmul.gather(dy, self.split.y, self.matmul.axes["k"]).wait()
        with self.mesh.trace.span("embedding", "lookup"):
            partial = self._scaled(scatter_rows(dy, saved.index, order, saved.shape))
        dtable = self.matmul.reduce_w(partial)
        self.table.grad += dtable.wait()
