"""What a block keeps for its backward pass, in fewer bits than it was computed with.

The values that pass forward are the exact ones; backward works with rounded copies of those that
waited for it (Gist's delayed precision reduction, Jain et al. 2018):

    bfloat16   2 bytes an element
    int8       1 byte an element, and a scale of 4 bytes a row: its largest magnitude / 127
    float8     1 byte an element, e4m3, and a scale of 4 bytes a row: its largest magnitude / 448

Fields of the type `SavedActivation` (hpc3d.arrays.array) are rounded.  All other fields that a
layer saves, such as weights, moments and choices, stay as they are.  So does an array in memory
that several ranks read: it is there once for all of them, and a copy would be there once for each.

What waits may also lie outside of the memory of the rank (hpc3d.arrays.host_store), each byte of
it once out and once back: that of the next block comes back while one is worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

import numpy as np

from hpc3d.arrays.array import Array, SavedActivation, SavedWeight
from hpc3d.arrays.host_store import store_of
from hpc3d.arrays.pool import contiguous, writeable
from hpc3d.model.parameters import Parameter
from hpc3d.ops.quantize import decode_rows, encode_rows

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameters


class RoundedArray(NamedTuple):
    """An array in fewer bits: `codes` of its shape, and the scales of its rows, if there are."""

    codes: Array
    scales: Array | None


class OffloadedArray(NamedTuple):
    """An array that lies elsewhere."""

    kept: Array


def stored_type(keep_dtype: str | None, dtype: DTypeLike) -> np.dtype:
    """The type of the elements of activations of the type `dtype` that wait for backward."""
    return np.dtype(np.uint8 if keep_dtype == "float8" else keep_dtype or dtype)


class KeptForm:
    """How activations of the type `dtype` wait for backward: as they are or rounded, in the memory
    of the rank or offloaded."""

    def __init__(
        self, mesh: Mesh, dtype: DTypeLike, keep_dtype: str | None, offload: bool = False
    ) -> None:
        self.mesh, self.dtype, self.offload = mesh, np.dtype(dtype), offload
        self.keep_dtype = stored_type(keep_dtype, dtype)

    def put_away(self, saved: Any) -> Any:
        """What was saved as it waits, each array once although it has two names."""
        if self.keep_dtype != self.dtype:
            with self.mesh.trace.span("round"):
                saved = _replaced(saved, self._round, {})
        return _replaced(saved, self._save, {}) if self.offload else saved

    def ask(self, saved: list[Any]) -> None:
        """Let what is offloaded of the last of `saved`, if there is one, be in flight."""
        if self.offload and saved:
            saved[-1] = _replaced(saved[-1], self._load, {})

    def pop(self, saved: list[Any]) -> Any:
        """The last of `saved`, taken from it, which is as it was; that before it is in flight
        from then on."""
        last = saved.pop()
        self.ask(saved)
        return last

    def take(self, saved: list[Any]) -> Any:
        """The last of `saved`, taken from it, with arrays to work with; that before it is on its
        way from then on."""
        last = saved.pop()
        if self.offload:
            last = _replaced(last, self._arrived, {})
            self.ask(saved)
        if self.keep_dtype != self.dtype:
            with self.mesh.trace.span("round"):
                last = _replaced(last, self._restore, {})
        return last

    def _save(self, value):
        """An array, or one in fewer bits, elsewhere."""
        if isinstance(value, RoundedArray):
            return RoundedArray(*map(self._saved, value))
        return self._saved(value) if self._may_change(value) else value

    def _saved(self, array):
        if array is None:
            return None
        kept = store_of(self.mesh.pool).empty(array.shape, array.dtype)
        store_of(self.mesh.pool).save(array, kept, self.mesh.trace)
        return OffloadedArray(kept)

    def _load(self, value):
        """The same coming back: what is offloaded is a function that gives it."""
        if isinstance(value, RoundedArray):
            return RoundedArray(*map(self._load, value))
        if not isinstance(value, OffloadedArray):
            return value
        return store_of(self.mesh.pool).load(value.kept, "activation", self.mesh.trace)

    def _arrived(self, value):
        if isinstance(value, RoundedArray):
            return RoundedArray(*map(self._arrived, value))
        value = self._load(value)
        return value() if callable(value) else value

    def _may_change(self, array):
        """Whether it is an activation that this rank has for itself."""
        return array is not None and array.dtype == self.dtype and writeable(array)

    def _round(self, array):
        if not self._may_change(array):
            return array
        codes = self.mesh.empty(array.shape, self.keep_dtype)
        if self.keep_dtype.itemsize > 1:
            codes[...] = array
            return RoundedArray(codes, None)
        matrix = _matrix(contiguous(array))
        scales = self.mesh.empty((len(matrix),), np.float32)
        encode_rows(matrix, _matrix(codes), scales)
        return RoundedArray(codes, scales)

    def _restore(self, kept):
        if not isinstance(kept, RoundedArray):
            return kept
        out = self.mesh.empty(kept.codes.shape, self.dtype)
        if kept.scales is None:
            out[...] = kept.codes
        else:
            decode_rows(_matrix(kept.codes), kept.scales, _matrix(out))
        return out


def _matrix(array: Array) -> Array:
    """All rows of an array of any number of dims."""
    return array.reshape(-1, array.shape[-1])


def _replaced(
    saved: Any, function: Callable[[Any], Any], done: dict, marked: Any = SavedActivation
) -> Any:
    """Return what a layer saved with `function` applied once to each array of a `marked` type."""
    if not hasattr(saved, "_fields"):
        return saved
    fields = zip(saved, _are_marked(saved.__class__, marked))
    return type(saved)(
        *[
            _once(value, function, done) if here else _replaced(value, function, done, marked)
            for value, here in fields
        ]
    )


@cache
def _are_marked(kind: Any, marked: Any) -> list[bool]:
    """Return for each field of a NamedTuple whether its type is or contains `marked`."""
    hints = get_type_hints(kind, include_extras=True)
    return [_contains(hint, marked) for hint in hints.values()]


def _contains(hint: Any, marked: Any) -> bool:
    return hint == marked or any(_contains(each, marked) for each in get_args(hint))


def _once(value: Any, function: Callable[[Any], Any], done: dict) -> Any:
    """`function` of an array, or of each of a list or of those that fused attention keeps."""
    if type(value) in (tuple, list):
        return type(value)(_once(each, function, done) for each in value)
    if id(value) not in done:
        done[id(value)] = value, function(value)
    return done[id(value)][1]


class FetchedWeights:
    """The matrices of a stage's blocks, which lie elsewhere between their uses: while a block is
    worked on, copies of those of the next one are on their way.

    What a block saves for its backward pass names its own matrices; copies of these would be held
    until then.  `blocks` are their names.
    """

    def __init__(self, parameters: Parameters, blocks: Sequence[str]) -> None:
        self.parameters = parameters
        self.items = [
            [item for item in parameters if item.unit == name and parameters.lies_elsewhere(item)]
            for name in blocks
        ]
        self.asked: dict[int, list[Callable[[], Array]]] = {}

    def of(self, block: int, then: int) -> AbstractContextManager[None]:
        """A context in which those of a block are at hand, and of the one after it on their
        way."""
        return self._at_hand(block, then) if self.items[block] else nullcontext()

    @contextmanager
    def _at_hand(self, block: int, then: int) -> Iterator[None]:
        arrived = self.asked.pop(block, None) or self._ask(block)
        for item, arrive in zip(self.items[block], arrived, strict=True):
            item.value = arrive()
        if 0 <= then < len(self.items):
            self.asked[then] = self._ask(then)
        yield
        for item in self.items[block]:
            self.parameters.show(item)

    def _ask(self, block: int) -> list[Callable[[], Array]]:
        mesh = self.parameters.mesh
        return [
            store_of(mesh.pool).load(item.value, "parameter", mesh.trace)
            for item in self.items[block]
        ]

    def without(self, saved: Any, block: int) -> Any:
        """What a block saved, with parameters in place of their values."""
        if not self.items[block]:
            return saved
        names = {id(item.value): item for item in self.items[block]}
        return _replaced(saved, lambda value: names.get(id(value), value), {}, SavedWeight)

    def within(self, saved: Any, block: int) -> Any:
        """The same with the values that are at hand now."""
        return _replaced(saved, _value_of, {}, SavedWeight) if self.items[block] else saved


def _value_of(each: Any) -> Any:
    return each.value if isinstance(each, Parameter) else each
