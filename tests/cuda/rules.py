"""Device rules on the host: kernels run in the emulator, and products in NumPy."""

import threading
from collections import Counter
from math import prod

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16")
import numpy as np
import pytest
import torch
from torch.nn.functional import gelu

from hpc3d.arrays.pool import contiguous, from_host, on_host, to_host, value_of, writeable
from hpc3d.comm import threads
from hpc3d.cuda import launch_table
from hpc3d.cuda.cudnn_attention import result_shape
from hpc3d.cuda.gpu import Gpu, add_gpu
from hpc3d.ops.attention import heads_of, queries_of
from hpc3d.ops.float8 import E4M3
from tests.fakes import fake_cudnn
from tests.fakes.fake_device import DeviceArray, DevicePool, Tape, do, on_device, plain, tape
from tests.pipeline.mixes import config_of


def host_waits():
    assert not tape(), "the host waits for the device, or sends it something, within a graph"


class CudaArray(DeviceArray):
    """Device array with the rules of CUDA kernels."""

    def fill(self, value):
        do(lambda: plain(self).fill(value))

    def __setitem__(self, key, value):
        do(lambda: plain(self).__setitem__(key, plain(value)))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        return made(super().__array_ufunc__, ufunc, method, *inputs, out=out, **options)

    def __array_function__(self, function, types, arguments, options):
        return made(super().__array_function__, function, types, arguments, options)


def made(function, *arguments, **options):
    """Return the result of a function of arrays; during a capture, only its memory is known."""
    if not tape():
        return function(*arguments, **options)
    if options.get("out"):
        do(lambda: function(*arguments, **options))
        return options["out"][0]
    with np.errstate(all="ignore"):
        result = function(*arguments, **options)
    do(lambda: plain(result).__setitem__(..., plain(function(*arguments, **options))))
    return result


class CudaPool(DevicePool):
    kind, on_device, graph = CudaArray, True, Tape

    def empty(self, shape, dtype, kind="activation"):
        return empty(shape, dtype) if tape() else super().empty(shape, dtype, kind)

    def bring(self, array):
        host_waits()
        values = array if isinstance(array, np.ndarray) else np.asarray(array, np.float32)
        brought = self.empty(values.shape, values.dtype)
        plain(brought)[...] = values
        return brought

    def refill(self, array, values):
        host_waits()
        plain(array)[...] = values


def some(lines, *quick):
    """Return all cases; those that are not `quick` are slow."""
    slow = pytest.mark.slow
    return [
        line
        if n in quick
        else pytest.param(*(line if type(line) is tuple else [line]), marks=slow)
        for n, line in enumerate(lines)
    ]


def on_devices(line, function):
    """Call `function(mesh, config)` on every rank of a mix."""
    config = config_of(line)
    beside, _ = threads.meshes(config.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], "nccl", pool=CudaPool) as device:
            return function(device, config)

    return threads.run(config.sizes(), rank)


