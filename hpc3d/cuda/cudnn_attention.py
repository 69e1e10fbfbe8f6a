"""Attention by cuDNN's fused kernels, which do not store the softmax probabilities.

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691). The package nvidia-cudnn-frontend
(module `cudnn`, 1.16 or newer) builds a graph with a single operation, which is executed on device
pointers. Nothing is copied: q, k and v are strided views of qkv, and their gradients are strided
views of dqkv. Padding is masked by a bias on the scores.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16"}  # dict from supported dtypes to cuDNN's names
# Tensor identifiers in the graphs.
_Q, _K, _V, _OUT, _STATS, _DOUT, _DQ, _DK, _DV, _BIAS = range(1, 11)
_LINE = 400  # maximum length of a cuDNN error message, in characters
RUNTIMES = ("libcudart.so.12", "libcudart.so.13")  # file names of CUDA runtimes
_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor


class Case(NamedTuple):
    """Cache key of an attention graph: shapes, dtype and mask.

    `heads` is the number of KV heads, and `queries` the number of query heads per KV head. With
    `window`, a query attends only to the last `window` keys up to its own position. If `biased` is
    True, a bias of each key is added to its scores.
    """

    batch: int
    heads: int
    queries: int
    sequence: int
    width: int
    dtype: str
    causal: bool
    window: int = 0
    biased: bool = False

    @classmethod
    def of(
        cls,
        qkv: Any,
        sequence: int,
        form: Sequence[int],
        causal: bool = True,
        window: int = 0,
        bias: Any = None,
    ) -> Case:
        """Create a cache key for an array qkv of shape [B*T, heads*(g+2)*D].

        `sequence` is the sequence length T. The first items of `form` are D, the head dimension,
        and g, the number of query heads per KV head.
        """
        (rows, columns), (width, queries) = qkv.shape, form[:2]
        heads, name = columns // ((queries + 2) * width), np.dtype(qkv.dtype).name
        batch, biased = rows // sequence, bias is not None
        return cls(batch, heads, queries, sequence, width, name, causal, window, biased)

    def layout(self, tensor: int) -> tuple[list[int], list[int]]:
        """Return the shape [B, heads, T, D] of a tensor, and its strides in elements."""
        batch, heads, queries, sequence, width, *_ = self
        count = heads * (1 if tensor in (_K, _V, _DK, _DV) else queries)
        if tensor == _STATS:
            return [batch, count, sequence, 1], [count * sequence, sequence, 1, 1]
        if tensor == _BIAS:
            return [batch, 1, 1, sequence], [sequence, sequence, sequence, 1]
        row, head = heads * (queries + 2) * width, 3 * width if queries == 1 else width
        if tensor in (_OUT, _DOUT):
            row, head = count * width, width
        return [batch, count, sequence, width], [sequence * row, head, row, 1]

    def addresses(self, array: Any) -> list[int]:
        """Return the addresses of q, k and v in an array with the layout of qkv.

        With one query head per KV head, the columns are [q | k | v] for each head. Otherwise, the
        columns are all of q, then all of k, then all of v.
        """
        heads, queries, width = self.heads, self.queries, self.width
        keys = (1, 2) if queries == 1 else (queries * heads, (queries + 1) * heads)
        return [array.data.ptr + head * width * array.dtype.itemsize for head in (0, *keys)]


class _HopCase(NamedTuple):
    """Cache key of the attention graph of a ring hop: layouts of its tensors, dtype and mask.

    `layouts` contains, for each tensor identifier, the shape [B, heads, T, D] and the strides in
    elements. The number of keys may differ from the number of queries.
    """

    layouts: tuple[tuple[int, _Layout], ...]
    width: int
    dtype: str
    causal: bool
    window: int

    @classmethod
    def of(cls, tensors: Mapping[int, Any], causal: bool, window: int) -> _HopCase:
        """Create a cache key for views of arrays on the device, by tensor identifier."""
        layouts = tuple((tensor, _layout(view)) for tensor, view in tensors.items())
        q = tensors[_Q]
        return cls(layouts, q.shape[-1], np.dtype(q.dtype).name, causal, window)

    def __str__(self) -> str:
        layouts, mask = dict(self.layouts), "a causal mask" if self.causal else "no mask"
        if self.window:
            mask = f"a window of {self.window} keys"
        if self.biased:
            mask += " and padding"
        return f"{self.dtype} q {layouts[_Q][0]} and k {layouts[_K][0]} with {mask}"

    @property
    def biased(self) -> bool:
        """True if a bias of each key is added to its scores."""
        return _BIAS in dict(self.layouts)

    def layout(self, tensor: int) -> tuple[list[int], list[int]]:
        """Return the shape [B, heads, T, D] of a tensor, and its strides in elements."""
        shape, strides = dict(self.layouts)[tensor]
        return [*shape], [*strides]


class AttentionGraph(NamedTuple):
    """Executable cuDNN graph and its workspace."""

    graph: Any
    workspace: Any


class Flash:
    """Fused attention, forward and backward, for arrays on one device.

    `empty(shape, dtype)` allocates an array (with `.data.ptr`, `.shape` and `.dtype`); `scratch`
    has the same signature and allocates workspaces. `stream` is the pointer of the stream used for
    all work. `capability` is the compute capability of the current device, as CuPy reports it
    ("90"). All arrays must be contiguous.

    The first call with a given shape builds a cuDNN graph and must not be captured in a CUDA
    graph. Later calls allocate only the arrays that they return, and never wait for the device.

    The backward pass sums the gradient of q in an order that differs between runs. On Hopper, a
    deterministic pass would need a workspace of 2 bytes per element of the score matrices, [B,
    heads, T, T].
    """

    def __init__(
        self,
        empty: Callable[..., Any],
        stream: int,
        capability: int | str,
        scratch: Callable[..., Any] | None = None,
    ) -> None:
        self.cudnn, self.empty, self.scratch = frontend(), empty, scratch or empty
        self.widest = _widest(int(capability))
        self.plans, self.workspace = {}, None
        with self.told("be started"):
            self.handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=self.handle, stream=stream)
        # Destroy the graphs at exit; otherwise, cuDNN's bindings report them as leaked objects.
        atexit.register(self.plans.clear)

    @staticmethod
    def missing() -> str | None:
        """Return the name of the missing package or library, or `None` if cuDNN can be loaded."""
        preload()
        try:
            frontend().backend_version()
        except ImportError:
            return "nvidia-cudnn-frontend"
        except (OSError, RuntimeError):
            return "cuDNN"
        return None if sum(map(loads, RUNTIMES)) == 1 else "one-libcudart"

    def suits(self, dtype: DTypeLike, width: int, drop: object = None) -> bool:
        """Return True if `Flash` supports this dtype and head dimension on this device.

        Dropout is not supported: `drop` must be `None`.
        """
        return takes(dtype, width, drop, self.widest)

    @staticmethod
    def replays(sequence: int) -> bool:
        """Return True if calls with this sequence length can be replayed from a CUDA graph.

        For other lengths, some versions of cuDNN copy the sequence lengths from host memory, which
        is freed before the graph is replayed.
        """
        return sequence % 128 == 0

    def forward(
        self,
        qkv: Any,
        sequence: int,
        form: tuple[int, int],
        causal: bool = True,
        window: int = 0,
        bias: Any = None,
    ) -> tuple[Any, Any]:
        """Compute softmax(q k^T / sqrt(D) + mask) v, and the statistics for the backward pass.

        `heads` is the number of KV heads, g the number of query heads per KV head, and `form` is
        (D, g). `bias` [B, T] is added to the scores of each key. For qkv [B*T, heads*(g+2)*D],
        returns out [B*T, heads*g*D] and the float32 array stats [B, heads*g, T, 1], the
        log-sum-exp of every row of scores. Raises RuntimeError if cuDNN does not support these
        sizes, for example T = 1.
        """
        case = Case.of(qkv, sequence, form, causal, window, bias)
        plan = self.plan(self.attention, case)
        out = self.empty((qkv.shape[0], case.heads * case.queries * case.width), qkv.dtype)
        stats = self.empty(tuple(case.layout(_STATS)[0]), np.dtype(np.float32))
        q, k, v = case.addresses(qkv)
        given = {_OUT: out.data.ptr, _STATS: stats.data.ptr, **_pointer(bias)}
        self.run(plan, {_Q: q, _K: k, _V: v, **given})
        return out, stats

    def backward(
        self,
        dout: Any,
        qkv: Any,
        out: Any,
        stats: Any,
        sequence: int,
        form: tuple[int, int],
        *mask: Any,
        bias: Any = None,
    ) -> Any:
        """Compute the gradient of qkv from the gradient of out and the results of `forward`.

        `mask` is (causal, window), as in `forward`; by default, the mask is causal.
        """
        assert dout.shape == out.shape and dout.dtype == out.dtype == qkv.dtype
        case = Case.of(qkv, sequence, form, *mask, bias=bias)
        plan = self.plan(self.attention_grad, case)
        dqkv = self.empty(qkv.shape, qkv.dtype)
        (q, k, v), (dq, dk, dv) = case.addresses(qkv), case.addresses(dqkv)
        given = {_OUT: out.data.ptr, _STATS: stats.data.ptr, _DOUT: dout.data.ptr}
        given |= _pointer(bias)
        self.run(plan, {_Q: q, _K: k, _V: v, **given, _DQ: dq, _DK: dk, _DV: dv})
        return dqkv

    def hop(
        self, q: Any, k: Any, v: Any, causal: bool, window: int = 0, bias: Any = None
    ) -> tuple[Any, Any]:
        """Compute attention for one block of keys, and the log-sum-exps to merge blocks.

        For views q [B, heads, g, t, D] and k, v [B, heads, s, D], returns workspaces: the output
        [B, t, heads, g, D] and the log-sum-exps [B, heads, g, t] in float32. Under the causal
        mask, query i attends to keys 0 to i, or only to the last `window` of them (0: to all).
        `bias` [B, s] is added to the scores of each key.
        """
        out = self.scratch(result_shape(q), q.dtype)
        sums = self.scratch(q.shape[:-1], np.dtype(np.float32))
        tensors = {_Q: q, _K: k, _V: v, _OUT: _by_head(out), _STATS: _column(sums)}
        tensors |= _broadcast(bias)
        self.run_hop(self.attention, tensors, causal, window)
        return out, sums

    def hop_grad(
        self,
        dout: Any,
        qkv: tuple[Any, Any, Any],
        out: Any,
        sums: Any,
        causal: bool,
        window: int = 0,
        bias: Any = None,
    ) -> tuple[Any, Any]:
        """Compute the contributions of one block of keys to the gradients of q, k and v.

        `out` is the output for the keys of all blocks, and `dout` its gradient, both views [B,
        heads, g, t, D]; `sums` are the log-sum-exps [B, heads, g, t] for the keys of all blocks.
        Returns workspaces: dq [B, t, heads, g, D], and dk and dv in one array [2, B, heads, s, D].
        """
        q, k, v = qkv
        assert dout.dtype == out.dtype == q.dtype
        dq = self.scratch(result_shape(q), q.dtype)
        dkv = self.scratch((2, *k.shape), k.dtype)
        tensors = {_Q: q, _K: k, _V: v, _OUT: out, _STATS: _column(sums), _DOUT: dout}
        tensors |= {_DQ: _by_head(dq), _DK: dkv[0], _DV: dkv[1], **_broadcast(bias)}
        self.run_hop(self.attention_grad, tensors, causal, window)
        return dq, dkv

    def run_hop(
        self, describe: Callable[[Any, Any], None], tensors: Mapping[int, Any], *mask: Any
    ) -> None:
        plan = self.plan(describe, _HopCase.of(tensors, *mask))
        self.run(plan, {tensor: view.data.ptr for tensor, view in tensors.items()})

    def attention(self, graph: Any, case: Case | _HopCase) -> None:
        """Add the inputs, the operation and the outputs of the forward pass to a graph."""
        q, k, v = (self.input(graph, case, tensor) for tensor in (_Q, _K, _V))
        how = {"generate_stats": True, **_operation(case), **self.bias(graph, case)}
        made = graph.sdpa(q=q, k=k, v=v, **how)
        self.outputs(case, (_OUT, _STATS), made)

    def attention_grad(self, graph: Any, case: Case | _HopCase) -> None:
        """Add the inputs, the operation and the outputs of the backward pass to a graph."""
        names = {"q": _Q, "k": _K, "v": _V, "o": _OUT, "dO": _DOUT, "stats": _STATS}
        given = {name: self.input(graph, case, tensor) for name, tensor in names.items()}
        how = {**_operation(case), "use_deterministic_algorithm": False}
        how |= self.bias(graph, case)
        self.outputs(case, (_DQ, _DK, _DV), graph.sdpa_backward(**given, **how))

    def bias(self, graph: Any, case: Case | _HopCase) -> dict[str, Any]:
        """Add the bias to a graph, if there is one; return it as a keyword argument."""
        return {"bias": self.input(graph, case, _BIAS)} if case.biased else {}

    def input(self, graph: Any, case: Case | _HopCase, tensor: int) -> Any:
        shape, strides = case.layout(tensor)
        kind = self.type_of(case, tensor)
        return graph.tensor(dim=shape, stride=strides, data_type=kind, uid=tensor)

    def outputs(self, case: Case | _HopCase, tensors: Sequence[int], made: Sequence[Any]) -> None:
        """Mark the results of an operation as graph outputs and set their layouts.

        By default, cuDNN treats results as internal to the graph.
        """
        for tensor, result in zip(tensors, made, strict=True):
            shape, strides = case.layout(tensor)
            result.set_output(True).set_uid(tensor).set_dim(shape).set_stride(strides)
            result.set_data_type(self.type_of(case, tensor))

    def type_of(self, case: Case | _HopCase, tensor: int) -> Any:
        return getattr(self.cudnn.data_type, "FLOAT" if tensor == _STATS else TYPES[case.dtype])

    def plan(self, describe: Callable[[Any, Any], None], case: Case | _HopCase) -> AttentionGraph:
        """Return the graph of the forward or backward pass, building it on first use."""
        key = describe.__name__, case
        if key not in self.plans:
            with self.told(f"build {describe.__name__} of {case}"):
                graph = self.build(describe, case)
            self.plans[key] = AttentionGraph(graph, self.memory(graph.get_workspace_size()))
        return self.plans[key]

    def build(self, describe: Callable[[Any, Any], None], case: Case | _HopCase) -> Any:
        wide = self.cudnn.data_type.FLOAT
        graph = self.cudnn.pygraph(
            io_data_type=getattr(self.cudnn.data_type, TYPES[case.dtype]),
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=self.handle,
        )
        describe(graph, case)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph

    def memory(self, size: int) -> Any:
        """Return a workspace of at least `size` bytes.

        Plans run one after another and therefore share a workspace. When a larger workspace is
        allocated, existing plans keep the old one, because a CUDA graph may hold its address.
        """
        if self.workspace is None or self.workspace.shape[0] < size:
            self.workspace = self.scratch((max(size, 1),), np.dtype(np.uint8))
        return self.workspace

    def run(self, plan: AttentionGraph, tensors: Mapping[int, int]) -> None:
        with self.told("run attention"):
            plan.graph.execute(tensors, plan.workspace.data.ptr, handle=self.handle)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Convert exceptions raised by cuDNN to a RuntimeError with a one-line message."""
        try:
            yield
        except (RuntimeError, ValueError, self.cudnn.cudnnGraphNotSupportedError) as error:
            version = self.cudnn.backend_version_string()
            reason = " ".join(f"{error}".split())[:_LINE]  # cuDNN's message may list every engine
            raise RuntimeError(f"cuDNN {version} cannot {what}: {reason}") from error


