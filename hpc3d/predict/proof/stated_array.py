"""Abstract arrays that carry the state of their value along each mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.abstract import AbstractArray
from hpc3d.arrays.pool import contiguous, has_values
from hpc3d.predict.proof.states import PARTIAL, PARTS, PRODUCT, SUM, UNKNOWN, States, named

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_LINEAR = {
    **dict.fromkeys((np.add, np.subtract, np.negative, np.positive), SUM),
    **dict.fromkeys((np.multiply, np.divide, np.matmul), PRODUCT),
}
DIMS = "abcdefgh"  # index notation of arrays in elementwise operations


class Cell:
    """States of an array that all of its views share, relative to the dimensions of the array.

    `states` is `None` if the array is zero or has no values yet. `name` describes the value in
    error messages: the last operation that wrote it, unless it is `fixed`.
    """

    __slots__ = ("fixed", "name", "shape", "states")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.states = shape, None
        self.fixed, self.name = False, ""


class Varying(np.ndarray):
    """Host array that differs between the ranks along the mesh axes `axes`."""

    axes: frozenset[str] = frozenset()

    def __array_finalize__(self, other: object) -> None:
        self.axes = getattr(other, "axes", frozenset())


class StatedArray(AbstractArray):
    """Abstract array with states.

    `origin` has the dimensions of the cell to which each dimension of this view belongs.
    """

    __slots__ = ("cell", "origin")

    def __init__(
        self, shape: Iterable[int], dtype: DTypeLike, pool: Any, lease: Any = None
    ) -> None:
        super().__init__(shape, dtype, pool, lease)
        self.cell = Cell(self.shape)
        self.origin = tuple((dim,) for dim in range(len(self.shape)))

    def _seen(self, shape: Iterable[int], origin: Iterable[tuple[int, ...]]) -> StatedArray:
        """Return a view of this array."""
        array = type(self)(shape, self.dtype, self.pool, self.lease)
        array.cell, array.origin = self.cell, tuple(origin)
        return array

    @property
    def states(self) -> States | None:
        """State along each mesh axis, relative to the dimensions of this view."""
        if self.cell.states is None:
            return None
        return {axis: self._seen_state(state) for axis, state in self.cell.states.items()}

    def _dims_of(self, dim: int) -> list[int]:
        """Return the dimensions of this view into which a dimension of the cell is split."""
        return [each for each, origin in enumerate(self.origin) if dim in origin]

    def _seen_state(self, state: int) -> int:
        """Convert a state of the cell to the dimensions of this view."""
        if state < 0:
            return state
        dim, part = divmod(state, PARTS)
        if not (dims := self._dims_of(dim)):
            return UNKNOWN
        if len(dims) > 1:
            return PARTS * dims[min(part, len(dims) - 1)]
        merged = self.origin[dims[0]]
        if len(merged) == 1:
            return PARTS * dims[0] + part
        sizes = self.cell.shape
        before = sum(sizes[each] > 1 for each in merged[: merged.index(dim)])
        return PARTS * dims[0] + before if sizes[dim] > 1 else UNKNOWN

    def _cell_state(self, state: int) -> int:
        """Convert a state of this view to the dimensions of the cell."""
        if state < 0:
            return state
        dim, part = divmod(state, PARTS)
        if not (merged := self.origin[dim]):
            return UNKNOWN
        if len(merged) > 1:
            long = [each for each in merged if self.cell.shape[each] > 1] or merged
            return PARTS * long[min(part, len(long) - 1)]
        dims = self._dims_of(merged[0])
        return PARTS * merged[0] + (part if len(dims) < 2 else dims.index(dim))

    def become(self, states: States | None, name: str) -> None:
        """Set the states after the operation `name` has written to this array."""
        if states is None:
            return
        states = {axis: self._cell_state(state) for axis, state in states.items()}
        cell = self.cell
        if cell.states is not None and self.size < prod(cell.shape):
            for axis in {*states} | {*cell.states}:
                states[axis] = self._both(axis, states.get(axis), cell.states.get(axis))
        cell.states, cell.name = states, cell.name if cell.fixed else name

    def _both(self, axis: str, new: int | None, old: int | None) -> int:
        """Return the state of an array after a part of it in another state was written."""
        if PARTIAL in (new, old) and new != old:
            other = old if new == PARTIAL else new
            self.pool.check.refuse(
                f"a partial sum and a {named(other)} block along axis {axis} are written to one "
                f"array ({self.cell.name})"
            )
        known = {new, old} - {None}
        return known.pop() if len(known) == 1 else UNKNOWN  # type: ignore[return-value]

    def view(self, shape: Iterable[int]) -> StatedArray:
        shape = tuple(shape)
        return self._seen(shape, _regrouped(self.shape, shape, self.origin))

    @property
    def T(self) -> StatedArray:  # type: ignore[override]
        return self._seen(self.shape[::-1], self.origin[::-1])

    def transpose(self, *order: int) -> StatedArray:
        return self._seen([self.shape[i] for i in order], [self.origin[i] for i in order])

    def swapaxes(self, a: int, b: int) -> StatedArray:
        order = [*range(self.ndim)]
        order[a], order[b] = order[b], order[a]
        return self.transpose(*order)

    def __getitem__(self, key: Any) -> StatedArray:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at, count = keys.index(Ellipsis), sum(each is not None for each in keys) - 1
            keys[at : at + 1] = [slice(None)] * (self.ndim - count)
        origin, dim = [], 0
        for each in keys:
            if each is None:
                origin.append(())
                continue
            if not isinstance(each, int | np.integer):
                origin.append(self.origin[dim])
            dim += 1
        shape = self._one_byte()[key].shape
        return self._seen(shape, [*origin, *self.origin[dim:]])

    def __setitem__(self, key: Any, value: Any) -> None:
        there = self[key]
        there.made_by("copy")
        if isinstance(value, StatedArray) and value.cell is there.cell:
            return
        there.become(states_of(value, there.ndim), "copy")

    def fill(self, value: Any) -> None:
        super().fill(value)
        self.cell.states = None if value == 0 else {}

    def _copied_to(self, result: Any) -> StatedArray:
        result.become(self.states, "copy")
        return result

    def _reduced_to(self, result: Any, name: str, axis: int | None) -> StatedArray:
        dims = DIMS[: self.ndim]
        kept = "" if axis is None else dims.replace(dims[axis], "")
        linear = SUM if name == "sum" else ""
        self.pool.check.apply(name, [(self, dims)], [(result, kept)], linear, bool(linear))
        return result

    def copy(self) -> StatedArray:
        return self._copied_to(super().copy())

    def astype(self, dtype: DTypeLike) -> StatedArray:
        return self._copied_to(super().astype(dtype))

    def sum(self, axis: int | None = None, dtype: DTypeLike | None = None) -> StatedArray:
        return self._reduced_to(super().sum(axis, dtype), "sum", axis)

    def max(self, axis: int | None = None, initial: object = None) -> StatedArray:
        return self._reduced_to(super().max(axis, initial), "max", axis)

    mean = sum

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, axis=0, **options):
        result = super().__array_ufunc__(ufunc, method, *inputs, out=out, axis=axis, **options)
        linear = _LINEAR.get(ufunc, "")
        if ufunc is np.divide and PARTIAL in (states_of(inputs[1]) or {}).values():
            linear = ""
        arrays = [each for each in map(_as_array, inputs) if linear == SUM or each.ndim]
        *dims, kept = _notation(ufunc, method, arrays, axis)
        operands = [*zip(arrays, dims, strict=True)]
        sums = ufunc in (np.add, np.matmul)
        self.pool.check.apply(ufunc.__name__, operands, [(result, kept)], linear, sums)
        return result

    def __array_function__(self, function, types, arguments, options):
        result = super().__array_function__(function, types, arguments, options)
        if function in (np.concatenate, np.stack):
            for block in arguments[0]:
                result[:0].become(states_of(block, result.ndim), function.__name__)
        return result


def _as_array(value: Any) -> Any:
    return value if isinstance(value, StatedArray) else np.asanyarray(value)


def _notation(ufunc: np.ufunc, method: str, arrays: Sequence[Any], axis: int) -> list[str]:
    """Return the index notation of the operands of a ufunc, and of its result."""
    most = max(each.ndim for each in arrays)
    if ufunc is np.matmul:
        a, b = (each.ndim for each in arrays)
        batch = DIMS[: most - 2] if most > 2 else ""
        right = f"{batch}kn"[-b:] if b > 1 else "k"
        return [f"{batch}mk"[-a:], right, batch + "m" * (a > 1) + "n" * (b > 1)]
    dims = [DIMS[most - each.ndim : most] for each in arrays]
    return [*dims, dims[0].replace(dims[0][axis], "") if method == "reduce" else DIMS[:most]]


def states_of(value: Any, ndim: int | None = None) -> States | None:
    """Return the states of a value, or `None` if it is zero.

    If `ndim` is given, the states refer to an array of `ndim` dimensions to which the value is
    broadcast.
    """
    if isinstance(value, StatedArray):
        shift = PARTS * (0 if ndim is None else ndim - value.ndim)
        states = value.states
        return states and {
            axis: state + shift if state >= 0 else state for axis, state in states.items()
        }
    if isinstance(value, Varying):
        return dict.fromkeys(value.axes, UNKNOWN)
    return None if np.ndim(value) == 0 and value == 0 else {}


def _regrouped(
    old: Sequence[int], new: Sequence[int], origin: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the origin of each dimension after a reshape from the shape `old` to `new`."""
    if 0 in old or 0 in new:
        return list(origin) if len(old) == len(new) else [()] * len(new)
    found: list[tuple[int, ...]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        rows, columns = old[i : i + 1], new[j : j + 1]
        while prod(rows) != prod(columns):
            if prod(rows) < prod(columns):
                rows = old[i : i + len(rows) + 1]
            else:
                columns = new[j : j + len(columns) + 1]
        if j + len(columns) == len(new):  # dimensions of size 1 may remain
            rows = old[i:]
        merged: tuple[int, ...] = sum(origin[i : i + len(rows)], ())
        single = prod(columns) == 1
        found += [merged if size > 1 or single else () for size in columns]
        i, j = i + len(rows), j + len(columns)
    return found


contiguous.register(StatedArray, lambda block: block)
has_values.register(StatedArray, lambda array: False)
