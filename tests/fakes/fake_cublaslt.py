"""Fake cuBLASLt in NumPy on host memory, column-major as in cublasLt.h.

The functions are C functions with the prototypes of the header, so that a wrong argument type is
detected. Attributes are stored by number and size. The heuristics reject what the documentation
excludes. An algorithm accepts only the problem and the alignments that it was requested for.
"""

import ctypes
from collections import Counter
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from math import pi, sqrt

import ml_dtypes
import numpy as np

SUCCESS, NOT_INITIALIZED, INVALID_VALUE, INTERNAL_ERROR, NOT_SUPPORTED = 0, 1, 7, 14, 15
STATUSES = {
    SUCCESS: b"CUBLAS_STATUS_SUCCESS",
    NOT_INITIALIZED: b"CUBLAS_STATUS_NOT_INITIALIZED",
    INVALID_VALUE: b"CUBLAS_STATUS_INVALID_VALUE",
    INTERNAL_ERROR: b"CUBLAS_STATUS_INTERNAL_ERROR",
    NOT_SUPPORTED: b"CUBLAS_STATUS_NOT_SUPPORTED",
}
R_32F, R_16F, R_16BF, E4M3, E5M2 = 0, 2, 14, 28, 29
DTYPES = {
    R_32F: np.float32,
    R_16F: np.float16,
    R_16BF: ml_dtypes.bfloat16,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
# A, B, C and D of computations in float32 (cublasLtMatmul, table of types).
TAKEN = {(R_32F, R_32F), (R_16F, R_16F), (R_16F, R_32F), (R_16BF, R_16BF), (R_16BF, R_32F)}

COMPUTE_TYPE, SCALE_TYPE, TRANSA, TRANSB, EPILOGUE, BIAS, BIAS_STRIDE = 0, 1, 3, 4, 7, 8, 10
AUX, AUX_LD, AUX_STRIDE, AUX_TYPE, BIAS_TYPE = 11, 12, 13, 22, 26
A_SCALE, B_SCALE = 17, 18
TYPE, ORDER, ROWS, COLS, LD, COUNT, STRIDE = 0, 1, 2, 3, 4, 5, 6
MAX_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)

# Attributes by number: format as NumPy writes it, and the default.
OPERATION = {
    COMPUTE_TYPE: ("i4", None),
    SCALE_TYPE: ("i4", None),
    TRANSA: ("i4", 0),
    TRANSB: ("i4", 0),
    EPILOGUE: ("u4", 1),
    BIAS: ("u8", 0),
    BIAS_STRIDE: ("i8", 0),
    AUX: ("u8", 0),
    AUX_LD: ("i8", 0),
    AUX_STRIDE: ("i8", 0),
    AUX_TYPE: ("i4", -1),
    A_SCALE: ("u8", 0),
    B_SCALE: ("u8", 0),
    BIAS_TYPE: ("i4", -1),
}
LAYOUT = {
    TYPE: ("u4", None),
    ORDER: ("i4", 0),
    ROWS: ("u8", None),
    COLS: ("u8", None),
    LD: ("i8", None),
    COUNT: ("i4", 1),
    STRIDE: ("i8", 0),
}
PREFERENCE = {
    0: ("u4", 0),
    MAX_WORKSPACE: ("u8", 0),
    REDUCTIONS: ("u4", 7),
    **{number: ("u4", 256) for number in ALIGNMENTS},
}

# cublasLtMatmulHeuristicResult_t.
RESULT = np.dtype(
    {
        "names": ["algorithm", "workspace", "state", "waves"],
        "formats": ["8u8", "u8", "i4", "f4"],
        "offsets": [0, 64, 72, 76],
        "itemsize": 96,
    }
)
WITH_BIAS, WITH_GELU, WITH_SLOPE, WITH_AUX, BGRADA, BGRADB = 4, 32, 64, 128, 256, 512
EPILOGUES = (1, 4, 32, 36, 160, 164, 192, BGRADA, BGRADB)
NEEDED = 1 << 16  # bytes of workspace that every algorithm wants

