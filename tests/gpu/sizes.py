"""Kernels at the sizes of real models, with each type, compared with NumPy in float64."""

from functools import partial
from typing import NamedTuple

import numpy as np

from hpc3d.config.input_file import CONSTANTS
from hpc3d.cuda import launch_table
from hpc3d.ops.attention import LEAST, HeadForm, heads_of
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.rotary import Rotation, rotary_table, rotate
from hpc3d.ops.swiglu import swiglu
from hpc3d.ops.update import adamw
from tests.gpu import routed
from tests.gpu.guards import guarded
from tests.gpu.loader import launcher
from tests.reference import fused_ops as fused

UNITS = {"float32": 2e-6, "float16": 2**-10.9, "bfloat16": 2**-7.9}


class Sizes(NamedTuple):
    rows: int
    hidden: int
    vocabulary: int
    padded: int
    heads: int
    sequence: int
    flat: int


LARGE = Sizes(4096, 768, 50257, 50304, 6, 1024, 3_000_017)
ODD = Sizes(1237, 1601, 997, 1003, 3, 511, 1_234_567)
SMALL = Sizes(6, 136, 300, 304, 2, 40, 3001)


class Bench:
    """Random arrays of one type, and the launcher that accepts them."""

    def __init__(self, launch, real, sizes):
        self.launch, self.real, self.sizes = launch, np.dtype(real), sizes
        self.unit, self.random = UNITS[real], np.random.default_rng(11)

    def draw(self, *shape):
        """Return normal numbers of the type, and their float64 values."""
        x = self.random.standard_normal(shape, np.float32).astype(self.real)
        return x, x.astype(np.float64)

    def empty(self, *shape, dtype=None):
        return np.full(shape, np.nan, np.float32).astype(dtype or self.real)

    def same(self, notes, what, got, expected, atol=1e-5):
        rtol = self.unit if got.dtype == self.real else 2e-6
        notes.same(what, got, expected, rtol, atol)


def cases(device, quick):
    launch = guarded(device, launcher(device))
    sizes = {"small": SMALL} if quick else {"GPT-2": LARGE, "odd": ODD}
    for real in device.reals:
        for name, these in sizes.items():
            for kernel in (*KERNELS, *(WHOLE_NUMBERS if real == "float32" else ())):
                case = f"{kernel.__name__} [{real}, {name}]"
                yield case, partial(kernel, Bench(launch, real, these))


def add_norm(bench, notes):
    size = bench.sizes.rows, bench.sizes.hidden
    (x, wide_x), (r, wide_r) = bench.draw(*size), bench.draw(*size)
    (gamma, wide_gamma), (beta, wide_beta) = bench.draw(size[1]), bench.draw(size[1])
    s, y = bench.empty(*size), bench.empty(*size)
    mean, rstd = (bench.empty(size[0], dtype=np.float32) for _ in range(2))
    given = {"x": x, "r": r, "gamma": gamma, "beta": beta, "s": s, "y": y, "mean": mean}
    bench.launch("add_norm", *size, rstd=rstd, columns=size[1], epsilon=1e-5, **given)
    bench.same(notes, "sum", s, wide_x + wide_r)
    stored = s.astype(np.float64)
    _, out, centre, factor = fused.add_norm(stored, None, wide_gamma, wide_beta, 1e-5)
    bench.same(notes, "norm", y, out)
    bench.same(notes, "mean", mean, centre, 1e-6)
    bench.same(notes, "rstd", rstd, factor, 1e-6)


def norm_grad(bench, notes):
    rows, columns = size = bench.sizes.rows, bench.sizes.hidden
    (s, wide_s), (dy, wide_dy), (r, wide_r) = (bench.draw(*size) for _ in range(3))
    gamma, wide_gamma = bench.draw(columns)
    mean, rstd = wide_s.mean(1).astype(np.float32), (1 / wide_s.std(1)).astype(np.float32)
    dx = bench.empty(*size)
    given = {"s": s, "mean": mean, "rstd": rstd, "dy": dy, "gamma": gamma, "residual": r}
    bench.launch("norm_grad", *size, dx=dx, columns=columns, **given)
    wide = mean.astype(np.float64), rstd.astype(np.float64), wide_dy, wide_gamma
    expected, dgamma, dbeta = fused.norm_grad(wide_s, *wide, wide_r)
    bench.same(notes, "dx", dx, expected, 2e-5)
    strips = launch_table.strips(rows)
    partial = bench.empty(strips, 2, columns, dtype=np.float32)
    sums = [bench.empty(columns, dtype=np.float32) for _ in range(2)]
    given = {"x": s, "mean": mean, "rstd": rstd, "dy": dy, "partial": partial}
    bench.launch("norm_columns", *size, rows=rows, columns=columns, **given)
    how = {"strips": strips, "columns": columns, "total": sums[0], "other": sums[1], "add": False}
    bench.launch("sum_strips", 2, columns, partial=partial, **how)
    bench.same(notes, "dgamma", sums[0], dgamma, 1e-5 * rows**0.5)
    bench.same(notes, "dbeta", sums[1], dbeta, 1e-5 * rows**0.5)


