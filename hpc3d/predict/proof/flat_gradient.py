"""Flat gradient array whose slices have the states of the parameters' gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.predict.proof.stated_array import StatedArray

if TYPE_CHECKING:
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.predict.proof.states import States


class FlatGradient:
    """Replacement for `Parameters.grad`, which consists of the gradients of all parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters, self.dtype = parameters, parameters.wide
        self.size = parameters.grad.size

    def fill(self, value: float) -> None:
        """Keep the gradients, which `Buckets.begin` sets to zero."""

    def __getitem__(self, part: slice) -> StatedArray:
        start, stop, _ = part.indices(self.size)
        array = StatedArray((stop - start,), self.dtype, self.parameters.mesh.pool)
        for item in self._items(part):
            array[:0].become(_flat(item.grad.states), item.grad.cell.name)
        return array

    def __setitem__(self, part: slice, value: StatedArray) -> None:
        for item in self._items(part):
            item.grad.cell.states = _flat(value.states)

    def _items(self, part: slice) -> Iterator[Parameter]:
        start, stop, _ = part.indices(self.size)
        for item, slices in self.parameters.slices.items():
            if slices.grad.start < stop and start < slices.grad.stop:
                yield item


def _flat(states: States | None) -> States:
    """Return the states of a flattened array."""
    return {axis: min(state, 0) for axis, state in (states or {}).items()}
