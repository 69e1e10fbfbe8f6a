"""Reduced-precision saved activations, and offloading of saved activations and weights.

The forward pass uses unrounded values; the backward pass uses rounded copies of the saved
activations (Gist's delayed precision reduction, Jain et al. 2018):

    bfloat16   2 bytes per element
    int8       1 byte per element, and a 4-byte scale per row (largest magnitude / 127)
    float8     1 byte per element (e4m3), and a 4-byte scale per row (largest magnitude / 448)

Fields of the type `SavedActivation` (hpc3d.arrays.array) are rounded. All other saved fields, such
as weights, moments and routing choices, are not changed. Arrays in memory shared by several ranks
are not rounded either: they are stored once for all ranks, whereas rounding would create a copy on
each rank.

Saved data may also be offloaded from the memory of the rank (hpc3d.arrays.host_store).  Each byte
is copied out once and back once; the data of the next block is loaded during the computation of
the current block.
"""

from __future__ import annotations

from collections import defaultdict
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
    """Reduced-precision array: `codes` with the original shape, and `scales`.

    `scales` contains one scale per row; it is `None` for bfloat16.
    """

    codes: Array
    scales: Array | None


class OffloadedArray(NamedTuple):
    """Array whose data has been offloaded to the host store."""

    kept: Array


def stored_type(keep_dtype: str | None, dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which activations of type `dtype` are stored for the backward pass."""
    return np.dtype(np.uint8 if keep_dtype == "float8" else keep_dtype or dtype)


class KeptForm:
    """Storage format of activations of type `dtype` between forward and backward passes.

    The activations are optionally rounded (`keep_dtype`) and offloaded (`offload`).
    """

    def __init__(
        self, mesh: Mesh, dtype: DTypeLike, keep_dtype: str | None, offload: bool = False
    ) -> None:
        self.mesh, self.dtype, self.offload = mesh, np.dtype(dtype), offload
        self.keep_dtype = stored_type(keep_dtype, dtype)

    def put_away(self, saved: Any) -> Any:
        """Round and offload a layer's saved data, if configured; store duplicate arrays once."""
        if self.keep_dtype != self.dtype:
            with self.mesh.trace.span("round"):
                saved = _replaced(saved, self._round, {})
        return _replaced(saved, self._save, {}) if self.offload else saved

    def ask(self, saved: list[Any]) -> None:
        """Start loading the offloaded arrays in the last entry of `saved`, if any."""
        if self.offload and saved:
            saved[-1] = _replaced(saved[-1], self._load, {})

    def pop(self, saved: list[Any]) -> Any:
        """Pop the last entry of `saved` without restoring it; start loading the previous entry."""
        last = saved.pop()
        self.ask(saved)
        return last

    def take(self, saved: list[Any]) -> Any:
        """Pop and restore the last entry of `saved`; start loading the entry before it."""
        last = saved.pop()
        if self.offload:
            last = _replaced(last, self._arrived, {})
            self.ask(saved)
        if self.keep_dtype != self.dtype:
            with self.mesh.trace.span("round"):
                last = _replaced(last, self._restore, {})
        return last

    def _save(self, value):
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
        """Start loading offloaded arrays; replace each with a function that returns the data."""
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
        """Return True if `array` is an activation that only this rank stores."""
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
    return array.reshape(-1, array.shape[-1])


def _replaced(
    saved: Any, function: Callable[[Any], Any], done: dict, marked: Any = SavedActivation
) -> Any:
    """Replace each array a in a layer's saved data by function(a).

    Only fields whose annotated type is or contains `marked` are processed. An array that occurs
    several times is passed to `function` only once; `done` caches the results.
    """
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
    """Return, for each field of a NamedTuple, whether its type is or contains `marked`."""
    hints = get_type_hints(kind, include_extras=True)
    return [_contains(hint, marked) for hint in hints.values()]


def _contains(hint: Any, marked: Any) -> bool:
    return hint == marked or any(_contains(each, marked) for each in get_args(hint))


def _once(value: Any, function: Callable[[Any], Any], done: dict) -> Any:
    """Apply `function` to an array, or to each array in a list or tuple; cache the results."""
    if type(value) in (tuple, list):
        return type(value)(_once(each, function, done) for each in value)
    if id(value) not in done:
        done[id(value)] = value, function(value)
    return done[id(value)][1]


class FetchedWeights:
    """Offloaded weight matrices of a stage's blocks, prefetched one block ahead.

    The data that a block saves for the backward pass refers to the parameters instead of their
    loaded values, which would otherwise stay in memory until the backward pass. `blocks` are the
    names of the blocks.
    """

    def __init__(self, parameters: Parameters, blocks: Sequence[str]) -> None:
        self.parameters = parameters
        found: dict[str, list[Parameter]] = defaultdict(list)
        for item in filter(parameters.lies_elsewhere, parameters):
            found[item.unit].append(item)
        self.items = [found[name] for name in blocks]
        self.asked: dict[int, list[Callable[[], Array]]] = {}

    def of(self, block: int, then: int) -> AbstractContextManager[None]:
        """Return a context manager that keeps the weight matrices of `block` loaded.

        On entry, the context manager also starts prefetching the matrices of block `then`.
        """
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
        """Replace the weights in a block's saved data with references to their parameters."""
        if not self.items[block]:
            return saved
        names = {id(item.value): item for item in self.items[block]}
        return _replaced(saved, lambda value: names.get(id(value), value), {}, SavedWeight)

    def within(self, saved: Any, block: int) -> Any:
        """Replace the parameter references in a block's saved data with the loaded weights."""
        return _replaced(saved, _value_of, {}, SavedWeight) if self.items[block] else saved


def _value_of(each: Any) -> Any:
    return each.value if isinstance(each, Parameter) else each
