"""Products by a fake cuBLASLt, compared with NumPy in float64."""

import itertools
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from hpc3d.cuda.cublaslt import Lt
from hpc3d.cuda.cublaslt_library import Unsupported
from hpc3d.cuda.gpu import Gpu
from hpc3d.ops.float8 import E4M3, E5M2, Coded, multiply_coded
from hpc3d.ops.gelu import gelu_tanh
from hpc3d.ops.product import accumulate_product, product
from tests.fakes.fake_cublaslt import FakeLt
from tests.fakes.fake_device import DeviceArray

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [
    pytest.param(np.dtype(factors), np.dtype(out), id=f"{np.dtype(factors)}-{np.dtype(out)}")
    for factors, out in [
        ("f4", "f4"),
        ("f2", "f2"),
        ("f2", "f4"),
        (BF16, BF16),
        (BF16, "f4"),
    ]
]
ROUNDING = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}
M, N, K = 6, 8, 5
LAYOUTS = ("rows", "padded rows", "columns", "padded columns")
FUSED = (
    (),
    ("bias",),
    ("bias_grad",),
    ("gelu_input",),
    ("bias", "gelu_input"),
    ("gelu_at",),
)
STREAM = 0x5EA_0000_1234


def aligned(shape, dtype, offset=0):
    """Return memory with arbitrary values, `offset` bytes after a multiple of 256."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(nbytes + 512, 0x5A, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def placed(shape, dtype, layout="rows", offset=0):
    """Return a device array of zeros with the given memory layout."""
    *count, rows, columns = shape
    across = "columns" in layout
    inner = [columns, rows] if across else [rows, columns]
    room = [inner[0], inner[1] + 8 * ("padded" in layout)]
    array = aligned((*count, *room), dtype, offset).view(DeviceArray)[..., : inner[1]]
    array = array.swapaxes(-1, -2) if across else array
    array[...] = 0
    return array


def numbers(shape, dtype, seed, layout="rows"):
    """Return small integers, whose products and sums are exact in every type."""
    array = placed(shape, dtype, layout)
    array[...] = np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype).view(DeviceArray)
    return array


def vector(dtype, seed, offset=0):
    array = aligned((N,), dtype, offset).view(DeviceArray)
    array[...] = np.random.default_rng(seed).integers(-2, 3, N).astype(dtype).view(DeviceArray)
    return array


@pytest.fixture
def memory():
    return aligned((1 << 20,), np.uint8)


@pytest.fixture
def fake():
    return FakeLt()


@pytest.fixture
def lt(fake, memory):
    yield Lt(STREAM, (memory.ctypes.data, memory.nbytes), library=fake)
    assert not fake.errors


def exact(array):
    return np.asarray(array, np.float64)


def gelu(x):
    """Return the GELU of the model, and its derivative."""
    h, out = x.copy(), np.empty_like(x)
    gelu_tanh(h, out)
    return out, h


def fuse(fused, shape, dtype):
    """Return arrays for the parameters `fused`."""
    given = {}
    for role in fused:
        matrix = numbers(shape, dtype, 4, "padded rows")
        array = vector(dtype, 3) if role.startswith("bias") else matrix
        if role in ("bias_grad", "gelu_input"):
            array.fill(np.nan)
        given[role] = array
    return given


def expected(a, b, add, scale, fused):
    """Return out and, by name, the other written arrays, in float64."""
    x = scale * (exact(a) @ exact(b))
    x = x if add is None else x + exact(add)
    x = x + exact(fused["bias"]) if "bias" in fused else x
    if "bias_grad" in fused:
        return x, {"bias_grad": exact(b).sum(0)}
    if "gelu_input" in fused:
        return gelu(x)[0], {"gelu_input": x}
    if "gelu_at" in fused:
        return x * gelu(exact(fused["gelu_at"]))[1], {}
    return x, {}


@pytest.mark.parametrize(("factors", "dtype"), TYPES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param((), id="one", marks=pytest.mark.slow),
        pytest.param((1,), id="batch of 1", marks=pytest.mark.slow),
        pytest.param((3,), id="batch of 3"),
    ],
)
def test_products_with_all_layouts_and_epilogues(lt, factors, dtype, count):
    """Tests all transposes, row paddings, sums and epilogues."""
    ways = itertools.product(LAYOUTS, LAYOUTS, ("none", "same", "other"), FUSED)
    for of_a, of_b, adding, fused in ways:
        if "bias_grad" in fused and (count or "columns" in of_b):
            continue
        a = numbers((*count, M, K), factors, 1, of_a)
        b = numbers((*count, K, N), factors, 2, of_b)
        out = numbers((*count, M, N), dtype, 5, "padded rows")
        given = fuse(fused, out.shape, dtype)
        add = {"none": None, "same": out, "other": numbers(out.shape, dtype, 6)}[adding]
        scale = 1.0 if "bias_grad" in fused else 0.5
        wanted, written = expected(a, b, add, scale, given)
        if add is None:
            out.fill(np.nan)
        lt.product(a, b, out, add=add, scale=scale, **given)
        name = f"{of_a} x {of_b}, add {adding}, {fused}"
        near = ROUNDING[dtype.name] if fused and "gelu" in fused[-1] else 0
        np.testing.assert_allclose(exact(out), wanted, near, near * 1e-1, err_msg=name)
        for role, values in written.items():
            np.testing.assert_array_equal(exact(given[role]), values, name)


def test_product_does_not_write_to_row_padding(lt):
    """The memory between the rows of out belongs to other arrays."""
    whole = numbers((M, 2 * N), np.float32, 1)
    before, out = whole.copy(), whole[:, :N]
    lt.product(numbers((M, K), np.float32, 2), numbers((K, N), np.float32, 3), out)
    assert np.array_equal(whole[:, N:], before[:, N:])
    assert not np.array_equal(out, before[:, :N])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 5), (6, 1, 5), (6, 8, 1), (1, 1, 5), (1, 1, 1)])
@pytest.mark.parametrize("of_a", LAYOUTS)
@pytest.mark.parametrize("of_b", LAYOUTS)
def test_products_with_a_dimension_of_one(lt, m, n, k, of_a, of_b):
    """If a size is 1, its stride is meaningless."""
    a, b = numbers((m, k), np.float32, 1, of_a), numbers((k, n), np.float32, 2, of_b)
    out = placed((m, n), np.float32, "padded rows")
    lt.product(a, b, out)
    np.testing.assert_array_equal(exact(out), exact(a) @ exact(b))


def test_bfloat16_products_accumulate_in_float32(lt):
    """In bfloat16, 256 + 1 + 1 + ... would remain 256."""
    a, b = placed((M, 64), BF16), placed((64, N), BF16)
    a.fill(1)
    b.fill(1)
    a[:, 0] = 256
    out = placed((M, N), np.float32)
    lt.product(a, b, out)
    assert np.all(out == 256 + 63)


def test_partial_sums_are_added_in_float32(lt, fake):
    for number, (factors, dtype) in enumerate([("f4", "f4"), (BF16, BF16), (BF16, "f4")]):
        a, b = numbers((M, K), factors, 1), numbers((K, N), factors, 2)
        lt.product(a, b, placed((M, N), dtype))
        assert fake.preferred[number][3] == (2 if dtype == BF16 else 7)


@pytest.mark.parametrize(("tf32", "computed"), [(False, [68, 68]), (True, [77, 68])])
def test_tf32_applies_only_to_float32(fake, memory, tf32, computed):
    lt = Lt(STREAM, (memory.ctypes.data, memory.nbytes), tf32=tf32, library=fake)
    for dtype in (np.float32, BF16):
        a, b = numbers((M, K), dtype, 1), numbers((K, N), dtype, 2)
        lt.product(a, b, placed((M, N), dtype))
    assert fake.computed == computed
    assert fake.streams == [STREAM, STREAM]


ASKED = "cublasLtMatmulAlgoGetHeuristic"


def test_heuristics_are_queried_once_per_problem(lt, fake):
    """After that, a product makes one call, and one more for the address of each fused array."""
    for seed in range(3):
        a, b = numbers((M, K), np.float32, seed), numbers((K, N), np.float32, seed + 5)
        out, given = placed((M, N), np.float32), fuse(("bias", "gelu_input"), (M, N), np.float32)
        wanted, _ = expected(a, b, None, 1.0, given)
        before = Counter(fake.calls)
        lt.product(a, b, out, **given)
        np.testing.assert_allclose(exact(out), wanted, 1e-5, 1e-6)
    assert fake.calls[ASKED] == 1
    assert fake.calls - before == {"cublasLtMatmul": 1, "cublasLtMatmulDescSetAttribute": 2}


def test_each_distinct_problem_queries_the_heuristics(lt, fake):
    """Problems differ in shapes, strides, types, fused operations and alignments."""
    f4, f2 = np.dtype("f4"), np.dtype("f2")

    def product(m=M, dtype=f4, of_a="rows", out_type=f4, offset=0, add=None, **given):
        a, b = placed((m, K), dtype, of_a, offset), numbers((K, N), dtype, 2)
        lt.product(a, b, placed((m, N), out_type), add=add, **given)
        return fake.calls[ASKED]

    kinds = [
        {},
        {"m": M + 1},
        {"dtype": f2},
        {"dtype": f2, "out_type": f2},
        {"of_a": "padded rows"},
        {"of_a": "columns"},
        {"offset": 4},
        {"offset": 16},
        {"add": numbers((M, N), f4, 1)},
        {"bias": vector(f4, 1)},
        {"bias": vector(f4, 1, offset=16)},
    ]
    assert [product(**kind) for kind in kinds] == [*range(1, len(kinds) + 1)]
    assert [product(**kind) for kind in kinds] == [len(kinds)] * len(kinds)


REFUSED = {
    "bias and bias_grad": ("combines", {"bias": "vector", "bias_grad": "vector"}),
    "slope and sum": ("combines", {"gelu_at": "matrix", "bias_grad": "vector"}),
    "slope and bias": ("combines", {"gelu_at": "matrix", "bias": "vector"}),
    "a bias of float32": ("the same type", {"bias": "wide vector"}),
    "a sum of float32": ("the same type", {"bias_grad": "wide vector"}),
    "an add of float32": ("the same type", {"add": "wide matrix"}),
    "a slope of float32": ("the same type", {"gelu_at": "wide matrix"}),
    "a bias off": ("16 bytes", {"bias": "vector off"}),
    "a scaled sum": ("scale", {"bias_grad": "vector", "scale": 2.0}),
    "a batch's sum": ("batches", {"bias_grad": "vector", "count": (3,)}),
    "the sum of a transposed b": ("transposed", {"bias_grad": "vector", "of_b": "columns"}),
    "one term and a sum": ("k is 1", {"bias_grad": "vector", "k": 1}),
    "one term and a slope": ("gelu_at if k is 1", {"gelu_at": "matrix", "k": 1}),
    "a row of 5": ("multiple of 8", {"gelu_input": "matrix", "n": 5}),
}


@pytest.mark.parametrize(("why", "given"), REFUSED.values(), ids=REFUSED)
def test_unsupported_product_is_rejected_before_any_write(lt, fake, why, given):
    given = dict(given)
    n, k, count = given.pop("n", N), given.pop("k", K), given.pop("count", ())
    a = numbers((*count, M, k), BF16, 1)
    b = numbers((*count, k, n), BF16, 2, given.pop("of_b", "rows"))
    out = numbers((*count, M, n), BF16, 3)
    arrays = {
        "vector": vector(BF16, 4),
        "wide vector": vector(np.float32, 4),
        "vector off": vector(BF16, 4, offset=8),
        "matrix": numbers(out.shape, BF16, 4),
        "wide matrix": numbers(out.shape, np.float32, 4),
    }
    given = {role: arrays.get(value, value) for role, value in given.items()}
    before = [array.copy() for array in (out, *arrays.values())]
    with pytest.raises(Unsupported, match=why):
        lt.product(a, b, out, **given)
    for array, was in zip((out, *arrays.values()), before, strict=True):
        assert np.array_equal(array, was)
    assert fake.calls["cublasLtMatmul"] == 0


def test_epilogue_without_an_algorithm_raises_unsupported(memory):
    """The same product is possible without the epilogue."""
    lt = Lt(STREAM, (memory.ctypes.data, memory.nbytes), library=FakeLt(refused=(4,)))
    a, b, out = (numbers(shape, np.float32, 1) for shape in ((M, K), (K, N), (M, N)))
    with pytest.raises(Unsupported, match=f"^{ASKED}: CUBLAS_STATUS_NOT_SUPPORTED$"):
        lt.product(a, b, out, bias=vector(np.float32, 1))
    lt.product(a, b, out)
    np.testing.assert_array_equal(exact(out), exact(a) @ exact(b))


@pytest.mark.parametrize("nbytes", [0, 1 << 12])
def test_workspace_that_is_too_small_raises_unsupported(memory, nbytes):
    """The heuristics find no algorithm, or mark it as unusable."""
    lt = Lt(STREAM, (memory.ctypes.data, nbytes), library=FakeLt())
    a, b, out = (numbers(shape, BF16, 1) for shape in ((M, K), (K, N), (M, N)))
    with pytest.raises(Unsupported, match=r"bfloat16 \(6, 8\) = bfloat16 \(6, 5\) x \(5, 8\) wit"):
        lt.product(a, b, out, bias=vector(BF16, 2))


@pytest.mark.parametrize("name", ["cublasLtCreate", "cublasLtMatrixLayoutCreate", ASKED])
def test_cublaslt_failure_names_the_call_and_status(memory, name):
    a, b, out = (numbers(shape, BF16, 1) for shape in ((M, K), (K, N), (M, N)))
    with pytest.raises(RuntimeError, match=f"^{name}: CUBLAS_STATUS_INTERNAL_ERROR$") as raised:
        library = FakeLt(fails=(name,))
        Lt(STREAM, (memory.ctypes.data, memory.nbytes), library=library).product(a, b, out)
    assert raised.type is RuntimeError


def test_invalid_operands_are_rejected(lt):
    a, b, out = (numbers(shape, np.float32, 1) for shape in ((M, K), (K, N), (M, N)))
    with pytest.raises(ValueError, match="copy it first"):
        lt.product(numbers((M, 2 * K), np.float32, 1)[:, ::2], b, out)
    with pytest.raises(ValueError, match="copy it first"):
        lt.product(np.broadcast_to(a[:1], (M, K)), b, out)
    with pytest.raises(ValueError, match="copy it first"):
        lt.product(np.broadcast_to(placed((M, 1), np.float32, "columns"), (M, K)), b, out)
    with pytest.raises(ValueError, match="row-major"):
        lt.product(a, b, placed((M, N), np.float32, "columns"))
    with pytest.raises(ValueError, match="float16 = float32 x float32"):
        lt.product(a, b, out.astype(np.float16))
    with pytest.raises(ValueError, match="float64"):
        lt.product(*(array.astype(np.float64) for array in (a, b, out)))
    with pytest.raises(AssertionError):
        lt.product(a, b, out[:-1])


@pytest.mark.parametrize("adding", ["none", "same", "other"])
def test_product_with_k_of_0_writes_zeros(lt, fake, adding):
    """The product is X' dY without tokens, for an expert that no token chose."""
    a, b = placed((M, 0), BF16, "columns"), placed((0, N), BF16)
    out, other = numbers((M, N), np.float32, 1), numbers((M, N), np.float32, 2)
    add = {"none": None, "same": out, "other": other}[adding]
    wanted, grad = 0 if add is None else exact(add), vector(np.float32, 3)
    lt.product(a, b, out, add=add, bias_grad=grad)
    assert np.all(exact(out) == wanted) and not grad.any()
    bias = vector(np.float32, 4)
    lt.product(a, b, out, add=other, bias=bias)
    np.testing.assert_array_equal(exact(out), exact(other) + exact(bias))
    with pytest.raises(Unsupported, match="k = 0"):
        lt.product(a, b, out, gelu_at=other)
    assert fake.calls["cublasLtMatmul"] == 0


