"""ctypes bindings for the libcublasLt functions, attributes and error codes used for GEMMs.

The constants, types and sizes match cublasLt.h and are identical in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
SUCCESS = 0
# INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED: status codes of calls that launched no kernel.
REFUSALS = (7, 8, 15)


class Unsupported(RuntimeError):
    """Raised if cuBLASLt does not support a GEMM. The output array is unchanged."""


class Heuristic(ctypes.Structure):
    """GEMM algorithm proposed by cuBLASLt's heuristic (cublasLtMatmulHeuristicResult_t)."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


_CREATED = ctypes.POINTER(c_void_p)
_SET_ATTRIBUTE = (c_void_p, c_int, c_void_p, c_size_t)
_FUNCTIONS = {
    "cublasLtCreate": (_CREATED,),
    "cublasLtMatmulDescCreate": (_CREATED, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _SET_ATTRIBUTE,
    "cublasLtMatrixLayoutCreate": (_CREATED, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": _SET_ATTRIBUTE,
    "cublasLtMatmulPreferenceCreate": (_CREATED,),
    "cublasLtMatmulPreferenceSetAttribute": _SET_ATTRIBUTE,
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p,) * 7,
        c_int,
        ctypes.POINTER(Heuristic),
        ctypes.POINTER(c_int),
    ),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
    "cublasLtGetStatusName": (c_int,),
}
_ATTRIBUTES = {
    "MatmulDesc": {
        "TRANSA": (3, c_int32),
        "TRANSB": (4, c_int32),
        "EPILOGUE": (7, c_uint32),
        "BIAS_POINTER": (8, c_uint64),
        "EPILOGUE_AUX_POINTER": (11, c_uint64),
        "EPILOGUE_AUX_LD": (12, c_int64),
        "EPILOGUE_AUX_BATCH_STRIDE": (13, c_int64),
        "A_SCALE_POINTER": (17, c_uint64),
        "B_SCALE_POINTER": (18, c_uint64),
        "BIAS_DATA_TYPE": (26, c_int32),
    },
    "MatrixLayout": {"BATCH_COUNT": (5, c_int32), "STRIDED_BATCH_OFFSET": (6, c_int64)},
    "MatmulPreference": {
        "MAX_WORKSPACE_BYTES": (1, c_uint64),
        "REDUCTION_SCHEME_MASK": (3, c_uint32),
        "MIN_ALIGNMENT_A_BYTES": (5, c_uint32),
        "MIN_ALIGNMENT_B_BYTES": (6, c_uint32),
        "MIN_ALIGNMENT_C_BYTES": (7, c_uint32),
        "MIN_ALIGNMENT_D_BYTES": (8, c_uint32),
    },
}


def load() -> ctypes.CDLL:
    """Load cuBLASLt from NVIDIA's wheel if cuda.pathfinder finds it, else by library name."""
    names = NAMES
    with suppress(ImportError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        names = (load_nvidia_dynamic_lib("cublasLt").abs_path, *NAMES)
    for name in filter(None, names):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ValueError(
        f"{' or '.join(NAMES)}, required for GPU matrix products, was not found; run"
        " python -m pip install 'hpc3d[gpu-cuda12]' (or gpu-cuda13, depending on the driver)"
    )


class Library:
    """Wrapper for cuBLASLt's functions that raises an exception if a call fails."""

    def __init__(self, dll: Any) -> None:
        for name, arguments in _FUNCTIONS.items():
            getattr(dll, name).argtypes = arguments
        dll.cublasLtGetStatusName.restype = ctypes.c_char_p
        self.dll = dll

    def call(self, name: str, *arguments: Any, refusals: Sequence[int] = ()) -> None:
        """Call a function of the library.

        Raises Unsupported if its status is in `refusals`, and RuntimeError on any other failure.
        """
        status = getattr(self.dll, name)(*arguments)
        if status != SUCCESS:
            failure = Unsupported if status in refusals else RuntimeError
            raise failure(f"{name}: {self.dll.cublasLtGetStatusName(status).decode()}")

    def create(self, kind: str, *arguments: Any) -> int:
        """Create a cuBLASLt object and return its handle. The object is never destroyed."""
        made = c_void_p()
        self.call(f"cublasLt{kind}Create", byref(made), *arguments)
        return made.value

    def set(self, kind: str, thing: int, attribute: str, value: int) -> None:
        number, c_type = _ATTRIBUTES[kind][attribute]
        held = c_type(value)
        size = ctypes.sizeof(held)
        self.call(f"cublasLt{kind}SetAttribute", thing, number, byref(held), size)
