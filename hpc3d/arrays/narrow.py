"""16-bit float arrays on CPUs: stored and communicated in 16 bits, computed in float32.

Accumulation in 16 bits is inaccurate: 1,000 ones add up to 256 in bfloat16.  NumPy's matrix
products are hundreds of times slower in float16 than in float32, and MPI supports neither float16
nor bfloat16.  Operations on a `Narrow` array therefore return float32 results, which are rounded
once when they are stored in a `Narrow` array:

    primitive                     implementation for Narrow arrays
    composite                     NumPy implementation, which calls the ufuncs below
    with a narrow rule            narrow rule, in blocks whose float32 copies fit in the cache
    any other                     NumPy implementation, on float32 copies of all operands
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from hpc3d.arrays.primitive import Primitive, add_backend

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array

WIDE, _INTEGERS = np.dtype(np.float32), np.dtype(np.uint16)
CACHE = 1 << 17  # maximum size in bytes of the float32 copy of a block
_PRODUCTS = {np.dot, np.einsum, np.inner, np.tensordot, np.vdot}


def wide(dtype: DTypeLike) -> np.dtype:
    """Return the dtype used to accumulate values of type `dtype`: float32 or wider."""
    return np.promote_types(dtype, WIDE)


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes per element of the named dtype, or 0 if NumPy does not support it."""
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return 0


def is_narrow(dtype: np.dtype) -> bool:
    """Return True for 16-bit floating-point types, including bfloat16, whose NumPy kind is V."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


class Narrow(np.ndarray):
    """Array of 16-bit floats, for which NumPy functions return plain float32 arrays."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if out is None:
            return getattr(ufunc, method)(*map(widened, inputs), **options)
        if method == "__call__" and not (ufunc.signature or options) and len(out) == 1:
            for part, operands in _blocks(out[0], inputs):
                part[...] = ufunc(*map(widened, operands))
            return out[0]
        totals = [np.empty(each.shape, WIDE) for each in out]
        getattr(ufunc, method)(*map(widened, inputs), out=tuple(totals), **options)
        for each, total in zip(out, totals, strict=True):
            each[...] = total
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function, types, arguments, options):
        if function in _PRODUCTS:
            return function(*map(widened, arguments), **options)
        result = super().__array_function__(function, types, arguments, options)
        return of_type(result) if isinstance(result, np.ndarray) else result

    def astype(self, dtype: DTypeLike, *args: Any, **options: Any) -> np.ndarray:  # type: ignore[override]
        return of_type(np.asarray(self).astype(dtype, *args, **options))

    def view(self, *args: Any, **options: Any) -> np.ndarray:  # type: ignore[override]
        shown = np.asarray(self).view(*args, **options)
        kinds = [each for each in args if isinstance(each, type) and issubclass(each, np.ndarray)]
        return shown if kinds else of_type(shown)


def of_type(array: np.ndarray) -> np.ndarray:
    """Return a Narrow view of an array of 16-bit floats; return any other array unchanged."""
    plain = type(array) is np.ndarray
    return np.ndarray.view(array, Narrow) if plain and is_narrow(array.dtype) else array


def widened(operand: Any) -> Any:
    """Convert a Narrow array, or the Narrow arrays in a tuple, to float32 copies.

    Other operands are returned unchanged.
    """
    if isinstance(operand, Narrow):
        return np.asarray(operand).astype(WIDE)
    if isinstance(operand, tuple) and any(isinstance(each, Narrow) for each in operand):
        each = map(widened, operand)
        return type(operand)(*each) if hasattr(operand, "_fields") else tuple(each)
    return operand


def integers(block: Array) -> Array:
    """Return a view of a 16-bit array as integers, which MPI can transfer.

    Any other array is returned unchanged.
    """
    return block.view(_INTEGERS) if block.dtype.itemsize == _INTEGERS.itemsize else block


def _blocks(out: Any, inputs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield row blocks of `out` that fit in the cache, with the matching blocks of `inputs`."""
    if out.ndim == 0:
        yield out, inputs
        return
    rows = max(1, CACHE // max(1, WIDE.itemsize * out[:1].size))
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        yield (
            out[part],
            [
                each[part] if np.ndim(each) == out.ndim and len(each) > 1 else each
                for each in inputs
            ],
        )


def narrow_rule(primitive: Primitive) -> Callable[..., Any] | None:
    """Return a primitive's rule (implementation) for Narrow arrays, or `None` if none is needed.

    A composite primitive needs no separate rule, because its only implementation also accepts
    Narrow arrays.
    """
    if primitive.narrow_rule or primitive.abstract_rule is primitive.numpy:
        return primitive.narrow_rule
    return lambda *given, **named: primitive.numpy(*map(_to_read, given), **named)


def _to_read(operand: Any) -> Any:
    """Convert Narrow arrays to read-only float32 copies; writes to a copy would be lost."""
    copies = widened(operand)
    pairs = (
        zip(operand, copies, strict=True) if isinstance(operand, tuple) else [(operand, copies)]
    )
    for given, copy in pairs:
        if isinstance(given, Narrow):
            copy.flags.writeable = False
    return copies


add_backend(Narrow, narrow_rule)
