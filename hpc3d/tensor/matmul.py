"""Y[m, n] = X[m, k] W[k, n] over a mesh of ranks.

Each mesh axis splits one loop of the product: m, n or k.  Each matrix lacks one of the three
letters; the axes on that letter are *foreign* to it: the ranks along them work on the same block.
How a foreign axis stores the block is a choice, and each choice is a pair of adjoint moves:

                 gather                            reduce
                 stored block -> working block     partial block -> stored block
    shard        all-gather                        reduce-scatter
    replicate    nothing                           all-reduce
    own          broadcast from the owner          reduce to the owner

and every published scheme is a choice of letters (hpc3d.tensor.split.SCHEMES):

    1-D (Megatron)    Split(n="x", replicate="x")     2.5-D   Split(m="z x", n="y", replicate="z")
    1-D + sequence    Split(n="x")                    3-D     Split(m="x", n="y", k="z")
    data parallel     Split(m="d", replicate="d")     FSDP    Split(m="d")

The 3-D scheme is that of Bian, Xu, Wang and You, arXiv:2105.14450, on any cuboid of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.comm.communicator import ready
from hpc3d.ops.product import accumulate_product, product
from hpc3d.tensor.rounding import EXACT, rounded_operands
from hpc3d.tensor.split import Split

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hpc3d.arrays.array import Array
    from hpc3d.comm.communicator import Pending
    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.layout import Layout
    from hpc3d.tensor.rounding import Operands

__all__ = ["Matmul", "Saved", "Split", "Summa"]

_NONE = ""  # an axis that no mesh has: of size 1


class Saved(NamedTuple):
    """X and W as forward leaves them: those of `kept` as working blocks, the others as stored."""

    x: Array
    w: Array
    kept: str


class SavedForWeight(NamedTuple):
    """What the gradient of W is made of: X as in `Saved`, and the working block of dY."""

    x: Array
    dy: Array
    kept: str


class Matmul:
    """The product of a `split` on a `mesh`.

    `keep` names the operands whose working blocks are saved for backward.  "xw": six collectives
    for forward and backward instead of eight, and 1/q^2 of the matrices instead of 1/q^3 in
    between.  A `transposed` weight is stored as [n, k].  Of `stacked` products, one an expert, all
    arrays have the experts as their middle dim, X[m, e, k] W[k, e, n]: what moves are rows.  With
    `scales` the operands are rounded to float8 (hpc3d.tensor.rounding), after they have moved.
    """

    def __new__(
        cls,
        mesh: Mesh,
        split: Split,
        keep: str = "xw",
        transposed: bool = False,
        stacked: bool = False,
        scales: str | None = None,
    ) -> Matmul:
        return object.__new__(Summa if split.panels else cls)

    def __init__(
        self,
        mesh: Mesh,
        split: Split,
        keep: str = "xw",
        transposed: bool = False,
        stacked: bool = False,
        scales: str | None = None,
    ) -> None:
        self.mesh, self.split, self.keep, self.transposed = mesh, split, keep, transposed
        self.w_layout, self.dw_layout = _weight_layouts(split, transposed)
        self.axes = {
            "m": _in_order(split.m, self.dw_layout),
            "n": _in_order(split.n, split.x),
            "k": _in_order(split.k, split.y),
        }
        self.deferred = set(split.defer.split())
        # Where a product on a device is Y or dW itself, what is added to these is its epilogue.
        fused = mesh.pool.on_device and not (split.panels or stacked or scales)
        self.y_is_complete = fused and self.complete("k")
        self.dw_is_complete = fused and self.complete("m")
        self.is_local = self.y_is_complete and self.dw_is_complete and self.complete("n")
        self.scales = scales
        self.coded = scales == "tensor" and mesh.pool.float8 and not (split.panels or stacked)

    @cached_property
    def rounded(self) -> Operands:
        """How X, W and dY are rounded."""
        if self.scales is None:
            return EXACT
        return rounded_operands(self.mesh, self.scales, self.coded, **self.cuts())

    def cuts(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """The axes that cut the rows and those that cut the columns of what is rounded."""
        m, n, k = (axes.split() for axes in (self.split.m, self.split.n, self.split.k))
        return {"x": (m, k), "w": (k, n), "dy": (m, n)}

    def complete(self, letter: str) -> bool:
        """Whether no product is a partial sum over the axes of a letter, of those not deferred."""
        return all(
            self.mesh.size(axis) == 1 or axis in self.deferred for axis in self.axes[letter]
        )

    @property
    def moves_w(self) -> bool:
        """Whether a rank's working block of W is made of what several ranks store."""
        layout = self.w_layout
        stored = {axis for dim in layout for axis in dim} | {*layout.owned}
        return any(self.mesh.size(axis) > 1 and axis in stored for axis in self.axes["m"])

    def forward(self, x: Array, w: Array) -> Array:
        """The stored block of Y from the stored blocks of X and W."""
        return self.forward_saving(x, w)[0]

    def backward(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        """The stored blocks of dX and dW."""
        return self.backward_saved(Saved(x, w, ""), dy)

    def forward_saving(self, x: Array, w: Array, **epilogue: Any) -> tuple[Array, Saved]:
        """Y, and what `backward_saved` needs of X and W.  Where `y_is_complete`, the `epilogue` of
        a product (hpc3d.ops.product) may have a bias, a residual and GELU."""
        pending = self._gather_x(x), self._gather_w(w)
        a, b = (block.wait() for block in pending)
        right = self.rounded.w(b)
        right = right.T if self.transposed else right
        y = self.multiply(self.rounded.x(a), right, self.axes["k"], **epilogue)
        saved = Saved(a if "x" in self.keep else x, b if "w" in self.keep else w, self.keep)
        return self.reduce(y, self.split.y, self.axes["k"]).wait(), saved

    def backward_saved(self, saved: Saved, dy: Array) -> tuple[Array, Array]:
        """dX and dW."""
        dx, rest = self.backward_input(saved, dy)
        dw = self.backward_weight(rest)
        return dx.wait(), dw.wait()

    def backward_input(
        self, saved: Saved, dy: Array, **epilogue: Any
    ) -> tuple[Pending, SavedForWeight]:
        """The pending dX = dY W', reduced the way X was gathered; and what `backward_weight`
        needs."""
        dy = self.rounded.dy(self.gather(dy, self.split.y, self.axes["k"]).wait())
        b = self.rounded.w(saved.w if "w" in saved.kept else self._gather_w(saved.w).wait())
        dx = self.multiply(dy, b if self.transposed else b.T, self.axes["n"], **epilogue)
        rest = SavedForWeight(saved.x, dy, saved.kept)
        return self.reduce(dx, self.split.x, self.axes["n"]), rest

    def backward_weight(self, rest: SavedForWeight) -> Pending:
        """The pending dW = X' dY, reduced the way W was gathered; any time after
        `backward_input`."""
        dw = self.multiply(*self._factors_of_w(rest), self.axes["m"])
        return self.reduce(dw, self.dw_layout, self.axes["m"], self.deferred)

    def add_w(self, rest: SavedForWeight, grad: Array, bias_grad: Array | None = None) -> None:
        """Add dW to `grad`, where `dw_is_complete`, and the sums of dY's columns to `bias_grad`,
        where `y_is_complete`, too."""
        a, b = self._factors_of_w(rest)
        with self._span(a, b):
            accumulate_product(grad, a, b, bias_grad)

    def _factors_of_w(self, rest: SavedForWeight) -> tuple[Array, Array]:
        """X' and dY, or dY' and X where W is transposed."""
        x = self.rounded.x(rest.x if "x" in rest.kept else self._gather_x(rest.x).wait())
        left, right = (rest.dy, x) if self.transposed else (x, rest.dy)
        return left.T, right

    def _gather_x(self, x: Array) -> Pending:
        return self.gather(x, self.split.x, self.axes["n"])

    def _gather_w(self, w: Array) -> Pending:
        return self.gather(w, self.w_layout, self.axes["m"])

    def gather(self, block: Array, layout: Layout, foreign: Sequence[str]) -> Pending:
        pending = ready(block)
        for axis in reversed(foreign):
            comm = self.mesh.comm(axis)
            if axis in layout.owned:
                pending = comm.broadcast(pending.wait(), layout.owner(axis, self.mesh))
            elif (dim := layout.dim_of(axis)) is not None:
                pending = comm.all_gather(pending.wait(), dim)
        return pending

    def reduce(
        self, block: Array, layout: Layout, foreign: Sequence[str], deferred: Collection[str] = ()
    ) -> Pending:
        pending = ready(block)
        for axis in foreign:
            comm = self.mesh.comm(axis)
            if axis in layout.owned:
                pending = comm.reduce(pending.wait(), layout.owner(axis, self.mesh))
            elif (dim := layout.dim_of(axis)) is not None:
                pending = comm.reduce_scatter(pending.wait(), dim)
            elif axis not in deferred:
                pending = comm.all_reduce(pending.wait())
        return pending

    def multiply(self, a: Array, b: Array, foreign: Sequence[str], **epilogue: Any) -> Array:
        """a b, written where the first reduction over `foreign` wants it."""
        axis = next((axis for axis in foreign if self.mesh.size(axis) > 1), _NONE)
        out = self.mesh.comm(axis).buffer((*a.shape[:-1], b.shape[-1]), a.dtype)
        with self._span(a, b):
            product(a, b, out, **epilogue)
        self.mesh.guard.product(a, b, out)
        return out

    def _span(self, a: Array, b: Array) -> AbstractContextManager[Any]:
        """The event of a product [m, k] times [k, n], whose name says its size; m counts the rows
        of all experts."""
        k, n = b.shape[-2:]
        name = f"gemm m={a.size // k if k else 0} n={n} k={k}"
        return self.mesh.trace.span(name, "gemm", 2 * a.size * n)


def _weight_layouts(split: Split, transposed: bool) -> list[Layout]:
    """How W and dW are stored; they differ where dW alone is sharded over a data axis."""
    splits = split, split.of_gradient
    return [each.w_transposed if transposed else each.w for each in splits]


def _in_order(axes: str, layout: Layout) -> list[str]:
    """Foreign axes in the order of reductions: first those that shard, as the layout has them,
    because who owns a block depends on its rows; sums over replicas last, when the block is
    small."""
    order = [*(axis for dim in layout for axis in dim), *layout.owned]
    last = [axis for axis in axes.split() if axis not in order]
    return sorted(axes.split(), key=[*order, *last].index)


class Summa(Matmul):
    """The product on X[m_x, k_y], W[k_x, n_y], Y[m_x, n_y], panel by panel of k; Y never moves.

    A panel of X is owned by one member along y and a panel of W by one member along x: broadcast
    forward, reduce backward (van de Geijn and Watts 1997; Optimus, arXiv:2104.05343).  No more
    than one panel of X and of W is ever gathered, so there is nothing to keep.  Other axes that
    shard W, such as ZeRO-3's, are gathered before.
    """

    def __init__(
        self,
        mesh: Mesh,
        split: Split,
        keep: str = "",
        transposed: bool = False,
        stacked: bool = False,
        scales: str | None = None,
    ) -> None:
        super().__init__(mesh, split, "", transposed, stacked, scales)
        if transposed:
            raise ValueError("a transposed weight has no panels: take the split's whole()")
        stored = [axis for axis in self.axes["m"] if self.w_layout.dim_of(axis) is not None]
        self.along_x, self.along_w = self.axes["n"][0], stored[0] if stored else _NONE
        self.others = [axis for axis in self.axes["m"] if axis != self.along_w]
        self.panels = lcm(mesh.size(self.along_x), mesh.size(self.along_w))

    def cuts(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        columns = self.split.n.split()
        return super().cuts() | {"x": self.split.x, "w": ([self.along_w], columns)}

    # Nothing is fused to products of panels: there is no epilogue.  Stored blocks are rounded,
    # before panels of them move.

    def forward_saving(  # type: ignore[override]
        self, x: Array, w: Array
    ) -> tuple[Array, Saved]:
        y = self.mesh.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)
        whole = self.rounded.w(self.gather(w, self.w_layout, self.others).wait())
        rounded = self.rounded.x(x)
        for panel in range(self.panels):
            a, b = self._panel_of_x(rounded, panel), self._panel_of_w(whole, panel)
            y += self.multiply(a.wait(), b.wait(), ())
        return y, Saved(x, w, "")

    def backward_input(  # type: ignore[override]
        self, saved: Saved, dy: Array
    ) -> tuple[Pending, SavedForWeight]:
        dx = self.mesh.empty(saved.x.shape, saved.x.dtype)
        w = self.rounded.w(self.gather(saved.w, self.w_layout, self.others).wait())
        dy = self.rounded.dy(dy)
        for panel in range(self.panels):
            b = self._panel_of_w(w, panel).wait()
            self._reduce_to_owner(
                self.multiply(b, dy.T, [self.along_x]), dx.T, self.along_x, panel
            )
        return ready(dx), SavedForWeight(saved.x, dy, "")

    def backward_weight(self, rest: SavedForWeight) -> Pending:
        x, dy = self.rounded.x(rest.x), rest.dy
        rows = x.shape[-1] * self.mesh.size(self.along_x) // self.mesh.size(self.along_w)
        dw = self.mesh.empty((rows, *dy.shape[1:]), dy.dtype)
        for panel in range(self.panels):
            a = self._panel_of_x(x, panel).wait()
            self._reduce_to_owner(self.multiply(a.T, dy, [self.along_w]), dw, self.along_w, panel)
        return self.reduce(dw, self.dw_layout, self.others, self.deferred)

    def _panel_of_x(self, x: Array, panel: int) -> Pending:
        owner, part = self.place(self.along_x, x.shape[-1], panel)
        return self.mesh.comm(self.along_x).broadcast(x[..., part], owner)

    def _panel_of_w(self, w: Array, panel: int) -> Pending:
        owner, part = self.place(self.along_w, w.shape[0], panel)
        return self.mesh.comm(self.along_w).broadcast(w[part], owner)

    def _reduce_to_owner(self, partial: Array, stored: Array, axis: str, panel: int) -> None:
        """Sum `partial` into the owner's part of the rows of `stored`."""
        owner, part = self.place(axis, stored.shape[0], panel)
        total = self.mesh.comm(axis).reduce(partial, owner).wait()
        if self.mesh.coord(axis) == owner:
            stored[part] = total

    def place(self, axis: str, size: int, panel: int) -> tuple[int, slice]:
        """The owner of a panel along `axis`, and the part of the owner's `size` that it is."""
        each = self.panels // self.mesh.size(axis)
        owner, number = divmod(panel, each)
        width = size // each
        return owner, slice(number * width, (number + 1) * width)
