"""How the cuBLASLt library is found, and the functions in it."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hpc3d.cuda import cublaslt_library
from hpc3d.cuda.cublaslt_library import Library, load
from hpc3d.cuda.cublaslt_plan import ProductPlan, operand_of
from tests.cuda.test_cublaslt import BF16, K, M, N, placed, vector


def test_library_is_loaded_from_the_wheel_or_by_the_linker(monkeypatch):
    """cuda.pathfinder finds it; otherwise, the dynamic linker does, or a message is printed."""
    pathfinder = ModuleType("cuda.pathfinder")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    pathfinder.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(
        abs_path={"cublasLt": "libm.so.6"}[name]
    )
    assert load()._name == "libm.so.6"
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(cublaslt_library, "NAMES", ("libabsent.so.13", "libc.so.6"))
    assert load()._name == "libc.so.6"
    monkeypatch.setattr(cublaslt_library, "NAMES", ("libabsent.so.13",))
    with pytest.raises(
        ValueError, match=r"^libabsent.so.13, .* was not found; run python -m pip install 'hpc3d"
    ):
        load()


@pytest.fixture
def real():
    """The real library, which can describe products without a GPU."""
    try:
        return load()
    except ValueError as absent:
        pytest.skip(str(absent))


def read(real, kind, thing, number, c_type):
    value, written = c_type(), ctypes.c_size_t()
    function = getattr(real, f"cublasLt{kind}GetAttribute")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = pointer, ctypes.c_int, pointer, size, pointer
    how = ctypes.byref(value), ctypes.sizeof(c_type), ctypes.byref(written)
    assert function(thing, number, *how) == 0 and written.value == ctypes.sizeof(c_type)
    return value.value


def test_descriptors_of_the_real_library_have_the_given_attributes(real):
    """Tests a batched product with transposed a and GELU_AUX_BIAS; all attributes are read."""
    a, b = placed((3, M, K), BF16, "columns"), placed((3, K, N), BF16, "padded rows")
    out, bias, aux = placed((3, M, N), BF16), vector(BF16, 1), placed((3, M, N), BF16)
    key = tuple(map(operand_of, (a, b, out, None, bias, None, aux, None)))
    plan = ProductPlan(Library(real), key)
    plan.point(bias, aux)
    i4, u4, i8, u8 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
    operation = {
        (0, i4): 68,
        (1, i4): 0,
        (3, i4): 0,
        (4, i4): 1,
        (7, u4): 164,
        (8, u8): bias.data.ptr,
        (11, u8): aux.data.ptr,
        (12, i8): N,
        (13, i8): M * N,
        (26, i4): 14,
    }
    for (number, c_type), value in operation.items():
        assert read(real, "MatmulDesc", plan.operation, number, c_type) == value, number
    # Type, order, rows, columns, leading dimension, matrices and the step between them.
    layouts = {
        "A": (14, 0, N, K, N + 8, 3, K * (N + 8)),
        "B": (14, 0, M, K, M, 3, M * K),
        "C": (14, 0, N, M, N, 3, M * N),
        "D": (14, 0, N, M, N, 3, M * N),
    }
    for name, values in layouts.items():
        for number, (c_type, value) in enumerate(
            zip((u4, i4, u8, u8, i8, i4, i8), values, strict=True)
        ):
            assert read(real, "MatrixLayout", plan.layouts[name], number, c_type) == value, name