CREATED, POINTERS = POINTER(c_void_p), (c_void_p,) * 7
ATTRIBUTE = (c_void_p, c_int, c_void_p, c_size_t)
PROTOTYPES = {
    "cublasLtCreate": (CREATED,),
    "cublasLtMatmulDescCreate": (CREATED, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": ATTRIBUTE,
    "cublasLtMatrixLayoutCreate": (CREATED, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": ATTRIBUTE,
    "cublasLtMatmulPreferenceCreate": (CREATED,),
    "cublasLtMatmulPreferenceSetAttribute": ATTRIBUTE,
    "cublasLtMatmulAlgoGetHeuristic": (*POINTERS, c_int, c_void_p, POINTER(c_int)),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class Refusal(Exception):
    def __init__(self, status):
        self.status = status


def want(condition, status=INVALID_VALUE):
    if not condition:
        raise Refusal(status)


def matrices(pointer, dtype, rows, columns, step, count, stride):
    """Return column-major matrices in memory, [count, rows, columns]: (i, j) is at i + j step."""
    size = np.dtype(dtype).itemsize
    extent = rows + (columns - 1) * step + (count - 1) * stride
    memory = (ctypes.c_byte * (extent * size)).from_address(pointer)
    flat = np.frombuffer(memory, f"u{size}")
    strides = stride * size, size, step * size
    return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), strides).view(dtype)


def gelu(x):
    return x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2


def slope(x):
    u = np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
    return (1 + u) / 2 + x * (1 - u * u) / 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)


