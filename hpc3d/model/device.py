"""The rules of kernels for arrays of a device: which CUDA kernels and which products they are.

`Rules(...).register(cupy.ndarray)` makes the model run on CuPy's arrays.  All of them are posted
on the current stream, and none waits for the device.
"""

import numpy as np

from hpc3d.cuda import launch_table
from hpc3d.cuda.cublaslt_library import Unsupported
from hpc3d.model import attention, layers, loss, ops, parameters
from hpc3d.model.device_attention import Attention, drawn
from hpc3d.model.random import words
from hpc3d.tensor import product as products

FLOAT, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


RULES = {
    products: ("product", "accumulate", "accumulate_product"),
    ops: (
        *("add_bias", "sum_rows", "dropped", "add_repeated", "sum_repeated", "gelu_tanh"),
        *("gelu_exact", "gelu_grad", "norm", "norm_grad", "moments", "combine_moments"),
        *("normalise", "normalise_sums", "normalise_grad"),
    ),
    layers: ("gather_rows", "scatter_rows"),
    loss: ("cross_entropy", "row_max", "local_sums", "negative_log", "softmax_grad"),
    attention: ("attend", "attend_again", "attend_grad"),
    parameters: ("initialise", "sum_of_squares"),
}


class Rules(Attention):
    """Sums, moments and the gradients of parameters are float32, losses and norms float64 [1]."""

    rules = RULES

    def __init__(self, *given):
        super().__init__(*given)
        self.unsupported = set()

    def register(self, kind):
        """Let arrays of a type take these `rules`: names of kernels, by module."""
        for module, names in self.rules.items():
            for name in names:
                getattr(module, name).register(kind, getattr(self, name))

    # Products

    def product(self, a, b, out, bias=None, onto=None, **gelu):
        if gelu:
            self.with_gelu(a, b, out, bias, gelu)
        elif bias is None:
            self.multiply(a, b, out, add=onto)
        elif not self.fused(a, b, out, onto, bias=bias):
            self.multiply(a, b, out, add=onto)
            self.add_bias(out, bias, out)
        return out

    def with_gelu(self, a, b, out, bias, gelu):
        try:
            self.multiply(a, b, out, bias=bias, **gelu)
        except Unsupported as error:
            raise ValueError(f"train.fused_gelu = true: {error}; use false") from None

    def fused(self, a, b, out, add, **more):
        """Whether cuBLASLt did a product with something `more`: what it cannot do once, such as
        a vector at an odd address, is not asked for again."""
        (name, vector), *_ = more.items()
        key = name, a.shape, a.strides, b.shape, b.dtype, vector.data.ptr % 16
        if key in self.unsupported:
            return False
        try:
            self.multiply(a, b, out, add=add, **more)
        except Unsupported:
            self.unsupported.add(key)
        return key not in self.unsupported

    def accumulate(self, grad, dw):
        self.launch("accumulate", 1, grad.size, grad=grad, dw=dw, size=grad.size)

    def accumulate_product(self, grad, a, b, sums=None):
        """The sums come with the product where cuBLASLt has that, else in two passes over b."""
        if sums is None:
            self.multiply(a, b, grad, add=grad)
            return
        part = self.empty(sums.shape, FLOAT)
        if self.fused(a, b, grad, grad, bias_grad=part):
            self.accumulate(sums, part)
        else:
            self.multiply(a, b, grad, add=grad)
            self.add_rows(sums, b)

    def add_rows(self, total, y, add=True):
        """total (+)= the sum of the rows of y."""
        rows, columns = y.shape
        strips = launch_table.strips(rows)
        partial = self.empty((strips, columns), FLOAT)
        self.launch("sum_rows", rows, columns, y=y, partial=partial, rows=rows, columns=columns)
        self.add_strips(partial, add, total)

    def add_strips(self, partial, add, total, other=None):
        """total (+)= the sum of the strips; where there is another, it is that of the second half
        of their columns."""
        sums, columns = 1 if other is None else 2, total.size
        given = {"partial": partial, "total": total, "other": other, "add": add}
        self.launch("sum_strips", sums, columns, strips=len(partial), columns=columns, **given)

    # Rows

    def add_bias(self, y, bias, out):
        if bias.shape == y.shape:
            self.launch("add", 1, y.size, x=y, y=bias, out=out, size=y.size)
        else:
            self.launch("add_bias", *y.shape, y=y, bias=bias, out=out, columns=y.shape[1])
        return out

    def sum_rows(self, y):
        total = self.empty(y.shape[1:], FLOAT)
        self.add_rows(total, y, add=False)
        return total

    def dropped(self, x, mask, out):
        self.launch("dropped", *x.shape, x=x, out=out, columns=x.shape[1], **drawn(mask, "key"))
        return out

    def add_repeated(self, x, table, first, out):
        period, columns = table.shape
        given = {"first": first, "period": period, "columns": columns}
        self.launch("add_repeated", *x.shape, x=x, table=table, out=out, **given)
        return out

    def sum_repeated(self, dx, first, period):
        rows, columns = dx.shape
        total = self.empty((period, columns), FLOAT)
        given = {"first": first, "period": period, "rows": rows, "columns": columns, "add": 0}
        self.launch("sum_repeated", period, columns, dx=dx, total=total, **given)
        return total

    def gelu_tanh(self, h, out):
        self.launch("gelu_tanh", *h.shape, h=h, bias=None, out=out, columns=h.shape[1])
        return out

    def gelu_exact(self, h, out):
        self.launch("gelu_exact", *h.shape, h=h, bias=None, out=out, columns=h.shape[1])
        return out

    def gelu_grad(self, slope, dg):
        self.launch("gelu_grad", 1, slope.size, slope=slope, dg=dg, size=slope.size)
        return slope

    # Norms

    def norm(self, x, gamma, beta, epsilon, empty):
        """Keeps x itself, with the mean and the factor of every row."""
        y = empty(x.shape, x.dtype)
        mean, rstd = (self.empty(x.shape[:1], FLOAT) for _ in range(2))
        given = {"mean": mean, "rstd": rstd, "columns": x.shape[1], "epsilon": epsilon}
        vectors = {"gamma": gamma, "beta": beta}
        self.launch("add_norm", *x.shape, x=x, r=None, s=None, y=y, **vectors, **given)
        return y, (x, (mean, rstd), gamma)

    def norm_grad(self, dy, x, moments, gamma, residual, dgamma, dbeta, empty):
        (mean, rstd), dx = moments, empty(x.shape, x.dtype)
        rows = {"mean": mean, "rstd": rstd, "dy": dy}
        given = {"gamma": gamma, "residual": residual, "dx": dx, "columns": x.shape[1]}
        self.launch("norm_grad", *x.shape, s=x, **rows, **given)
        self.add_columns(x, rows, dgamma, dbeta, add=True)
        return dx

    def add_columns(self, x, rows, dgamma, dbeta, add):
        """The gradients of gamma and beta (+)= sums over rows of dy n and dy."""
        count, columns = x.shape
        partial = self.empty((launch_table.strips(count), 2 * columns), FLOAT)
        given = {"partial": partial, "rows": count, "columns": columns, **rows}
        self.launch("norm_columns", *x.shape, x=x, **given)
        self.add_strips(partial, add, dgamma, dbeta)

    def moments(self, x):
        result = self.empty((2, x.shape[0]), FLOAT)
        self.launch("moments", *x.shape, x=x, result=result, columns=x.shape[1])
        return result

    def combine_moments(self, parts, count):
        ranks, _, rows = parts.shape
        result = self.empty((2, rows), FLOAT)
        given = {"ranks": ranks, "rows": rows, "count": count}
        self.launch("combine_moments", rows, 1, parts=parts, result=result, **given)
        return result[0], result[1]

    def normalise(self, x, mean, rstd, gamma, beta, n, y):
        given = {"gamma": gamma, "beta": beta, "n": n, "y": y, "columns": x.shape[1]}
        self.launch("normalise", *x.shape, x=x, mean=mean, rstd=rstd, **given)
        return n, y

    def normalise_sums(self, n, dy, gamma):
        sums = self.empty((2, n.shape[0]), FLOAT)
        self.launch(
            "normalise_sums", *n.shape, n=n, dy=dy, gamma=gamma, sums=sums, columns=n.shape[1]
        )
        dgamma, dbeta = (self.empty(gamma.shape, FLOAT) for _ in range(2))
        self.add_columns(n, {"mean": None, "rstd": None, "dy": dy}, dgamma, dbeta, add=False)
        return sums, dgamma, dbeta

    def normalise_grad(self, n, rstd, dy, gamma, means, residual, dx):
        given = {"means": means, "residual": residual, "dx": dx, "columns": n.shape[1]}
        self.launch("normalise_grad", *n.shape, n=n, rstd=rstd, dy=dy, gamma=gamma, **given)
        return dx

    # Tokens

    def gather_rows(self, table, index):
        out = self.empty((index.size, table.shape[1]), table.dtype)
        given = {"positions": None, "first": 0, "period": 1, "table_rows": table.shape[0]}
        given |= {"table": table, "index": index, "columns": table.shape[1]}
        self.launch("gather_rows", *out.shape, out=out, **given)
        return out

    def scatter_rows(self, dy, index, order, shape):
        total = self.empty(shape, FLOAT)
        total.fill(0)
        given = {"index": index, "order": order, "total": total, "table_rows": shape[0]}
        rows, columns = dy.shape
        self.launch("scatter_rows", *dy.shape, dy=dy, rows=rows, columns=columns, **given)
        return total

    # The loss

    def cross_entropy(self, logits, targets, vocabulary, scale):
        """The gradient at once, in the logits' memory."""
        rows, columns = logits.shape
        losses = self.empty((rows,), FLOAT)
        given = {"targets": targets, "scale": scale, "loss": losses}
        sizes = {"columns": columns, "vocabulary": vocabulary}
        self.launch("cross_entropy", rows, columns, logits=logits, **given, **sizes)
        return self.sum_parts(losses), (logits, None)

    def sum_parts(self, partial, total=None):
        """The sum of float32 [n], or total + it."""
        add, total = total is not None, self.empty((1,), DOUBLE) if total is None else total
        given = {"partial": partial, "total": total, "parts": partial.size, "add": add}
        self.launch("sum_parts", 1, partial.size, **given)
        return total

    def row_max(self, logits, columns):
        top = self.empty(logits.shape[:1], FLOAT)
        given = {"columns": logits.shape[1], "valid": min(columns, logits.shape[1])}
        self.launch("row_max", *logits.shape, logits=logits, top=top, **given)
        return top

    def local_sums(self, logits, top, index):
        """The logits stay as they are."""
        sums = self.empty((2, logits.shape[0]), FLOAT)
        given = {"top": top, "index": index, "sums": sums, "columns": logits.shape[1]}
        self.launch("local_sums", *logits.shape, logits=logits, **given)
        return sums, (top, index)

    def negative_log(self, sums, valid):
        total, rows = self.empty((1,), DOUBLE), sums.shape[1]
        self.launch("negative_log", 1, rows, sums=sums, valid=valid, loss=total, rows=rows)
        return total

    def softmax_grad(self, logits, rest, scale):
        if rest is not None:
            total, valid, (top, index) = rest
            given = {"top": top, "total": total, "index": index, "valid": valid, "scale": scale}
            self.launch(
                "softmax_grad", *logits.shape, logits=logits, columns=logits.shape[1], **given
            )
        return logits

    # Parameters

    def initialise(self, value, item, seed, mesh):
        value.fill(item.mean)
        if not item.std:
            return
        rows, columns = item.layout.slices(item.shape, mesh)
        count = max(0, min(rows.stop, item.rows or rows.stop) - rows.start)
        value[count:] = 0
        place = {"first_row": rows.start, "first_column": columns.start, "width": item.shape[1]}
        given = {"columns": value.shape[1], "std": item.std, **place}
        key = self.bring(words((seed, item.name)))
        self.launch("initialise", count, value.shape[1], value=value[:count], key=key, **given)

    def sum_of_squares(self, flat, parts):
        total = self.empty((1,), DOUBLE)
        total.fill(0)
        for part in joined_slices(parts):
            grad = flat[part]
            blocks = launch_table.kernels()["sum_squares"].launch(None, 1, grad.size).grid[0]
            partial = self.empty((blocks,), FLOAT)
            self.launch("sum_squares", 1, grad.size, grad=grad, partial=partial, size=grad.size)
            self.sum_parts(partial, total)
        return total


def joined_slices(parts):
    """Slices, those that touch as one."""
    whole = []
    for part in sorted(parts, key=lambda part: part.start):
        if whole and whole[-1].stop == part.start:
            part = slice(whole.pop().start, part.stop)
        if part.start < part.stop:
            whole.append(part)
    return whole
