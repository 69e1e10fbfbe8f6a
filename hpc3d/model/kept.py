"""What a block keeps for its backward pass, in fewer bits than it was computed with.

The values that pass forward are the exact ones; backward works with rounded copies of those that
waited for it (Gist's delayed precision reduction, Jain et al. 2018):

    bfloat16   2 bytes an element
    int8       1 byte an element, and a scale of 4 bytes a row: its largest magnitude / 127
    float8     1 byte an element, e4m3, and a scale of 4 bytes a row: its largest magnitude / 448

All else that is kept, such as weights, moments and choices, stays as it is.  So does what lies in
memory that several ranks read: it is there once for all of them, and a copy would be there once
for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import contiguous, writeable
from hpc3d.ops.quantize import decode_rows, encode_rows

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh


# The fields of what layers save, tuples of arrays and of such tuples, that are activations.
_ACTIVATIONS = ("x", "rows", "qkv", "probabilities", "out", "slopes", "y")


class RoundedArray(NamedTuple):
    """An array in fewer bits: `codes` of its shape, and the scales of its rows, if there are."""

    codes: Array
    scales: Array | None


class KeptForm:
    """How activations of the type `dtype` wait for backward: as they are, or rounded."""

    def __init__(self, mesh: Mesh, dtype: DTypeLike, keep_dtype: str | None) -> None:
        self.mesh, self.dtype = mesh, np.dtype(dtype)
        self.keep_dtype = np.dtype(np.uint8 if keep_dtype == "float8" else keep_dtype or dtype)

    def rounded(self, saved: Any) -> Any:
        """What was saved with its activations rounded, each once although it has two names."""
        if self.keep_dtype == self.dtype:
            return saved
        with self.mesh.trace.span("round"):
            return self._replaced(saved, self._round, {})

    def restored(self, saved: Any) -> Any:
        """The same, with arrays to work with."""
        if self.keep_dtype == self.dtype:
            return saved
        with self.mesh.trace.span("round"):
            return self._replaced(saved, self._restore, {})

    def _replaced(self, saved, function, done):
        """A tuple of tuples with `function` applied to activations, once each."""
        changed = {}
        for name, value in saved._asdict().items():
            if name in _ACTIVATIONS:
                changed[name] = self._once(value, function, done)
            elif hasattr(value, "_asdict"):
                changed[name] = self._replaced(value, function, done)
        return saved._replace(**changed)

    def _once(self, value, function, done):
        """`function` of an array, or of each that fused attention keeps."""
        if type(value) is tuple:
            return tuple(self._once(each, function, done) for each in value)
        if id(value) not in done:
            done[id(value)] = value, function(value)
        return done[id(value)][1]

    def _round(self, array):
        if array is None or array.dtype != self.dtype or not writeable(array):
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