class FakeLt:
    """Fake ctypes.CDLL of cuBLASLt. `refused` are epilogues without an algorithm, `fails` names
    functions that return INTERNAL_ERROR, and `calls` counts calls by name."""

    def __init__(self, refused=(), fails=()):
        self.refused, self.fails, self.calls = refused, fails, Counter()
        self.things, self.algorithms, self.streams, self.errors = {}, {}, [], []
        self.computed, self.preferred = [], []
        for name, arguments in PROTOTYPES.items():
            function = ctypes.CFUNCTYPE(c_int, *arguments)(self.guarded(name))
            setattr(self, name, function)
        self.texts = {status: ctypes.c_char_p(name) for status, name in STATUSES.items()}
        named = ctypes.CFUNCTYPE(c_void_p, c_int)
        self.cublasLtGetStatusName = named(
            lambda status: ctypes.cast(self.texts[status], c_void_p).value
        )

    def guarded(self, name):
        """Convert a method to a C function, which returns a status instead of raising errors."""
        method = getattr(self, f"do_{name.removeprefix('cublasLt')}")

        def function(*arguments):
            self.calls[name] += 1
            try:
                want(name not in self.fails, INTERNAL_ERROR)
                method(*arguments)
            except Refusal as refusal:
                return refusal.status
            except BaseException as error:
                self.errors.append(error)
                return INTERNAL_ERROR
            return SUCCESS

        return function

    def make(self, made, table, **values):
        thing = {number: default for number, (_, default) in table.items()}
        handle = 0x7FFF_0000_0000 + 64 * len(self.things)
        self.things[handle] = table, thing
        made[0] = handle
        return thing

    def put(self, handle, number, pointer, size):
        table, thing = self.things[handle]
        kind = np.dtype(table[number][0])
        want(pointer and size == kind.itemsize)
        thing[number] = np.frombuffer(ctypes.string_at(pointer, size), kind)[0].item()

    def thing(self, handle):
        return self.things[handle][1]

    def do_Create(self, made):
        self.make(made, {})

    def do_MatmulDescCreate(self, made, compute, scale):
        self.make(made, OPERATION).update({COMPUTE_TYPE: compute, SCALE_TYPE: scale})

    def do_MatrixLayoutCreate(self, made, kind, rows, columns, step):
        self.make(made, LAYOUT).update({TYPE: kind, ROWS: rows, COLS: columns, LD: step})

    def do_MatmulPreferenceCreate(self, made):
        self.make(made, PREFERENCE)

    do_MatmulDescSetAttribute = put
    do_MatrixLayoutSetAttribute = put
    do_MatmulPreferenceSetAttribute = put

    def do_MatmulAlgoGetHeuristic(self, handle, operation, *given):
        *layouts, preference, asked, results, count = given
        self.thing(handle)
        operation, preference = self.thing(operation), self.thing(preference)
        layouts = [self.thing(layout) for layout in layouts]
        want(asked == 1)
        check(operation, layouts)
        count[0] = 0
        want(operation[EPILOGUE] not in self.refused, NOT_SUPPORTED)
        if not preference[MAX_WORKSPACE]:
            return
        number = len(self.algorithms) + 1
        asked_for = [preference[each] for each in ALIGNMENTS]
        asked_for += [alignment(operation[BIAS]), alignment(operation[AUX])]
        self.algorithms[number] = problem(operation, layouts), asked_for
        self.preferred.append(dict(preference))
        result = np.zeros(1, RESULT)
        result["algorithm"], result["workspace"], result["waves"] = number, NEEDED, 0.5
        result["state"] = 0 if preference[MAX_WORKSPACE] >= NEEDED else NOT_SUPPORTED
        ctypes.memmove(results, result.ctypes.data, result.nbytes)
        count[0] = 1

    def do_Matmul(self, handle, operation, alpha, *given):
        a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *given = given
        algorithm, workspace, workspace_bytes, stream = given
        self.thing(handle)
        operation = self.thing(operation)
        layouts = [self.thing(layout) for layout in (a_layout, b_layout, c_layout, d_layout)]
        check(operation, layouts)
        numbers = set(np.frombuffer(ctypes.string_at(algorithm, 64), np.uint64).tolist())
        asked, aligned = self.algorithms[numbers.pop()]
        want(not numbers and asked == problem(operation, layouts))
        addresses = a, b, c, d, operation[BIAS], operation[AUX]
        want(all(alignment(at) >= least for at, least in zip(addresses, aligned, strict=True)))
        want(workspace and workspace % 256 == 0 and workspace_bytes >= NEEDED)
        factors = [c_float.from_address(pointer).value for pointer in (alpha, beta)]
        self.streams.append(stream)
        self.computed.append(operation[COMPUTE_TYPE])
        compute(operation, layouts, (a, b, c, d), *factors)


def alignment(address):
    return (address | 256) & -(address | 256)


def problem(operation, layouts):
    """Return the problem of an algorithm: everything except addresses."""
    addresses = BIAS, AUX, A_SCALE, B_SCALE
    described = {number: value for number, value in operation.items() if number not in addresses}
    return described, layouts


def check(operation, layouts):
    """Reject what the documentation excludes."""
    a, b, c, d = layouts
    want(operation[COMPUTE_TYPE] in (68, 77) and operation[SCALE_TYPE] == R_32F)
    want(operation[COMPUTE_TYPE] == 68 or a[TYPE] == R_32F)
    for layout in layouts:
        want(layout[ORDER] == 0 and layout[ROWS] > 0 and layout[COLS] > 0)
        want(layout[LD] >= layout[ROWS] and layout[COUNT] == a[COUNT] > 0)
    want(c[TYPE] == d[TYPE], NOT_SUPPORTED)
    if a[TYPE] in (E4M3, E5M2):
        check_float8(operation, layouts)
    else:
        want(a[TYPE] == b[TYPE] and (a[TYPE], d[TYPE]) in TAKEN, NOT_SUPPORTED)
    m, k = sizes(a, operation[TRANSA])
    again, n = sizes(b, operation[TRANSB])
    want(k == again and sizes(c, 0) == sizes(d, 0) == (m, n))
    check_epilogue(operation, k, d)