def rms_norm(bench, notes):
    """Check RMSNorm of full rows, and its part for split rows."""
    rows, columns = size = bench.sizes.rows, bench.sizes.hidden
    (x, wide_x), (dy, wide_dy), (r, wide_r) = (bench.draw(*size) for _ in range(3))
    gamma, wide_gamma = bench.draw(columns)
    y, dx = bench.empty(*size), bench.empty(*size)
    rstd, squares = (bench.empty(rows, dtype=np.float32) for _ in range(2))
    given = {"mean": None, "rstd": rstd, "gamma": gamma, "columns": columns}
    none = {"r": None, "beta": None, "s": None}
    bench.launch("add_norm", *size, x=x, y=y, epsilon=1e-5, **none, **given)
    _, out, _, factor = fused.add_norm(wide_x, None, wide_gamma, None, 1e-5)
    bench.same(notes, "norm", y, out)
    bench.same(notes, "rstd", rstd, factor, 1e-6)
    bench.launch("norm_grad", *size, s=x, dy=dy, residual=r, dx=dx, **given)
    wide = rstd.astype(np.float64), wide_dy, wide_gamma, wide_r
    bench.same(notes, "dx", dx, fused.norm_grad(wide_x, None, *wide)[0], 2e-5)
    bench.launch("row_squares", *size, x=x, result=squares, columns=columns)
    bench.same(notes, "squares", squares, np.square(wide_x).sum(1))


def gated(bench, notes):
    """Check SwiGLU and its gradient."""
    rows, width = size = bench.sizes.rows, bench.sizes.hidden
    (h, wide), (dg, wide_dg) = bench.draw(rows, 2 * width), bench.draw(*size)
    out, expected = bench.empty(*size), np.empty(size)
    bench.launch("swiglu", *size, h=h, out=out, width=width)
    swiglu(wide, expected)
    bench.same(notes, "swiglu", out, expected)
    bench.same(notes, "slopes of swiglu", h, wide)
    slopes = h.astype(np.float64)
    bench.launch("swiglu_grad", *size, slopes=h, dg=dg, width=width)
    bench.same(notes, "swiglu_grad", h, slopes * wide_dg.repeat(2, axis=1))


def bias_and_sum_of_rows(bench, notes):
    rows, columns = size = bench.sizes.rows, bench.sizes.hidden
    (y, wide), (bias, wide_bias) = bench.draw(*size), bench.draw(columns)
    out = bench.empty(*size)
    bench.launch("add_bias", *size, y=y, bias=bias, out=out, columns=columns)
    bench.same(notes, "add_bias", out, wide + wide_bias)
    partial = bench.empty(launch_table.strips(rows), columns, dtype=np.float32)
    total = bench.empty(columns, dtype=np.float32)
    bench.launch("sum_rows", *size, y=y, partial=partial, rows=rows, columns=columns)
    how = {"strips": len(partial), "columns": columns, "other": None, "add": False}
    bench.launch("sum_strips", 1, columns, partial=partial, total=total, **how)
    bench.same(notes, "sum_rows", total, wide.sum(0), 1e-6 * rows**0.5)


def gelu(bench, notes):
    size = bench.sizes.rows, bench.sizes.hidden
    (h, wide), (bias, wide_bias) = bench.draw(*size), bench.draw(size[1])
    for kind in ("tanh", "exact"):
        slope, out, expected = h.copy(), bench.empty(*size), np.empty_like(wide)
        bench.launch(f"gelu_{kind}", *size, h=slope, bias=bias, out=out, columns=size[1])
        steep = wide.copy()
        try:
            fused.bias_gelu(steep, wide_bias, expected, kind)
        except ImportError:  # the exact one wants SciPy
            continue
        bench.same(notes, f"gelu_{kind}", out, expected)
        bench.same(notes, f"slope of gelu_{kind}", slope, steep)


