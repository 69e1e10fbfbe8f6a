"""Operation descriptor, matrix layouts and algorithm of a cuBLASLt GEMM.

cuBLASLt is column-major: D = alpha op(A) op(B) + beta C. It reads a row-major matrix as the
transpose of that matrix, so out = a b is computed as out' = b' a': A is b, B is a, C is the added
matrix, and D is out. A row of D is a column of out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.cuda.cublaslt_library import Unsupported

if TYPE_CHECKING:
    from hpc3d.cuda.cublaslt_library import Library

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # values of cudaDataType
_FLOAT8 = {"float8_e4m3fn": 28, "float8_e5m2": 29}
_MULTIPLE = 16  # dimensions of float8 matrices must be multiples of 16
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77  # values of cublasComputeType_t

_ROLES = ("a", "b", "out", "add", "bias", "bias_grad", "gelu_input", "gelu_at")
_FUSED = _ROLES[4:]
_EPILOGUES = {
    (): 1,
    ("bias",): 4,
    ("gelu_input",): 160,  # GELU_AUX
    ("bias", "gelu_input"): 164,  # GELU_AUX_BIAS
    ("gelu_at",): 192,  # DGELU
    ("bias_grad",): 256,  # BGRADA: the bias gradient is the sum of op(A) = b' over k
}


class Operand(NamedTuple):
    """Array properties that determine a plan.

    `alignment` is the alignment of the array's address in bytes, capped at 256.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    alignment: int

    @property
    def type(self) -> int:
        return (_TYPES | _FLOAT8)[self.dtype.name]

    @property
    def steps(self) -> list[int]:
        """Strides in elements."""
        return [stride // self.dtype.itemsize for stride in self.strides]

    @property
    def batches(self) -> tuple[int, int]:
        """Number of matrices in the batch, and the stride between them in elements."""
        return (self.shape[0], self.steps[0]) if len(self.shape) == 3 else (1, 0)

    def columns(self) -> tuple[bool, int, int, int]:
        """Return the column-major layout (transposed, rows, columns, leading dimension).

        `transposed` is True if cuBLASLt must transpose the matrix.
        """
        (rows, columns), (down, across) = self.shape[-2:], self.steps[-2:]
        if (columns == 1 or across == 1) and (rows == 1 or down >= columns):
            return False, columns, rows, down if rows > 1 else columns
        if (rows == 1 or down == 1) and across >= rows:
            return True, rows, columns, across
        raise ValueError(
            f"a matrix of shape {self.shape} and strides {tuple(self.steps)} has "
            "neither contiguous rows nor contiguous columns; copy it first"
        )


def operand_of(array: Any, dtype: str | None = None) -> tuple | None:
    """Return the fields of the array's `Operand` as a tuple, or `None` if `array` is `None`.

    `dtype` overrides the dtype of an array that contains 8-bit codes.
    """
    if array is None:
        return None
    address = array.data.ptr | 256
    kind = np.dtype(dtype) if dtype else array.dtype
    return array.shape, array.strides, kind, address & -address


class ProductPlan:
    """Reusable plan of a cuBLASLt GEMM, independent of the addresses of its matrices.

    The plan consists of the operation descriptor, the matrix layouts and, once selected, the
    algorithm.
    """

    def __init__(self, library: Library, key: Sequence[tuple | None], tf32: bool = False) -> None:
        """Create a plan; `key` has one entry per role in _ROLES: Operand fields or `None`."""
        named = zip(_ROLES, key, strict=True)
        given = {role: Operand(*operand) for role, operand in named if operand is not None}
        self.library, self.fused = library, tuple(role for role in _FUSED if role in given)
        _check_shapes(given)
        _check_types(given)
        _check_fused(given, self.fused)
        a, b, out = given["a"], given["b"], given["out"]
        self.operands = {"A": b, "B": a, "C": given.get("add", out), "D": out}
        fast = tf32 and a.dtype == np.float32
        compute = _COMPUTE_32F_FAST_TF32 if fast else _COMPUTE_32F
        self.operation = library.create("MatmulDesc", compute, _TYPES["float32"])
        self.layouts = {name: self.layout(name) for name in self.operands}
        self._describe_fused(given)
        self.algorithm = None

    def __str__(self) -> str:
        a, b, out = (self.operands[name] for name in "BAD")
        fused = f" with {' and '.join(self.fused)}" if self.fused else ""
        return f"{out.dtype} {out.shape} = {a.dtype} {a.shape} x {b.shape}{fused}"

    def layout(self, name: str) -> int:
        """Create the layout of a matrix and set its transpose flag in the operation descriptor."""
        operand = self.operands[name]
        transposed, rows, columns, step = operand.columns()
        if name in "AB":
            self.set(f"TRANS{name}", transposed)
        elif transposed:
            raise ValueError(
                f"out and add must be row-major: {operand.shape}, strides {operand.strides}"
            )
        made = self.library.create("MatrixLayout", operand.type, rows, columns, step)
        count, offset = operand.batches
        self.library.set("MatrixLayout", made, "BATCH_COUNT", count)
        self.library.set("MatrixLayout", made, "STRIDED_BATCH_OFFSET", offset)
        return made

    def _describe_fused(self, given: Mapping[str, Operand]) -> None:
        self.set("EPILOGUE", _EPILOGUES[self.fused])
        for role in self.fused:
            if role in ("bias", "bias_grad"):
                self.set("BIAS_DATA_TYPE", given[role].type)
            else:
                self.set("EPILOGUE_AUX_LD", given[role].columns()[-1])
                self.set("EPILOGUE_AUX_BATCH_STRIDE", given[role].batches[1])

    def point(self, vector: Any, matrix: Any) -> None:
        """Set the addresses of the epilogue's vector (bias, bias_grad) and matrix (GELU input)."""
        if vector is not None:
            self.set("BIAS_POINTER", vector.data.ptr)
        if matrix is not None:
            self.set("EPILOGUE_AUX_POINTER", matrix.data.ptr)

    def set(self, attribute: str, value: int) -> None:
        self.library.set("MatmulDesc", self.operation, attribute, value)


def _check_shapes(given: Mapping[str, Operand]) -> None:
    """Assert that the array shapes are consistent with out[.., m, n] = a[.., m, k] b[.., k, n]."""
    a, b, out = (given[role].shape for role in ("a", "b", "out"))
    assert len(a) in (2, 3) and a[-1] == b[-2] and a[:-2] == b[:-2] == out[:-2], (a, b, out)
    assert out[-2:] == (a[-2], b[-1]), (a, b, out)
    for role in given.keys() & {"add", "gelu_input", "gelu_at"}:
        assert given[role].shape == out, role
    for role in given.keys() & {"bias", "bias_grad"}:
        vector = given[role]
        assert vector.shape == out[-1:] and (out[-1] == 1 or vector.steps == [1]), role


def _check_types(given: Mapping[str, Operand]) -> None:
    a, b, out = (given[role].dtype.name for role in ("a", "b", "out"))
    if a in _FLOAT8:
        return _check_float8(given["a"], given["b"])
    if a != b or a not in _TYPES or out not in (a, "float32"):
        raise ValueError(
            f"{out} = {a} x {b}: a and b must both be {' or '.join(_TYPES)}, and out "
            "must be float32 or have the type of a and b"
        )


def _check_float8(a: Operand, b: Operand) -> None:
    """Reject float8 products that cuBLASLt does not support.

    cuBLASLt also requires both operands to be contiguous along k, which the caller guarantees.
    """
    assert b.dtype.name in _FLOAT8 and not a.columns()[0] and b.columns()[0], (a, b)
    if a.dtype.name == b.dtype.name == "float8_e5m2":
        raise Unsupported("cuBLASLt does not support products of two e5m2 matrices")
    sizes = *a.shape, b.shape[1]
    if any(size % _MULTIPLE for size in sizes):
        raise Unsupported(
            f"cuBLASLt multiplies [{sizes[0]}, {sizes[1]}] and [{sizes[1]}, {sizes[2]}] in float8 "
            f"only if all sizes are multiples of {_MULTIPLE}"
        )


def _check_fused(given: Mapping[str, Operand], fused: tuple[str, ...]) -> None:
    """Reject epilogues that cuBLASLt does not support, because its heuristics may accept them.

    NVIDIA's nvmath-python (epilog_protocol.py) shows that DGELU and BGRADA require k > 1, and that
    BGRADA does not support a transposed A. According to PyTorch (pull request 194497), some
    kernels fault if an epilogue's array is not aligned to 16 bytes.
    """
    if fused not in _EPILOGUES:
        raise Unsupported(f"cuBLASLt has no epilogue that combines {' and '.join(fused)}")
    for role in given.keys() - {"a", "b", "out"}:
        if given[role].dtype != given["out"].dtype:
            raise Unsupported(f"cuBLASLt requires {role} to have the same type as out")
    for role in fused:
        if given[role].alignment < 16:
            raise Unsupported(f"cuBLASLt requires {role} to be aligned to 16 bytes")
    if given["a"].shape[-1] == 1 and given.keys() & {"bias_grad", "gelu_at"}:
        raise Unsupported(f"cuBLASLt does not support {fused[0]} if k is 1")
    if "bias_grad" in given and (len(given["b"].shape) == 3 or given["b"].columns()[0]):
        raise Unsupported("cuBLASLt does not support bias_grad with batches or a transposed b")
    for role in given.keys() & {"gelu_input", "gelu_at"}:
        transposed, *_, step = given[role].columns()
        if transposed or step % 8 or given[role].batches[1] % 8:
            raise Unsupported(
                f"cuBLASLt requires the row length of {role} to be a multiple of 8 elements"
            )