def preload() -> None:
    """Load the CUDA libraries installed by pip, so that later loads do not find other copies.

    The frontend searches for the CUDA runtime only by file name, and for cuDNN by file name or in
    the first site-packages folder. cuDNN searches for NVRTC, and NVRTC for its builtins library,
    only by file name.
    """
    with suppress(ImportError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("cudart", "nvrtc", "cudnn"):
            with suppress(RuntimeError):
                folder = Path(load_nvidia_dynamic_lib(name).abs_path).parent
                for half in folder.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(half))


def frontend() -> ModuleType:
    """Import the module `cudnn` without importing torch.

    By default, the frontend imports torch if it is installed, which takes seconds and loads all
    CUDA libraries used by torch. The frontend needs torch only to accept torch tensors.
    """
    absent = sys.modules.setdefault("torch") is None
    try:
        import cudnn
    finally:
        if absent:
            del sys.modules["torch"]
    return cudnn


def loads(name: str) -> bool:
    """Return True if the dynamic loader finds a library by its file name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def takes(dtype: DTypeLike, width: int, drop: object, most: int) -> bool:
    """Return True if `Flash` supports this dtype and head dimension (`width`).

    `most` is the maximum head dimension supported by the device. Dropout is not supported: `drop`
    must be `None`.
    """
    return drop is None and np.dtype(dtype).name in TYPES and width % 8 == 0 and width <= most


def _widest(capability: int) -> int:
    """Return the maximum head dimension of the backward pass, from cuDNN's support matrix."""
    if capability < 80:
        return 0
    return 256 if capability == 90 else 128