def test_product_with_0_rows_makes_no_call(lt, fake):
    """There are no tokens."""
    a, b, out = placed((0, K), BF16), numbers((K, N), BF16, 1), placed((0, N), BF16)
    lt.product(a, b, out, bias=vector(BF16, 1), gelu_input=placed((0, N), BF16))
    with pytest.raises(Unsupported, match="no rows"):
        lt.product(a, b, out, bias_grad=vector(BF16, 1))
    assert fake.calls["cublasLtMatmul"] == 0


def in_the_middle(x):
    """Return matrices [e, m, k] as a stack [m, e, k]."""
    stack = placed((x.shape[1], x.shape[0], x.shape[2]), x.dtype)
    stack[...] = x.swapaxes(0, 1)
    return stack


@pytest.mark.parametrize(("factors", "dtype"), TYPES)
@pytest.mark.parametrize("size", [(3, M, N, K), (1, M, N, K), (4, 1, N, K), (4, M, 1, 1)])
def test_batched_expert_products(lt, factors, dtype, size):
    """The experts are the middle dimension, without copies; `.T` transposes each matrix."""
    count, m, n, k = size
    gpu = Gpu(None, lt.product, None, None, None)
    a, b = numbers((count, m, k), factors, 1), numbers((count, k, n), factors, 2)
    expected, out = exact(a) @ exact(b), in_the_middle(numbers((count, m, n), dtype, 3))
    before = exact(out)
    lefts = in_the_middle(a), in_the_middle(a.swapaxes(1, 2)).T
    rights = in_the_middle(b), in_the_middle(b.swapaxes(1, 2)).T
    for left, right in itertools.product(lefts, rights):
        out[...] = before.astype(dtype).view(DeviceArray)
        accumulate_product.cuda_rule(gpu, out, left, right)
        np.testing.assert_array_equal(exact(out), before + expected.swapaxes(0, 1))
        out.fill(np.nan)
        assert product.cuda_rule(gpu, left, right, out) is out
        np.testing.assert_array_equal(exact(out), expected.swapaxes(0, 1))
        wide = np.empty(out.shape)
        product.numpy(exact(left), exact(right), wide)
        np.testing.assert_array_equal(wide, expected.swapaxes(0, 1))


