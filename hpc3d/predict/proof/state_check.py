"""Check of the states of all values that a program computes on one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpc3d.arrays.abstract import counted
from hpc3d.arrays.primitive import Primitive, add_backend
from hpc3d.ops.random import Mask
from hpc3d.predict.proof.stated_array import DIMS, StatedArray, states_of
from hpc3d.predict.proof.states import OPAQUE, StatedOperand, joined

_Noted = tuple[Any, str]  # an array, and its index notation


class StateCheck:
    """Check of the states of all values that a program computes on one rank.

    Programs on other ranks show which host values depend on mesh coordinates: each program records
    the arrays and dropout masks that it computes on the host. `varied` has the axes along which
    each of them varies, or is `None` while they are recorded, and nothing is refused. `rows` has
    the number of rows of each broadcast whose root is the first rank, and `None` for others; ranks
    that own no rows need it. `where()` describes the position in the program in error messages.
    """

    def __init__(
        self,
        where: Callable[[], str],
        varied: Sequence[frozenset[str]] | None = None,
        rows: Sequence[int | None] | None = None,
    ) -> None:
        self.where, self.varied = where, varied
        self.recorded: list[Any] = []
        self.rows: list[int | None] = []
        self.known_rows = None if rows is None else iter(rows)

    def varies(self, value: Any) -> frozenset[str]:
        """Record a host value; return the axes along which it varies."""
        self.recorded.append(value)
        return frozenset() if self.varied is None else self.varied[len(self.recorded) - 1]

    def rows_of_broadcast(self, rows: int, is_root: bool) -> int:
        """Return the number of rows of the next broadcast, given those of this rank's block."""
        known = None if self.known_rows is None else next(self.known_rows)
        self.rows.append(rows if is_root else None)
        return rows if is_root or known is None else known

    def refuse(self, problem: str) -> None:
        if self.varied is not None:
            raise ValueError(f"{self.where()}: {problem}")

    def apply(
        self,
        name: str,
        operands: Sequence[_Noted],
        results: Sequence[_Noted],
        linear: str,
        sums: bool,
    ) -> None:
        """Set the states of the results of the operation `name`; `joined` has the arguments."""
        given = [
            StatedOperand(dims, states)
            for array, dims in operands
            if (states := states_of(array)) is not None
        ]
        kept = [dims for _, dims in results]
        try:
            found = joined(given, kept, linear, sums)
        except ValueError as error:
            names = [each.cell.name for each, _ in operands if isinstance(each, StatedArray)]
            self.refuse(f"{name}({', '.join(filter(None, names))}): {error}")
            found = [{} for _ in kept]
        for (result, _), states in zip(results, found, strict=True):
            result.become(states, name)

    def call(self, primitive: Primitive, given: Sequence[Any], result: Any) -> None:
        """Set the states of the results of a primitive, including the arrays that it fills."""
        notation, linear, sums = primitive.notation
        left, _, right = notation.partition("->")
        arrays = []
        for each in _leaves(given):
            if isinstance(each, Mask):
                strict = any(each is value for value in given)
                self._check_mask(primitive.__name__, given[0], each, strict)
            else:
                arrays.append(each)
        operands = _noted(arrays, left, given[0])
        outputs = _noted(_leaves([result]), right, given[0])
        cells = {id(each.cell) for each, _ in operands.values() if isinstance(each, StatedArray)}
        results = {
            key: operands.get(key, noted)
            for key, noted in outputs.items()
            if key in operands or id(noted[0].cell) not in cells  # other results are views
        }
        filled = [key for key, (each, _) in operands.items() if states_of(each) is None]
        results |= {key: operands[key] for key in filled}
        self._check_indices(primitive.__name__, operands.values())
        self.apply(primitive.__name__, [*operands.values()], [*results.values()], linear, sums)

    def _check_indices(self, name: str, operands: Collection[_Noted]) -> None:
        """Check that host vectors, such as targets, vary along the axes that shard their rows."""
        stated = [(each, dims) for each, dims in operands if isinstance(each, StatedArray)]
        for vector, dims in operands:
            letters = "" if isinstance(vector, StatedArray) or vector.ndim != 1 else dims
            varied = states_of(vector) or {}
            for x, of_x in stated if letters != OPAQUE else ():
                given = StatedOperand(of_x, x.states or {})
                for axis in sorted({*given.states} - {*varied}):
                    if given.letter(axis) and given.letter(axis) in letters:
                        self.refuse(
                            f"{name}({x.cell.name}): the ranks along axis {axis} have the same "
                            "indices, but different shards; compute the indices of each shard"
                        )

    def _check_mask(self, name: str, x: StatedArray, mask: Mask, strict: bool) -> None:
        """Check that a dropout mask varies along the axes that shard x, and no others.

        If not `strict`, the mask may also cover the blocks of other ranks.
        """
        varied, sharded = self.varies(mask), {*(x.states or {})}
        for axis in sorted(varied - sharded):
            self.refuse(
                f"{name}({x.cell.name}): the dropout masks of the ranks along axis {axis} differ, "
                "but x is replicated; compute the mask from the layout of x"
            )
        for axis in sorted(sharded - varied) if strict else ():
            self.refuse(
                f"{name}({x.cell.name}): the ranks along axis {axis} have the same dropout mask, "
                "but x is sharded; compute the mask from the layout of x"
            )


def _noted(arrays: Iterable[Any], notation: str, first: StatedArray) -> dict[int, _Noted]:
    """Return a dict that maps the id of each array to the array and its index notation.

    By default, arrays with as many dimensions as `first` have the same dimensions.
    """
    found = {}
    letters = iter(notation.split())
    for each in arrays:
        alike = getattr(each, "ndim", -1) == first.ndim and not notation
        dims = next(letters, DIMS[: first.ndim] if alike else OPAQUE)
        if each is not None:
            found.setdefault(id(each), (each, dims))
    return found


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arrays and dropout masks in nested tuples and lists, and each `None`."""
    for value in values:
        if value is None or isinstance(value, np.ndarray | StatedArray | Mask):
            yield value
        elif isinstance(value, tuple | list):
            yield from _leaves(value)


def _stated(primitive: Primitive) -> Callable[..., Any]:
    """Return the implementation of a primitive for arrays with states."""
    rule = counted(primitive)
    if primitive.abstract_rule is primitive.numpy:
        return rule

    def with_states(first, *others, **named):
        result = rule(first, *others, **named)
        first.pool.check.call(primitive, (first, *others, *named.values()), result)
        return result

    return with_states


def saved_arrays(saved: Any) -> list[StatedArray]:
    """Return the arrays in the data that a layer saves."""
    return [each for each in _leaves([saved]) if isinstance(each, StatedArray)]


add_backend(StatedArray, _stated)