def empty(shape, dtype):
    """Return an array of bytes that are NaN in every type."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    if tape():
        tape().taken.append(array)
    return array.view(CudaArray)


class Launcher:
    """Launcher that runs one kernel at a time, and counts the launches."""

    def __init__(self, emulate):
        self.emulate, self.one = emulate, threading.RLock()
        self.count, self.bytes, self.products = Counter(), Counter(), Counter()

    def __call__(self, name, rows, columns, /, **given):
        given = {key: plain(value) for key, value in given.items()}
        with self.one:
            self.count[name] += 1
            twice = [given[key] for key in launch_table.kernels()[name].updated]
            moved = [value for value in (*given.values(), *twice) if isinstance(value, np.ndarray)]
            self.bytes[name] += sum(value.nbytes for value in moved)
            kernel = launch_table.kernels()[name]
            if kernel.launch("float32", rows, columns).grid[0]:
                do(lambda: self.run(name, rows, columns, given))

    def run(self, name, rows, columns, given):
        with self.one:
            self.emulate(name, rows, columns, **given)

    def multiply(self, a, b, out, bias=None, add=None, **fused):
        """Compute the product of Lt.product."""
        *batch, rows, inner = a.shape
        self.count["product"] += 1
        self.products[rows, b.shape[-1], inner, a.dtype.name, prod(batch)] += 1
        do(lambda: multiply(a, b, out, (bias, add), **fused))

    def multiply_coded(self, a, b, out):
        """Compute the product of Lt.coded_product."""
        assert not a.turned and b.turned and not any(size % 16 for size in (*a.shape, *b.shape))
        self.count["coded product"] += 1
        self.products[*out.shape, a.shape[1], E4M3, 1] += 1
        do(lambda: multiply(decoded(a), decoded(b), out, ()))


def decoded(matrix):
    """Return the values of a float8 matrix."""
    codes = plain(matrix.codes).view(matrix.kind).astype(np.float32) * plain(matrix.scale)
    return codes.T if matrix.turned else codes


def multiply(a, b, out, terms, bias_grad=None, gelu_input=None, gelu_at=None):
    """Compute out = a b + terms in float32, row sums of b, and the GELU of out or its gradient."""
    factors = wide(a), wide(b)
    total = factors[0] @ factors[1]
    for term in terms:
        total = total if term is None else total + wide(term)
    if bias_grad is not None:
        plain(bias_grad)[...] = factors[1].sum(0)
    if gelu_input is not None:
        plain(gelu_input)[...] = total
        total = gelu(torch.tensor(total), approximate="tanh").numpy()
    if gelu_at is not None:
        at = torch.tensor(plain(gelu_at).astype(np.float32), requires_grad=True)
        (total,) = torch.autograd.grad(gelu(at, approximate="tanh"), at, torch.tensor(total))
        total = total.numpy()
    plain(out)[...] = total


class Flash:
    """Fused attention in NumPy, for the same arguments as cuDNN's."""

    def suits(self, dtype, width, drop):
        return drop is None and dtype.itemsize == 2

    def forward(self, qkv, sequence, form, *mask):
        q, k, v = heads_of(qkv, sequence, form)
        added, sums = self.hop(q, k, v, *mask)
        batch, heads, g, *_ = q.shape
        return added.reshape(len(qkv), -1), sums.reshape(batch, heads * g, sequence, 1)

    def backward(self, dout, qkv, out, stats, sequence, form, *mask, bias=None):
        assert out.shape == dout.shape
        q, k, v = heads_of(qkv, sequence, form)
        by_query = [queries_of(each, sequence, form) for each in (dout, out)]
        sums, dqkv = stats.reshape(q.shape[:-1]), empty(qkv.shape, qkv.dtype)
        dq, dkv = self.hop_grad(by_query[0], (q, k, v), by_query[1], sums, *mask, bias)
        parts = dq.transpose(0, 2, 3, 1, 4), *dkv
        for part, made in zip(heads_of(plain(dqkv), sequence, form), parts, strict=True):
            part[...] = plain(made)
        return dqkv

    def hop(self, q, k, v, causal, window, bias=None):
        out, sums = empty(result_shape(q), q.dtype), empty((*q.shape[:-1], 1), np.float32)
        *given, into, stats = map(by_head, (q, k, v, out.transpose(0, 2, 3, 1, 4), sums))
        fake_cudnn.forward(given, (into, stats), *scaled(q, causal, window, bias))
        return out, sums.reshape(q.shape[:-1])

    def hop_grad(self, dout, qkv, out, sums, causal, window, bias=None):
        q, k, _ = qkv
        dq, dkv = empty(result_shape(q), q.dtype), empty((2, *k.shape), k.dtype)
        given = map(by_head, (*qkv, out, dout, sums.reshape(*sums.shape, 1)))
        made = map(by_head, (dq.transpose(0, 2, 3, 1, 4), *dkv))
        fake_cudnn.backward([*given], [*made], *scaled(q, causal, window, bias))
        return dq, dkv


def by_head(view):
    """Reshape queries [B, heads, g, T, D] to [B, heads g, T, D], on the host."""
    view = plain(view)
    return view if view.ndim == 4 else view.reshape(len(view), -1, *view.shape[3:])


def scaled(q, causal, window, bias):
    """Return the scale of the scores, cuDNN's right and left bound of the band of keys, and the
    bias."""
    bias = None if bias is None else plain(bias)[:, None, None]
    return q.shape[-1] ** -0.5, (0 if causal else None, window or None), bias


def wide(array):
    return plain(array).astype(np.float32)


def register(launcher, flash=None):
    """Register the rules for CudaArray."""
    bring, coded = CudaPool().bring, launcher.multiply_coded
    add_gpu(CudaArray, Gpu(launcher, launcher.multiply, flash, empty, bring, coded))
    writeable.register(CudaArray, lambda array: True)
    for function in (to_host, on_host):
        function.register(CudaArray, copied)
    value_of.register(CudaArray, lambda array: float(copied(array)[0]))
    from_host.register(CudaArray, lambda array, values: CudaPool().refill(array, values))
    contiguous.register(CudaArray, in_one_piece)


def copied(array):
    host_waits()
    return plain(array).copy()


def in_one_piece(block):
    if block.flags.c_contiguous:
        return block
    copy = empty(block.shape, block.dtype)
    copy[...] = block
    return copy