def cross_entropy(bench, notes):
    rows, columns, vocabulary = 256, bench.sizes.padded, bench.sizes.vocabulary
    rows = min(rows, bench.sizes.rows)
    logits, wide = bench.draw(rows, columns)
    targets = bench.random.integers(0, vocabulary, rows)
    targets[::5] = IGNORE
    losses = bench.empty(rows, dtype=np.float32)
    given = {"logits": logits, "targets": targets, "scale": np.float32([0.25]), "loss": losses}
    bench.launch("cross_entropy", rows, columns, columns=columns, vocabulary=vocabulary, **given)
    bench.same(notes, "loss", losses, fused.cross_entropy(wide, targets, vocabulary, 0.25), 5e-5)
    bench.same(notes, "gradient", logits, wide, 1e-7)


def embedding(bench, notes):
    """Check 2^13 tokens, one of which is much more frequent than the others."""
    rows, columns, table_rows = bench.sizes.rows, bench.sizes.hidden, bench.sizes.vocabulary
    (table, wide), (positions, wide_p) = bench.draw(table_rows, columns), bench.draw(97, columns)
    index = bench.random.integers(0, table_rows, rows)
    index[::3] = 7
    out = bench.empty(rows, columns)
    given = {"table": table, "index": index, "positions": positions, "out": out, "first": 5}
    how = {"period": 97, "table_rows": table_rows, "columns": columns}
    bench.launch("gather_rows", rows, columns, **given, **how)
    expected = wide[index] + wide_p[(5 + np.arange(rows)) % 97]
    bench.same(notes, "gather_rows", out, expected)
    dy, wide_dy = bench.draw(rows, columns)
    total = np.zeros((table_rows, columns), np.float32)
    order = np.argsort(index, kind="stable")
    given = {"dy": dy, "index": index, "order": order, "total": total}
    how = {"table_rows": table_rows, "rows": rows, "columns": columns}
    bench.launch("scatter_rows", rows, columns, **given, **how)
    expected = np.zeros((table_rows, columns))
    np.add.at(expected, index, wide_dy)
    bench.same(notes, "scatter_rows", total, expected, 1e-5 * rows**0.5)


def causal_softmax(bench, notes):
    heads, sequence = bench.sizes.heads, bench.sizes.sequence
    scores, wide = bench.draw(1, heads, sequence, sequence)
    none = dict.fromkeys(("first_row", "first_column", "width", "limit", "factor"), 0)
    sizes = {"heads": heads, "sequence": sequence, "scale": 0.125, "dropout_key": None, **none}
    sizes |= {"causal": 1, "window": 0, "cap": 0}
    softmax = {"scores": scores, "weights": None, "padding": None, "starts": None}
    bench.launch("causal_softmax", heads, sequence, **softmax, **sizes)
    p, _ = fused.causal_softmax(wide, 0.125)
    bench.same(notes, "causal_softmax", scores, p, 1e-7)
    dweights, wide_d = bench.draw(1, heads, sequence, sequence)
    grads = {"p": scores, "dweights": dweights, "scores": None}
    bench.launch("causal_softmax_grad", heads, sequence, **grads, **sizes)
    expected = fused.causal_softmax_grad(scores.astype(np.float64), wide_d, 0.125)
    bench.same(notes, "causal_softmax_grad", dweights, expected, 1e-6)


def chunked_attention(bench, notes):
    """Check a tile on the diagonal, with two queries per key, and the scaling of old output."""
    heads, size, group, width = bench.sizes.heads, bench.sizes.sequence // 2, 2, 64
    shape, where = (heads, size, group, size), (heads * group, size)
    (scores, wide), (dweights, wide_d) = bench.draw(*shape), bench.draw(*shape)
    random = bench.random.standard_normal((3, heads, group, size), np.float32)
    (sums, dots, kept), before = random, random[0].astype(np.float64)
    none = dict.fromkeys(("first_row", "first_column", "width", "limit", "factor"), 0)
    given = {"keys": size, "queries": size, "group": group, "ahead": 0, "first": 0, **none}
    given |= {"window": 0, "cap": 0, "starts": None, "key_position": 0}
    given |= {"sequence": size, "scale": 0.125, "padding": None, "dropout_key": None, "sums": sums}
    s = np.where(np.tri(size, dtype=bool).T[:, None], 0.125 * wide, -np.inf)
    total = np.logaddexp(before, np.log(np.exp(s).sum(1)))
    again, p = scores.copy(), np.exp(s - total[:, None])
    bench.launch("chunk_softmax", *where, scores=scores, kept=kept, **given)
    bench.same(notes, "chunk_softmax", scores, p, 1e-6)
    bench.same(notes, "sums", sums, total)
    bench.same(notes, "kept", kept, np.exp(before - total))
    grads = {"scores": again, "dweights": dweights, "dots": dots}
    bench.launch("chunk_softmax_grad", *where, **grads, **given)
    bench.same(notes, "p again", again, p, 1e-6)
    ds = 0.125 * p * (wide_d - dots.astype(np.float64)[:, None])
    bench.same(notes, "chunk_softmax_grad", dweights, ds, 1e-6)
    out, added = bench.random.standard_normal((2, size, heads * group, width), np.float32)
    columns, expected = heads * group * width, out.astype(np.float64)
    factors = kept.reshape(-1, size).T[..., None].astype(np.float64)
    expected = factors * expected + added.reshape(-1, size, width).swapaxes(0, 1)
    given = {"queries": size, "columns": columns, "width": width, "first": 0, "stride": columns}
    bench.launch("merge_chunk", size, columns, out=out, added=added, kept=kept, **given)
    bench.same(notes, "merge_chunk", out, expected)
    (x, wide_x), (y, wide_y) = bench.draw(size, columns), bench.draw(size, columns)
    given = {"heads": heads * group, "width": width, "sequence": size}
    bench.launch("row_dots", size, columns, x=x, y=y, dots=dots, **given)
    by_head = (wide_x * wide_y).reshape(size, heads, group, width).sum(-1)
    bench.same(notes, "row_dots", dots, by_head.transpose(1, 2, 0), 1e-4)