def _operation(case: Case | _HopCase) -> dict[str, float]:
    """Return the keyword arguments common to the forward and backward operations.

    Under the causal mask, query i attends to keys 0 to i. cuDNN's left bound is the number of
    keys to which a query attends, including the key at its own position.
    """
    bound = {"diagonal_band_right_bound": 0} if case.causal else {}
    left = {"diagonal_band_left_bound": case.window} if case.window else {}
    return {"attn_scale": 1 / sqrt(case.width), **bound, **left}


def _pointer(bias: Any) -> dict[int, int]:
    return {} if bias is None else {_BIAS: bias.data.ptr}


def _broadcast(bias: Any) -> dict[int, Any]:
    """Return a bias [B, keys] as a view [B, 1, 1, keys], by tensor identifier."""
    return {} if bias is None else {_BIAS: bias.reshape(len(bias), 1, 1, bias.shape[1])}


def _layout(view: Any) -> _Layout:
    """Return the shape [B, heads, T, D] and the strides, in elements, of a view.

    A view of queries has the shape [B, heads, g, T, D], and its query heads are equally spaced.
    """
    steps = tuple(step // view.dtype.itemsize for step in view.strides)
    if len(view.shape) == 4:
        return tuple(view.shape), steps
    batch, heads, queries, *rest = view.shape
    assert 1 in (heads, queries) or steps[1] == queries * steps[2]
    head = steps[1] if queries == 1 else steps[2]
    return (batch, heads * queries, *rest), (steps[0], head, *steps[3:])


def result_shape(q: Any) -> tuple[int, ...]:
    """Return the shape [B, t, heads, g, D] of a result with the sizes of q [B, heads, g, t, D]."""
    batch, heads, queries, tokens, width = q.shape
    return batch, tokens, heads, queries, width


def _by_head(result: Any) -> Any:
    """Return a result [B, t, heads, g, D] as a view [B, heads, g, t, D]."""
    return result.transpose(0, 2, 3, 1, 4)


def _column(sums: Any) -> Any:
    """Return log-sum-exps [B, heads, g, t] as a view [B, heads, g, t, 1]."""
    return sums.reshape(*sums.shape, 1)
