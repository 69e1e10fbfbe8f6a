"""States of values on a mesh: the relation between the blocks that ranks have of a value.

Along each mesh axis, a value has one of these states:

    replicated    the blocks of all ranks are equal (no entry in `States`)
    sharded       the blocks differ: the state is the sharded dimension, or UNKNOWN
    PARTIAL       the value is the sum of the blocks
    LOCAL         each block is a statistic of one rank's shard, such as its maximum

Operations are given in index notation, such as "mn m -> n". A dimension that is sharded in an
operand and missing in the result is summed, so the result is partial. Only linear operations
accept partial sums. The types of JAX's `shard_map` (varying, unreduced) distinguish these states,
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNKNOWN, LOCAL, PARTIAL = -1, -2, -3
# Any other state is PARTS times the sharded dimension. If the dimension merges several ones, the
# index of the sharded one among them is added.
PARTS = 8
States = dict[str, int]
SUM, PRODUCT = "sum", "product"  # linear operations
# Index notation of an array whose dimensions are not tracked. "m?v" is a host array that selects
# an element of dimension v for each element of dimension m.
OPAQUE = "?"


def named(state: int | None) -> str:
    """Return a state in words."""
    if state is None:
        return "replicated"
    return {PARTIAL: "a partial sum", LOCAL: "a statistic of one shard"}.get(state, "sharded")


class StatedOperand(NamedTuple):
    """Index notation and states of an operand."""

    dims: str
    states: States

    def letter(self, axis: str) -> str:
        """Return the letter of the dimension that an axis shards, or "" if it is not known."""
        state = self.states.get(axis, UNKNOWN)
        letter = self.dims[state // PARTS :][:1] if state >= 0 else ""
        return "" if letter in (".", OPAQUE) else letter


def joined(
    operands: Sequence[StatedOperand], results: Sequence[str], linear: str, sums: bool
) -> list[States]:
    """Return the states of the results of an operation, given in index notation.

    `linear` is SUM or PRODUCT if the operation accepts partial sums. A sharded dimension that a
    result lacks gives partial sums if `sums` is True, and local statistics otherwise.

    Raises
    ------
    ValueError
        If the operation does not accept the states of the operands.
    """
    found: list[States] = [{} for _ in results]
    for axis in sorted({axis for each in operands for axis in each.states}):
        partial = _is_partial(axis, operands, linear)
        shards = {
            (letter, 0 if linear else each.states[axis] % PARTS): each.states[axis] % PARTS
            for each in operands
            if (letter := each.letter(axis))
        }
        if len(shards) > 1 and not partial:
            raise ValueError(
                f"axis {axis} shards different dimensions of the operands; gather one of them"
            )
        parts = {letter: part for (letter, _), part in shards.items()}
        selected = {each.dims[0]: 0 for each in operands if _selects(each, axis)}
        for states, dims in zip(found, results, strict=True):
            states[axis] = PARTIAL
            if not partial:
                states[axis] = _state_of_result(dims, parts or selected, sums)
    return found


def _selects(operand: StatedOperand, axis: str) -> bool:
    return operand.dims[1:2] == OPAQUE and axis in operand.states


def _state_of_result(dims: str, parts: Mapping[str, int], sums: bool) -> int:
    """Return the state of a result; `parts` maps the sharded dimension to its part, if known."""
    for letter, part in parts.items():
        if letter in dims:
            return PARTS * dims.index(letter) + part
    if not parts or dims == OPAQUE:
        return UNKNOWN
    return PARTIAL if sums else LOCAL


def _is_partial(axis: str, operands: Sequence[StatedOperand], linear: str) -> bool:
    """Return True if the result of an operation is a partial sum, like one of its operands."""
    states = [
        each.states.get(axis)
        for each in operands
        if each.dims != OPAQUE or each.states.get(axis) != UNKNOWN
    ]
    for state in (LOCAL,) if linear else (LOCAL, PARTIAL):
        if state in states:
            raise ValueError(f"an operand is {named(state)} along axis {axis}; reduce it first")
    others = [state for state in states if state != PARTIAL]
    count = len(states) - len(others)
    if count and linear == SUM and others:
        raise ValueError(
            f"adds a partial sum to a {named(others[0])} value along axis {axis}; reduce the "
            "partial sum first"
        )
    if linear == PRODUCT and (count > 1 or (count and any(each is not None for each in others))):
        raise ValueError(
            f"multiplies a partial sum by a value that varies along axis {axis}; reduce the "
            "partial sum first"
        )
    return count > 0
