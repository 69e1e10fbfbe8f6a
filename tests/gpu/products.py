"""Products by cuBLASLt, compared with NumPy in float64: types, transposed factors, batches, and
all fused operations. Products that cuBLASLt does not support are skipped with the reason."""

from functools import partial
from itertools import product as pairs

import numpy as np

from hpc3d.cuda.gpu import Gpu
from hpc3d.ops.float8 import E4M3, E5M2, LARGEST, Coded, encode
from hpc3d.ops.product import accumulate_product, product
from tests.gpu.fake import gelu
from tests.gpu.notes import Skip
from tests.gpu.sizes import UNITS

LAYOUTS = ("nn", "nt", "tn", "tt")  # of a and b, t: a transposed view
SHAPES = ((1, 64, 64), (64, 48, 80), (33, 17, 29), (1024, 768, 3072), (512, 1000, 50257 // 7))
QUICK = SHAPES[:3]
ATTENTION = (5, 128, 64, 128)  # g, m, k, n
FLOAT8 = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
FLOAT8_SHAPES = (16, 16, 16), (64, 48, 80), (1024, 768, 3072), (256, 4096, 512)
STACKS = ((64, 4, 48, 80), (33, 3, 17, 29), (80, 1, 64, 48), (2560, 8, 768, 3072))  # m, e, k, n
FLOAT8_ERROR = {"float32": 2e-3, "bfloat16": 4e-3}  # of the norm
FUSED = (
    "bias",
    "add",
    "add in place",
    "bias and add",
    "scale",
    "bias_grad",
    "bias_grad in place",
    "gelu_input",
    "bias and gelu_input",
    "gelu_at",
)


def cases(device, quick):
    lt = device.lt()
    shapes = QUICK if quick else SHAPES
    for real in device.reals:
        outs = [real] if real == "float32" else [real, "float32"]
        for layout, out in pairs(LAYOUTS, outs):
            name = f"{real} {layout} -> {out}"
            yield name, partial(plain, device, lt, real, layout, out, shapes)
            yield f"{name}, batches", partial(batched, device, lt, real, layout, out)
        for what, out in pairs(FUSED, outs):
            run = partial(fused, device, lt, real, out, what, shapes)
            yield f"{real} -> {out} with {what}", run
        for out in outs:
            run = partial(stacked, device, lt, real, out, STACKS[:2] if quick else STACKS)
            yield f"{real} -> {out}, stacks of experts", run
        yield f"{real}, nothing to sum", partial(empty, device, lt, real)
    yield "float32 by TF32", partial(by_tf32, device, shapes)
    if not device.fake and "bfloat16" in device.reals:
        for kinds, out in pairs(FLOAT8, ("float32", "bfloat16")):
            yield f"{' x '.join(kinds)} -> {out}", partial(by_float8, device, lt, kinds, out)


class Factors:
    """Random arrays on the host (as float64) and on the device."""

    def __init__(self, device, real):
        self.device, self.real = device, np.dtype(real)
        self.random = np.random.default_rng(5)

    def draw(self, *shape, transposed=False, dtype=None):
        """Draw an array of this shape; `transposed` swaps its last two dimensions in memory."""
        lies = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        x = self.random.standard_normal(lies, np.float32).astype(dtype or self.real)
        there, wide = self.device.upload(x), x.astype(np.float64)
        return (there.swapaxes(-1, -2), wide.swapaxes(-1, -2)) if transposed else (there, wide)

    def nothing(self, *shape, dtype):
        return self.device.upload(np.full(shape, np.nan, np.float32).astype(dtype))


def told(function):
    """Skip a case if a call raises an error for unsupported arguments."""
    try:
        return function()
    except Exception as error:
        if type(error).__name__ == "Unsupported":
            raise Skip(f"Unsupported: {error}") from None
        raise


def bounds(out, k, real):
    """Return the error bounds of one rounding, and of sums of k products in float32."""
    unit = UNITS[np.dtype(out).name]
    return unit, (2e-7 * k + 1e-5 * k**0.5) * (1 if real != "float32" else 0.5)


def plain(device, lt, real, layout, out, shapes, notes):
    factors = Factors(device, real)
    for m, k, n in shapes:
        a, wide_a = factors.draw(m, k, transposed=layout[0] == "t")
        b, wide_b = factors.draw(k, n, transposed=layout[1] == "t")
        c = factors.nothing(m, n, dtype=out)
        told(lambda a=a, b=b, c=c: lt.product(a, b, c))
        got = device.download(c)
        notes.same(f"{m} x {k} x {n}", got, wide_a @ wide_b, *bounds(out, k, real))


def batched(device, lt, real, layout, out, notes):
    """Products as in attention: k q' and p' v."""
    factors, (g, m, k, n) = Factors(device, real), ATTENTION
    a, wide_a = factors.draw(g, m, k, transposed=layout[0] == "t")
    b, wide_b = factors.draw(g, k, n, transposed=layout[1] == "t")
    c = factors.nothing(g, m, n, dtype=out)
    told(lambda: lt.product(a, b, c))
    got, bound = device.download(c), bounds(out, k, real)
    notes.same(f"{g} of {m} x {k} x {n}", got, wide_a @ wide_b, *bound)


def stacked(device, lt, real, out, shapes, notes):
    """Products of a layer of experts, the middle dimension of all blocks, without copies: Y = X W,
    dX = dY W', and dW = X' dY, new and accumulated."""
    factors, gpu = Factors(device, real), Gpu(None, lt.product, None, None, None)
    multiply, add = partial(product.cuda_rule, gpu), partial(accumulate_product.cuda_rule, gpu)
    for m, e, k, n in shapes:
        (x, wide_x), (w, wide_w) = factors.draw(m, e, k), factors.draw(k, e, n)
        (dy, wide_dy), (dw, wide_dw) = factors.draw(m, e, n), factors.draw(k, e, n, dtype=out)
        y, dx, new = (factors.nothing(*shape, dtype=out) for shape in (dy.shape, x.shape, w.shape))
        told(partial(multiply, x, w, y))
        told(partial(multiply, dy, w.T, dx))
        told(partial(multiply, x.T, dy, new))
        told(partial(add, dw, x.T, dy))
        wide_new = by_expert(wide_x.T, wide_dy)
        for name, array, expected, terms, between in (
            ("Y", y, by_expert(wide_x, wide_w), k, 0.0),
            ("dX", dx, by_expert(wide_dy, wide_w.T), n, 0.0),
            ("dW", new, wide_new, m, 0.0),
            ("dW added", dw, wide_dw + wide_new, m, np.abs(wide_new)),
        ):
            got, (rtol, atol) = device.download(array), bounds(out, terms, real)
            atol = atol + rtol * between
            notes.same(f"{name}, {e} of {m} x {k} x {n}", got, expected, rtol, atol)


def by_expert(a, b):
    """Multiply [m, e, k] with [k, e, n], expert by expert."""
    products = [a[:, expert] @ b[:, expert] for expert in range(a.shape[1])]
    return np.stack(products, 1)


def fused(device, lt, real, out, what, shapes, notes):
    factors = Factors(device, real)
    for m, k, n in shapes:
        a, wide_a = factors.draw(m, k, transposed="bias_grad" in what)
        b, wide_b = factors.draw(k, n)
        case = Epilogue(factors, what, out, (m, n), wide_a @ wide_b, wide_b)
        told(lambda a=a, b=b, case=case: lt.product(a, b, case.out, **case.given))
        rtol, atol = bounds(out, k, real)
        atol = max(atol, 3e-3) if "gelu" in what else atol
        for name, array, expected in case.results:
            got = device.download(array)
            more = rtol * case.between if name == "out" else 0.0
            notes.same(f"{name}, {m} x {k} x {n}", got, expected, rtol, atol + more)


class Epilogue:
    """Arguments of a product whose plain result is `ab`, and the expected results.

    `between` are the magnitudes of intermediate values that some kernels round before the next
    addition: kernels that add to out in place, and kernels for odd sizes."""

    def __init__(self, factors, what, out, shape, ab, b):
        self.given, self.out = {}, factors.nothing(*shape, dtype=out)
        vector, wide_vector = factors.draw(shape[1], dtype=out)
        matrix, wide_matrix = factors.draw(*shape, dtype=out)
        expected, self.results, terms = ab, [], []
        if what == "scale":
            self.given["scale"], expected = 0.125, 0.125 * ab
        if "bias" in what and "bias_grad" not in what:
            self.given["bias"] = vector
            terms.append(wide_vector)
        if "add" in what or "in place" in what:
            self.given["add"] = matrix
            terms.append(wide_matrix)
        self.between = np.abs(ab) if terms else 0.0
        if len(terms) > 1:  # which is added first is not said
            self.between = self.between + np.max([np.abs(ab + term) for term in terms], 0)
        expected = expected + sum(terms)
        if "in place" in what:
            self.out = matrix
        if "bias_grad" in what:
            self.given["bias_grad"] = vector
            self.results.append(("bias_grad", vector, b.sum(0)))
        if "gelu_input" in what:
            self.given["gelu_input"] = matrix
            self.results.append(("gelu_input", matrix, expected))
            expected = gelu(expected)[0]
        if what == "gelu_at":
            self.given["gelu_at"] = matrix
            expected = expected * gelu(wide_matrix)[1]
            self.between = np.abs(expected)
        self.results.append(("out", self.out, expected))


def empty(device, lt, real, notes):
    factors = Factors(device, real)
    a, _ = factors.draw(4, 0)
    b, _ = factors.draw(0, 8)
    out = factors.nothing(4, 8, dtype=real)
    if device.fake:
        raise Skip("a fake device has its own")
    lt.product(a, b, out)
    notes.same("zeros", device.download(out), np.zeros((4, 8)), 0)


def by_float8(device, lt, kinds, out, notes):
    """Exact operands, so that only the sums differ. The goal is that of float32, but float8 tensor
    cores keep fewer bits of a sum (arXiv:2412.19437, section 3.3.2)."""
    if device.cuda().capability < 89:
        raise Skip("no float8 before compute capability 8.9")
    random = np.random.default_rng(5)
    for m, k, n in FLOAT8_SHAPES:
        (a, wide_a), (b, wide_b) = (
            coded(device, random, kind, shape) for kind, shape in zip(kinds, ((m, k), (n, k)))
        )
        c = device.upload(np.full((m, n), np.nan, np.float32).astype(np.dtype(out)))
        told(lambda a=a, b=b, c=c: lt.coded_product(a, b.T, c))
        notes.near(f"{m} x {k} x {n}", device.download(c), wide_a @ wide_b.T, FLOAT8_ERROR[out])


def coded(device, random, kind, shape):
    """Return a random matrix in float8, and its values in float64."""
    x = random.standard_normal(shape, np.float32)
    scale = np.abs(x).max() / np.float32(LARGEST[kind])
    codes = encode(x / scale, kind)
    there = device.upload(codes.view(np.uint8)), device.upload(np.float32([scale]))
    return Coded(*there, kind, np.dtype("bfloat16")), codes.astype(np.float64) * float(scale)


def by_tf32(device, shapes, notes):
    """Report the loss of accuracy with TF32 factors, which have 11 bits."""
    lt, factors = device.lt(tf32=True), Factors(device, "float32")
    for m, k, n in shapes:
        (a, wide_a), (b, wide_b) = factors.draw(m, k), factors.draw(k, n)
        out = factors.nothing(m, n, dtype="float32")
        told(lambda a=a, b=b, out=out: lt.product(a, b, out))
        notes.near(f"{m} x {k} x {n}", device.download(out), wide_a @ wide_b, 1e-3)
