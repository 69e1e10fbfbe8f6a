"""Fake attention of the module cudnn (nvidia-cudnn-frontend 1.15 to 1.18).

The functions require the argument order of the real ones. A graph reads and writes host memory at
the given pointers, with the given shapes and strides, in float32. Access outside of the existing
arrays is rejected.
"""

import ctypes
from enum import Enum
from math import prod

import ml_dtypes
import numpy as np

RUBBISH = 0xA5
STEPS = [
    "validate",
    "build_operation_graph",
    "create_execution_plans",
    "check_support",
    "build_plans",
]
BITS = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32}


class NotSupportedError(Exception):
    """Not a RuntimeError, as in the real module."""


class FakeCudnn:
    """Fake module with its graphs; `holds(pointer, size)` tells if an array has this memory."""

    cudnnGraphNotSupportedError = NotSupportedError
    data_type = Enum("data_type", ["NOT_SET", *BITS])
    heur_mode = Enum("heur_mode", ["A", "B", "FALLBACK"])

    def __init__(self, holds):
        self.holds, self.graphs, self.streams, self.failure = holds, [], {}, None
        self.workspace = 3  # bytes for every element of q and every result but one

    def backend_version(self):
        return 91900

    def backend_version_string(self):
        return "9.19.0"

    def create_handle(self):
        self.streams[0x100] = None
        return 0x100

    def set_stream(self, handle, stream):
        assert type(stream) is int
        self.streams[handle] = stream

    def pygraph(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert io_data_type.name in ("HALF", "BFLOAT16")
        assert intermediate_data_type is compute_data_type is self.data_type.FLOAT
        self.graphs.append(Graph(self, handle))
        return self.graphs[-1]


class Tensor:
    """Tensor of a graph."""

    def __init__(self, dim=None, stride=None, data_type=None, uid=-1, made=False):
        self.dim, self.stride, self.data_type, self.uid = dim, stride, data_type, uid
        self.made, self.output = made, False

    def setter(name):
        def set_it(self, value):
            setattr(self, name, value)
            return self

        return set_it

    set_output, set_uid = setter("output"), setter("uid")
    set_dim, set_stride, set_data_type = setter("dim"), setter("stride"), setter("data_type")

    def check(self):
        assert self.output == self.made, "a result that does not come out, or an input that does"
        assert type(self.dim) is type(self.stride) is list
        assert len(self.dim) == len(self.stride) == 4
        assert self.stride[3] == 1 and self.data_type.name in BITS

    def at(self, pointer, holds):
        """Return the array at `pointer`."""
        assert type(pointer) is int and pointer % 16 == 0
        dtype = np.dtype(BITS[self.data_type.name])
        strides = [step * dtype.itemsize for step in self.stride]
        last = sum((n - 1) * step for n, step in zip(self.dim, strides, strict=True))
        assert holds(pointer, last + dtype.itemsize)
        memory = (ctypes.c_byte * (last + dtype.itemsize)).from_address(pointer)
        flat = np.frombuffer(memory, np.uint8)[: dtype.itemsize].view(dtype)
        return np.lib.stride_tricks.as_strided(flat, self.dim, strides)


class Graph:
    """Graph of one operation and its tensors."""

    def __init__(self, cudnn, handle):
        assert handle in cudnn.streams
        self.cudnn, self.handle, self.steps, self.workspaces = cudnn, handle, [], []
        self.tensors, self.compute, self.bias = [], None, None

    def tensor(self, dim, stride, data_type, uid):
        self.tensors.append(Tensor(dim, stride, data_type, uid))
        return self.tensors[-1]

    def sdpa(
        self,
        q,
        k,
        v,
        attn_scale,
        generate_stats,
        bias=None,
        diagonal_band_right_bound=None,
        diagonal_band_left_bound=None,
    ):
        assert generate_stats is True
        self.bias, bounds = bias, (diagonal_band_right_bound, diagonal_band_left_bound)
        self.describe((q, k, v), forward, 2, attn_scale, bounds)
        return self.tensors[-2:]

    def sdpa_backward(
        self,
        q,
        k,
        v,
        o,
        dO,
        stats,
        attn_scale,
        use_deterministic_algorithm,
        bias=None,
        diagonal_band_right_bound=None,
        diagonal_band_left_bound=None,
    ):
        assert use_deterministic_algorithm is False
        self.bias, bounds = bias, (diagonal_band_right_bound, diagonal_band_left_bound)
        self.describe((q, k, v, o, dO, stats), backward, 3, attn_scale, bounds)
        return self.tensors[-3:]

    def describe(self, inputs, compute, results, scale, bounds):
        """Store the operation with its inputs; return its output tensors."""
        assert not self.compute and list(inputs) and type(scale) is float
        right, left = bounds
        assert right is None or type(right) is int
        assert left is None or (type(left) is int and left > 0 and right == 0)
        outputs = [Tensor(made=True) for _ in range(results)]
        self.tensors += outputs
        self.compute = lambda at: compute(
            [at[t] for t in inputs], [at[t] for t in outputs], scale, bounds, at.get(self.bias)
        )

    def step(self, name):
        self.steps.append(name)
        assert self.steps == STEPS[: len(self.steps)], "out of order"

    def validate(self):
        self.step("validate")
        for tensor in self.tensors:
            tensor.check()
        self.check_shapes()
        numbers = [tensor.uid for tensor in self.tensors]
        assert all(type(uid) is int and uid > 0 for uid in numbers)
        assert len(set(numbers)) == len(numbers)
        if self.cudnn.failure:
            raise self.cudnn.failure
        if len(self.operands()) == 9 and self.tensors[0].dim[2] == self.tensors[1].dim[2] == 1:
            raise NotSupportedError("s_q = s_kv = 1\n is not supported.")

    def operands(self):
        """Return all tensors except the bias."""
        return [tensor for tensor in self.tensors if tensor is not self.bias]

    def check_shapes(self):
        """Tensors of queries have the shape [B, heads, T, D]. The number of heads of k and v
        divides that of q, and their length may differ. The bias of the scores has the type of q.
        """
        tensors = self.operands()
        (batch, heads, tokens, width), results = tensors[0].dim, tensors[-3:]
        keys, length = tensors[1].dim[1:3]
        assert heads % keys == 0
        like_k = [*tensors[1:3], *(results[1:] if len(tensors) == 9 else [])]
        assert all(tensor.dim == [batch, keys, length, width] for tensor in like_k)
        like_q = [tensor for tensor in tensors if tensor not in like_k]
        assert all(tensor.dim[:3] == [batch, heads, tokens] for tensor in like_q)
        if self.bias:
            assert self.bias.data_type is tensors[0].data_type
            pairs = zip(self.bias.dim, (batch, heads, tokens, length), strict=True)
            assert all(size in (1, most) for size, most in pairs)

    def build_operation_graph(self):
        self.step("build_operation_graph")

    def create_execution_plans(self, modes):
        assert set(modes) <= set(self.cudnn.heur_mode)
        self.step("create_execution_plans")

    def check_support(self):
        self.step("check_support")

    def build_plans(self):
        self.step("build_plans")

    def get_workspace_size(self):
        assert self.steps == STEPS
        results = sum(tensor.made for tensor in self.tensors)
        return self.cudnn.workspace * prod(self.tensors[0].dim) * (results - 1)

    def execute(self, tensor_to_device_buffer, workspace, handle=None):
        assert self.steps == STEPS and handle == self.handle and self.cudnn.streams[handle]
        if self.cudnn.failure:
            raise self.cudnn.failure
        assert type(workspace) is int and self.cudnn.holds(workspace, self.get_workspace_size())
        ctypes.memset(workspace, RUBBISH, self.get_workspace_size())
        self.workspaces.append(workspace)
        pointers, holds = tensor_to_device_buffer, self.cudnn.holds
        assert set(pointers) == {tensor.uid for tensor in self.tensors}
        self.compute({tensor: tensor.at(pointers[tensor.uid], holds) for tensor in self.tensors})


def of_every_query(x, heads):
    """Repeat k or v, [B, key heads, T, D], for the adjacent queries that share each head."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def summed(dx, heads):
    """Return the gradient of `of_every_query`."""
    batch, _, *rest = dx.shape
    return dx.reshape(batch, heads, -1, *rest).sum(2)


def scores(q, k, scale, bounds, bias=None):
    """Return the scores of queries and the keys in a band along the diagonal.

    The bias is added to the scores. The band ends `right` keys after the diagonal (None: with the
    last key), and begins left - 1 keys before it (None: with the first key)."""
    s, (right, left) = np.einsum("bhid,bhjd->bhij", q, k) * np.float32(scale), bounds
    s = s if bias is None else s + bias.astype(np.float32)
    back = np.subtract.outer(np.arange(s.shape[-2]), np.arange(s.shape[-1]))
    if right is not None:
        s = np.where(back >= -right, s, -np.inf)
    return s if left is None else np.where(back < left, s, -np.inf)


def forward(inputs, outputs, *form):
    """Compute attention; `form` is the scale, the bounds and the bias of the scores."""
    q, *others = (array.astype(np.float32) for array in inputs)
    k, v = (of_every_query(each, q.shape[1]) for each in others)
    out, stats = outputs
    s = scores(q, k, *form)
    stats[...] = np.logaddexp.reduce(s, -1, keepdims=True)
    out[...] = np.einsum("bhij,bhjd->bhid", np.exp(s - stats), v)


def backward(inputs, outputs, scale, *form):
    q, *others, out, dout, stats = (array.astype(np.float32) for array in inputs)
    k, v = (of_every_query(each, q.shape[1]) for each in others)
    dq, dk, dv = outputs
    p = np.exp(scores(q, k, scale, *form) - stats)
    dp = np.einsum("bhid,bhjd->bhij", dout, v)
    ds = p * (dp - np.sum(dout * out, -1, keepdims=True)) * np.float32(scale)
    dq[...] = np.einsum("bhij,bhjd->bhid", ds, k)
    dk[...] = summed(np.einsum("bhij,bhid->bhjd", ds, q), dk.shape[1])
    dv[...] = summed(np.einsum("bhij,bhid->bhjd", p, dout), dv.shape[1])
