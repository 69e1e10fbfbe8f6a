"""Tensor layouts: the mesh axes that shard each tensor dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpc3d.comm.mesh import CONTEXT

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh


class Layout(tuple):
    """Mesh axes that shard each dimension of a tensor.

    Layout("x y", "z") describes a matrix A[i_xy, j_z]: its rows i are sharded along x and y, and
    its columns j are sharded along z.  The tensor is replicated along mesh axes that are not in
    the layout.

    Parameters
    ----------
    *dims
        Axes that shard each dimension, separated by spaces, outermost first.
    owned
        Axes along which only one rank stores the block.  The other ranks store none of its rows.
    padded
        Innermost axes of the rows whose size need not divide the number of rows.  All shards have
        the same size; the last ones end with padding or contain only padding.
    sections
        Sizes of the sections of the only sharded dimension (default: one section).  Each rank
        stores its part of every section, for example of the queries, keys and values that one
        matrix produces.  All methods except `pieces` use indices in a permuted order, in which
        the parts of a rank are adjacent.
    """

    owned: tuple[str, ...]
    padded: tuple[str, ...]
    sections: tuple[int, ...]

    def __new__(
        cls, *dims: str, owned: str = "", padded: str = "", sections: Sequence[int] = ()
    ) -> Layout:
        layout = super().__new__(cls, (tuple(dim.split()) for dim in dims))
        layout.owned, layout.padded = tuple(owned.split()), tuple(padded.split())
        layout.sections = tuple(sections)
        return layout

    def __getnewargs__(self) -> tuple[str, ...]:
        """Return the arguments with which pickle calls `__new__`.

        Pickle restores `owned`, `padded` and `sections` separately, as attributes.
        """
        return tuple(" ".join(axes) for axes in self)

    def __eq__(self, other: object) -> bool:
        others = getattr(other, "_storage", ((), (), ()))
        return super().__eq__(other) and self._storage == others

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), *self._storage))

    @property
    def _storage(self) -> tuple[tuple, ...]:
        return self.owned, self.padded, self.sections

    def __str__(self) -> str:
        return self.indexed([""] * len(self))

    def indexed(self, names: Sequence[str]) -> str:
        """Return the layout in index notation, such as "[m_xy, k]" for the dimension names
        "mk"."""
        dims = (
            f"{name}_{''.join(axes)}" if axes else name or "-" for name, axes in zip(names, self)
        )
        owned = f" owned along {' '.join(self.owned)}" if self.owned else ""
        return f"[{', '.join(dims)}]{owned}"

    def with_dims(self, *dims: Sequence[str]) -> Layout:
        """Return a layout with the given axes per dimension, and the storage of this one's rows.

        The axes that shard the rows must be those of this layout.
        """
        owned, padded = " ".join(self.owned), " ".join(self.padded)
        return Layout(*map(" ".join, dims), owned=owned, padded=padded)

    def of_experts(self, axes: str) -> Layout:
        """Return the layout of A[i, expert, j], whose expert dimension is sharded by `axes`."""
        return self.with_dims(self[0], axes.split(), self[1])

    @property
    def rows(self) -> Layout:
        """Layout of an array with one entry per row of this tensor."""
        return self.with_dims(self[0])

    @property
    def columns(self) -> Layout:
        """Layout of a vector with one element per column of this matrix."""
        return Layout(" ".join(self[1]))

    @property
    def even(self) -> tuple[str, ...]:
        """Row axes without padding, whose sizes must divide the number of rows."""
        return self[0][: len(self[0]) - len(self.padded)] if self.padded else self[0]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes along which ranks store different blocks, including the axes of `owned`."""
        return (*(axis for dim in self for axis in dim), *self.owned)

    def is_first_copy(self, mesh: Mesh, *others: str) -> bool:
        """Return True on exactly one of the ranks of a stage that store the same block.

        `others` are axes along which blocks differ although the layout does not contain them.
        """
        different = {*self.axes, *others, "p"}
        return all(mesh.coord(axis) == 0 for axis in mesh.sizes if axis not in different)

    def dim_of(self, axis: str) -> int | None:
        """Return the dimension sharded by a mesh axis.

        Parameters
        ----------
        axis
            Mesh axis.

        Returns
        -------
        int or None
            The dimension; None if the tensor is replicated along the axis.
        """
        return next((dim for dim, axes in enumerate(self) if axis in axes), None)

    def owner(self, axis: str, mesh: Mesh) -> int:
        """Return the coordinate along `axis` of the rank that owns this block.

        The owner is the block-row index modulo the size of `axis`, so all blocks of a block row
        have the same owner. The context axis does not contribute to the index. All tokens of a
        sequence, which attend to each other, therefore have the same owner as well.
        """
        return mesh.index(other for other in self[0] if other != CONTEXT) % mesh.size(axis)

    def slices(self, shape: Sequence[int], mesh: Mesh) -> tuple[slice, ...]:
        """Return the slices that select a rank's block of a tensor, without padding.

        Parameters
        ----------
        shape
            Shape of the full tensor.
        mesh
            Mesh of the rank.

        Returns
        -------
        tuple of slice
            One slice per dimension.

        Raises
        ------
        ValueError
            If a dimension is not divisible by the number of ranks that shard it evenly.
        """
        dims = self.even, *self[1:]
        rows, *rest = (part(*dim, mesh) for dim in zip(shape, dims, strict=True))
        if self.padded:
            rows = _shard(rows, mesh.count(self.padded), mesh.index(self.padded))
        if not self._is_owner(mesh):
            rows = slice(rows.start, rows.start)
        return (rows, *rest)

    def _is_owner(self, mesh: Mesh) -> bool:
        return all(mesh.coord(axis) == self.owner(axis, mesh) for axis in self.owned)

    def pieces(
        self, shape: Sequence[int], mesh: Mesh
    ) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield slices of a rank's block, and the slices of the tensor that contain the elements.

        There is one pair of slices for each of the `sections`.
        """
        (dim,) = (dim for dim, axes in enumerate(self) if axes)
        local, start = 0, 0
        for size in self.sections:
            own = part(size, self[dim], mesh)
            count = own.stop - own.start
            here, there = ([slice(0, each) for each in shape] for _ in range(2))
            here[dim] = slice(local, local + count)
            there[dim] = slice(start + own.start, start + own.stop)
            yield tuple(here), tuple(there)
            local, start = local + count, start + size

    def block(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the block that a rank stores, with padding.

        Parameters
        ----------
        shape
            Shape of the full tensor.
        mesh
            Mesh of the rank.

        Returns
        -------
        tuple of int
            Shape of the block.
        """
        rows, *others = (part.stop - part.start for part in self.slices(shape, mesh))
        if self.padded and self._is_owner(mesh):
            rows = -(-shape[0] // mesh.count(self[0]))
        return (rows, *others)


def _shard(rows: slice, count: int, index: int) -> slice:
    """Return the rows of shard `index` of `count`; the last shards may be shorter or empty."""
    size = -(-(rows.stop - rows.start) // count)
    start = min(rows.start + index * size, rows.stop)
    return slice(start, min(start + size, rows.stop))


def part(size: int, axes: Sequence[str], mesh: Mesh) -> slice:
    """Return this rank's slice of a dimension of length `size` that is sharded by `axes`.

    `axes` lists the outermost axis first.
    """
    count = mesh.count(axes)
    if size % count:
        sizes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in axes)
        raise ValueError(f"a dimension of {size} must be divisible by mesh axes {sizes} = {count}")
    start = mesh.index(axes) * (size // count)
    return slice(start, start + size // count)
