"""Sharded matrix product Y[m, n] = X[m, k] W[k, n] on a mesh of ranks.

Each mesh axis shards one loop dimension of the product: m, n or k.  Each matrix lacks one of these
dimensions, and the axes that shard it are *foreign* to the matrix: all ranks along a foreign axis
compute with the same block of the matrix.  The block can be stored in one of three ways along a
foreign axis, each with a pair of adjoint collectives:

                 gather                            reduce
                 stored block -> working block     partial block -> stored block
    shard        all-gather                        reduce-scatter
    replicate    nothing                           all-reduce
    own          broadcast from the owner          reduce to the owner

Each published scheme assigns axes to m, n and k, and selects a storage for each foreign axis
(hpc3d.tensor.split.SCHEMES):

    1-D (Megatron)    Split(n="x", replicate="x")     2.5-D   Split(m="z x", n="y", replicate="z")
    1-D + sequence    Split(n="x")                    3-D     Split(m="x", n="y", k="z")
    data parallel     Split(m="d", replicate="d")     FSDP    Split(m="d")

The 3-D scheme follows Bian, Xu, Wang and You, arXiv:2105.14450, and works on any cuboid of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import dropwhile
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array, SavedActivation, SavedWeight
from hpc3d.comm.communicator import ready
from hpc3d.ops.product import accumulate_product, product
from hpc3d.tensor.rounding import EXACT, rounded_operands
from hpc3d.tensor.split import Split

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike

    from hpc3d.comm.communicator import Pending
    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.layout import Layout
    from hpc3d.tensor.rounding import Operands

__all__ = ["Matmul", "Saved", "Split", "Summa", "sharded_matmul"]

_NONE = ""  # placeholder for a nonexistent axis, with size 1


class Saved(NamedTuple):
    """Operands X and W, saved for the backward pass.

    If `kept` contains "x" or "w", that operand is saved as a working block, i.e. after it has been
    gathered. Otherwise, it is saved as a stored block (this rank's shard), which the backward pass
    gathers again.
    """

    x: SavedActivation
    w: SavedWeight
    kept: str


class SavedForWeight(NamedTuple):
    """X and dY, saved to compute dW = X' dY.

    `dy` is a working block (gathered). `x` is a working block if `kept` contains "x", and
    otherwise a stored block.
    """

    x: Array
    dy: Array
    kept: str


class Matmul:
    """Sharded matrix product that gathers its operands; used for splits without panels.

    Call `sharded_matmul` to create it. `reduced` is the type in which dW is reduced from the first
    data axis on, or `None` for the type of the operands.
    """

    def __init__(
        self,
        mesh: Mesh,
        split: Split,
        keep: str,
        transposed: bool,
        rounded: Operands,
        fused: bool,
        reduced: DTypeLike | None = None,
    ) -> None:
        self.mesh, self.split, self.keep, self.transposed = mesh, split, keep, transposed
        self.reduced = None if reduced is None else np.dtype(reduced)
        splits = split, split.of_gradient  # ZeRO-2 shards only dW over the data axis
        self.w_layout, self.dw_layout = (
            each.w_transposed if transposed else each.w for each in splits
        )
        self.axes = {
            "m": _in_order(mesh, split.m, self.dw_layout),
            "n": _in_order(mesh, split.n, split.x),
            "k": _in_order(mesh, split.k, split.y),
        }
        self.deferred = set(split.defer.split())
        self.rounded = rounded
        # An epilogue can be fused into a product only if the product is not a partial sum.
        self.y_is_complete = fused and self.complete("k")
        self.dw_is_complete = fused and self.complete("m")
        self.is_local = self.y_is_complete and self.dw_is_complete and self.complete("n")
        self.prefetch: Any = None  # hpc3d.tensor.prefetch.Prefetch

    def forward_saving(self, x: Array, w: Array, **epilogue: Any) -> tuple[Array, Saved]:
        """Return Y = X W, and the data saved for `backward_input`.

        If `y_is_complete` is true, the `epilogue` (see hpc3d.ops.product) may add a bias and a
        residual, and apply GELU.
        """
        gathered_x, gathered_w = self._gather_x(x), self._gather_w(w, x)
        a, b = gathered_x.wait(), gathered_w.wait()
        right = self._rounded_w(b)
        y = self.multiply(self.rounded.x(a), right, self.axes["k"], **epilogue)
        saved = Saved(a if "x" in self.keep else x, b if "w" in self.keep else w, self.keep)
        return self.reduce(y, self.split.y, self.axes["k"]).wait(), saved

    def backward_input(
        self, saved: Saved, dy: Array, **epilogue: Any
    ) -> tuple[Pending, SavedForWeight]:
        """Compute dX = dY W' and start its reduction, the adjoint of gathering X.

        Returns a `Pending` whose `wait` returns dX, and the operands saved for `backward_weight`.
        """
        dy = self.rounded.dy(self.gather(dy, self.split.y, self.axes["k"]).wait())
        b = saved.w if "w" in saved.kept else self._gather_w(saved.w, saved.x).wait()
        dx = self.multiply(dy, self._rounded_w(b).T, self.axes["n"], **epilogue)
        rest = SavedForWeight(saved.x, dy, saved.kept)
        return self.reduce(dx, self.split.x, self.axes["n"]), rest

    def backward_weight(self, rest: SavedForWeight) -> Pending:
        """Compute dW = X' dY and start its reduction, the adjoint of gathering W.

        Returns a `Pending` whose `wait` returns dW. The method can be called at any time after
        `backward_input`.
        """
        a, b = self._factors_of_dw(rest)
        dw = self.multiply(a, b, self.axes["m"], dtype=self.dw_type(a.dtype))
        return self.reduce_w(dw)

    def reduce_w(self, dw: Array) -> Pending:
        """Start the reduction of dW; return a `Pending` whose `wait` returns the stored block."""
        return self.reduce(dw, self.dw_layout, self.axes["m"], self.deferred, self.reduced)

    def gather(self, block: Array, layout: Layout, foreign: Sequence[str]) -> Pending:
        """Start to gather a stored block along the `foreign` axes.

        Returns a `Pending` whose `wait` returns the working block.
        """
        pending = ready(block)
        for axis in reversed(foreign):
            comm = self.mesh.comm(axis)
            if axis in layout.owned:
                pending = comm.broadcast(pending.wait(), layout.owner(axis, self.mesh))
            elif (dim := layout.dim_of(axis)) is not None:
                pending = comm.all_gather(pending.wait(), dim)
        return pending

    def reduce(
        self,
        block: Array,
        layout: Layout,
        foreign: Sequence[str],
        deferred: Collection[str] = (),
        reduced: np.dtype | None = None,
    ) -> Pending:
        """Start the reduction of partial sums over the `foreign` axes, the adjoint of `gather`.

        Returns a `Pending` whose `wait` returns the stored block. If `reduced` is given, partial
        sums are converted to this type before they are reduced along a data axis.
        """
        pending = ready(block)
        for axis in foreign:
            comm = self.mesh.comm(axis)
            if axis in layout.owned:
                pending = comm.reduce(pending.wait(), layout.owner(axis, self.mesh))
            elif (dim := layout.dim_of(axis)) is not None:
                dtype = reduced if axis in self.mesh.data_axes else None
                pending = comm.reduce_scatter(self._sent(pending.wait(), layout, axis, dtype), dim)
            elif axis not in deferred:
                pending = comm.all_reduce(pending.wait())
        return pending

    def _sent(self, block: Array, layout: Layout, axis: str, dtype: np.dtype | None) -> Array:
        """Return `block` in the type `dtype`, unless it is `None`, with equal shards along `axis`.

        If necessary, rows of zeros are appended.
        """
        inner = dropwhile(axis.__ne__, layout.padded)
        rows, dtype = len(block), block.dtype if dtype is None else dtype
        missing = -rows % self.mesh.count(inner)
        if not missing and block.dtype == dtype:
            return block
        whole = self.mesh.comm(axis).buffer((rows + missing, *block.shape[1:]), dtype)
        whole[:rows] = block
        if missing:
            whole[rows:] = 0
        return whole

    def forward(self, x: Array, w: Array) -> Array:
        """Return Y = X W.

        Parameters
        ----------
        x, w
            Stored blocks of X[m, k] and W[k, n].

        Returns
        -------
        array
            Stored block of Y[m, n].
        """
        return self.forward_saving(x, w)[0]

    def backward(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        """Return the gradients dX = dY W' and dW = X' dY.

        Parameters
        ----------
        x, w, dy
            Stored blocks of X[m, k], W[k, n] and dY[m, n].

        Returns
        -------
        dx, dw : array
            Stored blocks of dX[m, k] and dW[k, n].
        """
        return self.backward_saved(Saved(x, w, ""), dy)

    def backward_saved(self, saved: Saved, dy: Array) -> tuple[Array, Array]:
        """Return the stored blocks of dX and dW, given the saved operands and dY."""
        dx, rest = self.backward_input(saved, dy)
        dw = self.backward_weight(rest)
        return dx.wait(), dw.wait()

    def add_w(self, rest: SavedForWeight, grad: Array, bias_grad: Array | None = None) -> None:
        """Add dW to `grad`; `dw_is_complete` must be true.

        `bias_grad` may only be given if `y_is_complete` is true as well; the column sums of dY
        are added to it.
        """
        a, b = self._factors_of_dw(rest)
        with self._span(a, b):
            accumulate_product(grad, a, b, bias_grad)

    def multiply(
        self,
        a: Array,
        b: Array,
        foreign: Sequence[str],
        out: Any = None,
        dtype: np.dtype | None = None,
        **epilogue: Any,
    ) -> Array:
        """Write the product of a and b to `out` (default: the send buffer of its reduction).

        The send buffer has the type `dtype` (default: the type of a).
        """
        if out is None:
            dtype = a.dtype if dtype is None else dtype
            out = self.send_buffer((*a.shape[:-1], b.shape[-1]), dtype, foreign)
        with self._span(a, b):
            product(a, b, out, **epilogue)
        self.mesh.guard.product(a, b, out)
        return out

    def send_buffer(
        self, shape: tuple[int, ...], dtype: DTypeLike, foreign: Sequence[str]
    ) -> Array:
        """Return an array that the first reduction over the `foreign` axes need not copy."""
        return self.mesh.comm(next(iter(foreign), _NONE)).buffer(shape, dtype)

    def dw_type(self, dtype: np.dtype) -> np.dtype:
        """Return the type of dW before its reduction, for operands of type `dtype`.

        If the first reduction is along a data axis and `reduced` is wider than `dtype`, the
        product is not rounded to `dtype`.
        """
        first = next((axis for axis in self.axes["m"] if axis not in self.deferred), _NONE)
        if self.reduced is None or first not in self.mesh.data_axes:
            return dtype
        return max(dtype, self.reduced, key=lambda each: each.itemsize)

    @property
    def moves_w(self) -> bool:
        """True if the gather of W requires communication."""
        stored = self.w_layout.axes
        return any(self.mesh.size(axis) > 1 and axis in stored for axis in self.axes["m"])

    def _gather_x(self, x: Array) -> Pending:
        return self.gather(x, self.split.x, self.axes["n"])

    def start_gather_w(self, w: Array) -> Pending:
        """Start to gather W; return a `Pending` whose `wait` returns the working block."""
        return self.gather(w, self.w_layout, self.axes["m"])

    def _gather_w(self, w: Array, x: Any) -> Pending:
        """Start to gather W, and return it without the padding of its shards.

        `x` is a block of X, which has as many columns as the working block of W has rows. A W that
        is stored transposed has no padding.
        """
        pending = self.prefetch.gathered(self, w) if self.prefetch else self.start_gather_w(w)
        if self.transposed or not self.w_layout.padded:
            return pending
        rows = self._rows_of_w(x)
        return pending.then(lambda block: block[:rows])

    def _rows_of_w(self, x: Any) -> int:
        """Return the number of rows of a working block of W, given the block `x` of X."""
        return x.shape[-1]

    def _rounded_w(self, block: Array) -> Array:
        """Round a working block of W, and return it as [k, n] even if it is stored transposed."""
        block = self.rounded.w(block)
        return block.T if self.transposed else block

    def _factors_of_dw(self, rest: SavedForWeight) -> tuple[Array, Array]:
        """Return the factors of dW: X' and dY, or dY' and X if W is stored transposed."""
        x = self.rounded.x(rest.x if "x" in rest.kept else self._gather_x(rest.x).wait())
        left, right = (rest.dy, x) if self.transposed else (x, rest.dy)
        return left.T, right

    def complete(self, letter: str) -> bool:
        """Return True if partial sums over dimension `letter` (m, n or k) need no reduction now.

        This is the case if every mesh axis that shards the dimension has size 1 or defers its
        reduction to the end of the step.
        """
        return all(
            self.mesh.size(axis) == 1 or axis in self.deferred for axis in self.axes[letter]
        )

    def _span(self, a: Array, b: Array) -> AbstractContextManager[Any]:
        """Return the trace span of a product [m, k] x [k, n], whose name contains m, n and k.

        For stacked experts, m is the total number of rows of all experts.
        """
        k, n = b.shape[-2:]
        name = f"gemm m={a.size // k if k else 0} n={n} k={k}"
        return self.mesh.trace.span(name, "gemm", 2 * a.size * n)


def _in_order(mesh: Mesh, axes: str, layout: Layout) -> list[str]:
    """Return the foreign axes with several ranks, in the order in which a block is reduced.

    Axes that shard the block come first, in the order of the layout. Axes along which one rank
    owns the block follow, because the owner is computed from the row index of the resulting shard.
    Axes that replicate the block come last, so that their all-reduces process the smallest block.
    """
    last = [axis for axis in axes.split() if axis not in layout.axes]
    foreign = [axis for axis in axes.split() if mesh.size(axis) > 1]
    return sorted(foreign, key=[*layout.axes, *last].index)


class Summa(Matmul):
    """SUMMA with stationary Y: Y[m_x, n_y] = X[m_x, k_y] W[k_x, n_y], one panel of k at a time.

    Each panel of X is owned by one rank along y, and each panel of W by one rank along x.  Owners
    broadcast panels in the forward pass; gradients are reduced to the owners in the backward pass
    (van de Geijn and Watts 1997; Optimus, arXiv:2104.05343).  Only one panel of X and one of W are
    gathered at a time, so no working block is saved.  If other axes shard W, such as the data axis
    with ZeRO-3, W is first gathered along them.  Stored blocks are rounded to float8, if enabled,
    before their panels are broadcast.  No epilogue is fused into the products of panels.
    """

    def __init__(
        self, mesh: Mesh, split: Split, rounded: Operands, reduced: DTypeLike | None = None
    ) -> None:
        how: dict[str, Any] = {"transposed": False, "rounded": rounded, "fused": False}
        super().__init__(mesh, split, keep="", **how, reduced=reduced)
        self.along_x, self.along_w = split.panels, next(iter(self.w_layout[0]), _NONE)
        self.others = [axis for axis in self.axes["m"] if axis != self.along_w]
        self.panels = lcm(mesh.size(self.along_x), mesh.size(self.along_w))

    def forward_saving(self, x: Array, w: Array, **epilogue: Any) -> tuple[Array, Saved]:
        assert not epilogue
        y = self.mesh.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)
        whole = self.rounded.w(self._gather_w(w, x).wait())
        rounded = self.rounded.x(x)
        for panel in range(self.panels):
            a, b = self._panel_of_x(rounded, panel), self._panel_of_w(whole, panel)
            y += self.multiply(a.wait(), b.wait(), ())
        return y, Saved(x, w, "")

    def backward_input(
        self, saved: Saved, dy: Array, **epilogue: Any
    ) -> tuple[Pending, SavedForWeight]:
        assert not epilogue
        dx = self.mesh.empty(saved.x.shape, saved.x.dtype)
        w = self.rounded.w(self._gather_w(saved.w, saved.x).wait())
        dy = self.rounded.dy(dy)
        for panel in range(self.panels):
            b = self._panel_of_w(w, panel).wait()
            self._reduce_to_owner(
                self.multiply(b, dy.T, [self.along_x]), dx.T, self.along_x, panel
            )
        return ready(dx), SavedForWeight(saved.x, dy, "")

    def backward_weight(self, rest: SavedForWeight) -> Pending:
        x, dy = self.rounded.x(rest.x), rest.dy
        dtype = self.dw_type(dy.dtype)
        dw = self.mesh.empty((self._rows_of_w(x), *dy.shape[1:]), dtype)
        for panel in range(self.panels):
            a = self._panel_of_x(x, panel).wait()
            self._reduce_to_owner(
                self.multiply(a.T, dy, [self.along_w], dtype=dtype), dw, self.along_w, panel
            )
        return self.reduce(dw, self.dw_layout, self.others, self.deferred, self.reduced)

    def _rows_of_w(self, x: Array) -> int:
        return x.shape[-1] * self.mesh.size(self.along_x) // self.mesh.size(self.along_w)

    def start_gather_w(self, w: Array) -> Pending:
        return self.gather(w, self.w_layout, self.others)

    def _panel_of_x(self, x: Array, panel: int) -> Pending:
        owner, part = self._panel_slice(self.along_x, x.shape[-1], panel)
        return self.mesh.comm(self.along_x).broadcast(x[..., part], owner)

    def _panel_of_w(self, w: Array, panel: int) -> Pending:
        owner, part = self._panel_slice(self.along_w, w.shape[0], panel)
        return self.mesh.comm(self.along_w).broadcast(w[part], owner)

    def _reduce_to_owner(self, partial: Array, stored: Array, axis: str, panel: int) -> None:
        """Reduce `partial` along `axis` to the owner of the panel, which writes the sum to the
        panel's rows of `stored`."""
        owner, part = self._panel_slice(axis, stored.shape[0], panel)
        total = self.mesh.comm(axis).reduce(partial, owner).wait()
        if self.mesh.coord(axis) == owner:
            stored[part] = total

    def _panel_slice(self, axis: str, size: int, panel: int) -> tuple[int, slice]:
        """Return the owner of a panel along `axis`, and the panel's slice of the owner's block."""
        each = self.panels // self.mesh.size(axis)
        owner, number = divmod(panel, each)
        width = size // each
        return owner, slice(number * width, (number + 1) * width)


def sharded_matmul(
    mesh: Mesh,
    split: Split,
    keep: str = "xw",
    transposed: bool = False,
    stacked: bool = False,
    scales: str | None = None,
    reduced: DTypeLike | None = None,
) -> Matmul:
    """Create a sharded matrix product for a `split` on a `mesh`.

    Parameters
    ----------
    mesh, split
        Mesh of this rank, and the axes that shard m, n and k, such as `hpc3d.SCHEMES["3d"]`.
    keep
        Operands saved gathered for the backward pass (none with panels).  On a q^3 cube, "xw"
        stores 1/q^2 of X and W per rank, with six collectives; "" stores 1/q^3, with eight.
    transposed, stacked
        True if W is stored as [n, k], and for one product per expert, X[m, e, k] W[k, e, n].
    scales, reduced
        Scales of float8 operands ("block" or "tensor"), and the type of the reduction of dW.

    Returns
    -------
    Matmul
        Matrix product with the methods `forward(x, w)` and `backward(x, w, dy)`.

    Raises
    ------
    ValueError
        If `transposed` is true and the split has panels.
    """
    if split.panels and transposed:
        raise ValueError("panels require a weight stored as [k, n]; use Split.without_panels()")
    dense = not (split.panels or stacked)
    rounded = EXACT if scales is None else rounded_operands(mesh, split, scales, dense)
    if split.panels:
        return Summa(mesh, split, rounded, reduced)
    fused = mesh.pool.on_device and dense and scales is None
    return Matmul(mesh, split, keep, transposed, rounded, fused, reduced)