def merged_hop(bench, notes):
    heads, size, width = bench.sizes.heads, bench.sizes.sequence, 64
    added, wide = bench.draw(size, heads, width)
    out = bench.random.standard_normal((size, heads, width), np.float32)
    sums, new = bench.random.standard_normal((2, heads, size), np.float32)
    total = np.logaddexp(sums, new, dtype=np.float64)
    kept, share = (np.exp(each - total).T[..., None] for each in (sums, new))
    expected = kept * out + share * wide
    new[0, 0], total[0, 0], expected[0, 0] = -32768, sums[0, 0], out[0, 0]  # no visible key
    given = {"queries": size, "heads": heads, "width": width, "first": 0, "sequence": size}
    given |= {"out": out, "added": added, "sums": sums, "added_sums": new, "least": LEAST}
    bench.launch("merge_hop", size, heads * width, **given)
    bench.same(notes, "merge_hop", out, expected)
    bench.same(notes, "merged sums", sums, total)


def rotary(bench, notes):
    sequence, width, heads = bench.sizes.sequence, 64, bench.sizes.heads
    columns = heads * 3 * width
    x, wide = bench.draw(sequence, columns)
    table = rotary_table(Rotation(), sequence, width, np.float32)
    parts = {"cosines": table[0], "sines": table[1], "parts": 3, "turned": 2, "half": width // 2}
    how = {"width": width, "columns": columns, "first": 0, "period": sequence, "sign": 1}
    bench.launch("rotate", sequence, columns, x=x, **parts, **how)
    bench.same(notes, "rotate", x, rotate(wide, table.astype(np.float64), HeadForm(width)))
    assert heads_of(x, sequence, HeadForm(width))[1].shape[1] == heads


def update(bench, notes):
    """Check AdamW with master weights, and the sum of squares."""
    size = bench.sizes.flat
    grad, first, second, master = bench.random.standard_normal((4, size), np.float32)
    second = np.abs(second)
    value = master if bench.real == np.float32 else bench.empty(size)
    factors = np.float32([0.7, 1e-2, 1.3, 0.999])
    w, g, m, v = (each.astype(np.float64) for each in (master, grad, first, second))
    adamw(w, None, g, m, v, CONSTANTS["adamw"], [float(factor) for factor in factors])
    given = {"value": value, "master": None if value is master else master, "grad": grad}
    given |= {"first": first, "second": second, "factors": factors, "size": size}
    bench.launch("adamw", 1, size, **given, **CONSTANTS["adamw"])
    for what, got, expected in (("value", master, w), ("first", first, m), ("second", second, v)):
        bench.same(notes, f"adamw {what}", got, expected, 5e-6)
    notes.same("rounded", value, master.astype(bench.real), 0)
    blocks = launch_table.kernels()["sum_squares"].launch(None, 1, size).grid[0]
    partial, total = bench.empty(blocks, dtype=np.float32), np.full(1, np.nan)
    bench.launch("sum_squares", 1, size, grad=grad, partial=partial, size=size)
    bench.launch("sum_parts", 1, blocks, partial=partial, total=total, parts=blocks, add=False)
    notes.same("sum of squares", total, [np.square(g).sum()], 1e-6)


KERNELS = (
    add_norm,
    norm_grad,
    rms_norm,
    bias_and_sum_of_rows,
    gelu,
    gated,
    cross_entropy,
    embedding,
    causal_softmax,
    chunked_attention,
    merged_hop,
    rotary,
    update,
    *routed.KERNELS,
)
WHOLE_NUMBERS = (routed.slots,)  # they have one type