def test_batched_product_with_0_rows(lt):
    gpu = Gpu(None, lt.product, None, None, None)
    a, b = placed((0, 3, K), np.float32), placed((K, 3, N), np.float32)
    product.cuda_rule(gpu, a, b, placed((0, 3, N), np.float32))
    grad = placed((K, 3, N), np.float32)
    grad.fill(2)
    accumulate_product.cuda_rule(gpu, grad, a.T, placed((0, 3, N), np.float32))
    assert (exact(grad) == 2).all()


class Turning(Gpu):
    """Device that copies matrices to another layout."""

    def __init__(self, lt):
        super().__init__(None, lt.product, None, None, None, lt.coded_product)

    def contiguous(self, x):
        copy = placed(x.shape, x.dtype)
        copy[...] = x
        return copy


def coded(shape, kind, dtype, scale=1.0, turned=False):
    """Return a float8 matrix, and its values."""
    codes, scales = placed(shape[::-1] if turned else shape, np.uint8), placed((1, 1), np.float32)
    draw = np.random.default_rng(len(kind)).standard_normal(codes.shape).astype(kind)
    codes[...], scales[...] = draw.view(np.uint8).view(DeviceArray), scale
    wide = draw.astype(np.float64) * scale
    return Coded(codes, scales.reshape(1), kind, dtype, turned), wide.T if turned else wide


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f2"), BF16])
def test_float8_products_with_all_layouts(lt, kinds, dtype):
    """Factors in other layouts are transposed first."""
    gpu, out = Turning(lt), placed((32, 48), dtype)
    for turned in itertools.product((False, True), repeat=2):
        a, left = coded((32, 64), kinds[0], dtype, 0.5, turned[0])
        b, right = coded((64, 48), kinds[1], dtype, 0.25, turned[1])
        assert (a.shape, b.shape) == ((32, 64), (64, 48))
        multiply_coded.cuda_rule(gpu, out, a, b)
        wanted, unit = left @ right, ROUNDING[dtype.name]
        np.testing.assert_allclose(exact(out), wanted, rtol=unit, atol=8 * unit)
    assert len(lt.plans) == 1


@pytest.mark.parametrize(
    ("sizes", "kinds", "why"),
    [
        ((32, 64, 24), (E4M3, E4M3), "multiples of 16"),
        ((8, 64, 16), (E4M3, E5M2), "multiples of 16"),
        ((16, 16, 16), (E5M2, E5M2), "two e5m2 matrices"),
    ],
)
def test_unsupported_float8_product_error_names_the_key(lt, sizes, kinds, why):
    m, k, n = sizes
    (a, _), (b, _) = coded((m, k), kinds[0], BF16), coded((k, n), kinds[1], BF16)
    with pytest.raises(
        ValueError, match=f"train.product_scale = tensor: .*{why}.*; set it to block"
    ):
        multiply_coded.cuda_rule(Turning(lt), placed((m, n), BF16), a, b)


def test_float8_product_with_k_of_0_writes_zeros(lt):
    (a, _), (b, _) = coded((16, 0), E4M3, BF16), coded((0, 16), E4M3, BF16)
    out = placed((16, 16), BF16)
    out.fill(np.nan)
    multiply_coded.cuda_rule(Turning(lt), out, a, b)
    assert not exact(out).any()