def check_float8(operation, layouts):
    """Only op(A) = A' and op(B) = B, sizes and steps divisible by 16, and not e5m2 for both."""
    a, b, _, d = layouts
    want({a[TYPE], b[TYPE]} <= {E4M3, E5M2} and E4M3 in (a[TYPE], b[TYPE]), NOT_SUPPORTED)
    want(operation[TRANSA] and not operation[TRANSB] and d[TYPE] in (R_32F, R_16F, R_16BF))
    for layout in (a, b):
        want(not any(layout[key] % 16 for key in (ROWS, COLS, LD)), NOT_SUPPORTED)


def check_epilogue(operation, k, d):
    epilogue = operation[EPILOGUE]
    want(epilogue in EPILOGUES)
    want(k > 1 or not epilogue & (WITH_SLOPE | BGRADA | BGRADB), NOT_SUPPORTED)
    if epilogue & (WITH_BIAS | BGRADA | BGRADB):
        want(operation[BIAS] % 16 == 0 and operation[BIAS])
        want(operation[BIAS_TYPE] in (-1, d[TYPE]), NOT_SUPPORTED)
        want(not epilogue & (BGRADA | BGRADB) or d[COUNT] == 1, NOT_SUPPORTED)
        want(epilogue != BGRADA or not operation[TRANSA], NOT_SUPPORTED)
        want(epilogue != BGRADB or operation[TRANSB], NOT_SUPPORTED)
    if epilogue & WITH_AUX:
        want(operation[AUX] and operation[AUX_TYPE] in (-1, d[TYPE]))
        want(operation[AUX_LD] >= d[ROWS] and operation[AUX_LD] % 8 == 0)
        want(operation[AUX_STRIDE] % 8 == 0)


def sizes(layout, transposed):
    size = layout[ROWS], layout[COLS]
    return size[::-1] if transposed else size


def wide(matrix):
    return matrix.astype(np.float32)


def factor(pointer):
    """Return the number at an address, or 1 if the address is null."""
    return np.float32(c_float.from_address(pointer).value if pointer else 1)


def compute(operation, layouts, pointers, alpha, beta):
    """Compute D = epilogue(alpha op(A) op(B) + beta C)."""
    a, b, c, d = (view(*each) for each in zip(layouts, pointers, strict=True))
    left = wide(a.transpose(0, 2, 1) if operation[TRANSA] else a)
    right = wide(b.transpose(0, 2, 1) if operation[TRANSB] else b)
    x = np.float32(alpha) * factor(operation[A_SCALE]) * factor(operation[B_SCALE]) * left @ right
    if beta:
        x = x + np.float32(beta) * wide(c)
    count, rows, columns = d.shape
    epilogue, dtype = operation[EPILOGUE], d.dtype
    if epilogue & WITH_BIAS:
        bias = matrices(operation[BIAS], dtype, rows, 1, rows, count, operation[BIAS_STRIDE])
        x = x + wide(bias)
    if epilogue & WITH_AUX:
        auxiliary = matrices(
            operation[AUX], dtype, rows, columns, operation[AUX_LD], count, operation[AUX_STRIDE]
        )
    if epilogue & WITH_GELU:
        if epilogue & WITH_AUX:
            auxiliary[...] = x
        x = gelu(x)
    if epilogue & WITH_SLOPE:
        x = x * slope(wide(auxiliary))
    if epilogue == BGRADA:
        matrices(operation[BIAS], dtype, rows, 1, rows, 1, 0)[0, :, 0] = left[0].sum(1)
    if epilogue == BGRADB:
        matrices(operation[BIAS], dtype, columns, 1, columns, 1, 0)[0, :, 0] = right[0].sum(0)
    d[...] = x


def view(layout, pointer):
    of = (layout[ROWS], layout[COLS], layout[LD], layout[COUNT], layout[STRIDE])
    return matrices(pointer, DTYPES[layout[TYPE]], *of)
