"""Attention by cuDNN's fused kernels, which keep no probabilities (FlashAttention-2, Dao 2023,
arXiv:2307.08691).

The package nvidia-cudnn-frontend (module `cudnn`, 1.16 or newer) builds a graph of one operation,
which runs on pointers.  So nothing is copied: q, k and v are strided views of qkv, and their
gradients of dqkv.
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

TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16"}  # the types that it takes, as cuDNN names them
_Q, _K, _V, _OUT, _STATS, _DOUT, _DQ, _DK, _DV = range(
    1, 10
)  # the numbers of the tensors in the graphs
_LINE = 400  # characters of what cuDNN says
RUNTIMES = ("libcudart.so.12", "libcudart.so.13")  # those that the frontend looks for


class Case(NamedTuple):
    """What a graph is built for: `queries` heads of q for each of the `heads` of k and v."""

    batch: int
    heads: int
    queries: int
    sequence: int
    width: int
    dtype: str
    causal: bool

    @classmethod
    def of(cls, qkv: Any, sequence: int, form: tuple[int, int], causal: bool) -> Case:
        """Of an array [B*T, heads*(g+2)*D], whose `form` is (D, g) (hpc3d.ops.attention)."""
        (rows, columns), (width, queries) = qkv.shape, form
        heads, name = columns // ((queries + 2) * width), np.dtype(qkv.dtype).name
        return cls(rows // sequence, heads, queries, sequence, width, name, causal)

    def layout(self, tensor: int) -> tuple[list[int], list[int]]:
        """The shape [B, heads, T, D] of a tensor, and its strides in elements."""
        batch, heads, queries, sequence, width, *_ = self
        count = heads * (1 if tensor in (_K, _V, _DK, _DV) else queries)
        if tensor == _STATS:
            return [batch, count, sequence, 1], [count * sequence, sequence, 1, 1]
        row, head = heads * (queries + 2) * width, 3 * width if queries == 1 else width
        if tensor in (_OUT, _DOUT):
            row, head = count * width, width
        return [batch, count, sequence, width], [sequence * row, head, row, 1]

    def places(self, array: Any) -> list[int]:
        """Where q, k and v begin in an array like qkv: they are [q | k | v] of head after head,
        or with several queries a key all q, then all k, then all v."""
        heads, queries, width = self.heads, self.queries, self.width
        keys = (1, 2) if queries == 1 else (queries * heads, (queries + 1) * heads)
        return [array.data.ptr + head * width * array.dtype.itemsize for head in (0, *keys)]

    @property
    def operation(self) -> dict[str, float]:
        """The arguments of forward and backward: of causal attention query i sees the keys up to
        i."""
        bound = {"diagonal_band_right_bound": 0} if self.causal else {}
        return {"attn_scale": 1 / sqrt(self.width), **bound}


class AttentionGraph(NamedTuple):
    """A graph that is ready to run, and the memory that it works in."""

    graph: Any
    workspace: Any


class Flash:
    """Attention, forward and backward, on the arrays of one device.

    `empty(shape, dtype)` makes an array (with `.data.ptr`, `.shape` and `.dtype`), `scratch` one
    to work in, `stream` is the pointer of the stream on which everything runs, `capability` that
    of the device, which is the current one, as CuPy has it ("90").  Arrays are contiguous.

    The first call of a shape builds its graph, and must not be captured in a CUDA graph; a later
    one asks `empty` for what it returns, for nothing else, and never waits for the device.

    A deterministic backward pass works in memory for 2 bytes a score on Hopper, B heads T^2 of
    them; another one sums the gradient of q in an order that differs from run to run.
    """

    def __init__(
        self,
        empty: Callable[..., Any],
        stream: int,
        capability: int | str,
        deterministic: bool = False,
        scratch: Callable[..., Any] | None = None,
    ) -> None:
        self.cudnn, self.empty, self.deterministic = frontend(), empty, deterministic
        self.scratch = scratch or empty
        self.widest = _widest(int(capability))
        self.plans, self.workspace = {}, None
        with self.told("be started"):
            self.handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=self.handle, stream=stream)
        # Its bindings report every object that is left at the end of the program.
        atexit.register(self.plans.clear)

    @staticmethod
    def missing() -> str | None:
        """What is missing here, in one word, so that it cannot be loaded; None: nothing is."""
        preload()
        try:
            frontend().backend_version()
        except ImportError:
            return "nvidia-cudnn-frontend"
        except (OSError, RuntimeError):
            return "cuDNN"
        return None if sum(map(loads, RUNTIMES)) == 1 else "one-libcudart"

    def suits(self, dtype: DTypeLike, width: int, drop: object = None) -> bool:
        """Whether it takes arrays of `dtype` with heads of `width`; it drops no probabilities."""
        return takes(dtype, width, drop, self.widest)

    @staticmethod
    def replays(sequence: int) -> bool:
        """Whether a CUDA graph of calls may run later.

        Of other sequences some versions copy the lengths, from memory of the host that is gone
        by then.
        """
        return sequence % 128 == 0

    def forward(
        self, qkv: Any, sequence: int, form: tuple[int, int], causal: bool = True
    ) -> tuple[Any, Any]:
        """softmax(q k' / sqrt(D) + mask) v, and what backward needs beside it.

        qkv [B*T, heads*(g+2)*D] -> out [B*T, heads*g*D], and stats [B, heads*g, T, 1] in float32:
        the logarithm of the sum of exponentials of every row of scores.  Raises RuntimeError where
        cuDNN cannot, as with T = 1.
        """
        case = Case.of(qkv, sequence, form, causal)
        plan = self.plan(self.attention, case)
        out = self.empty((qkv.shape[0], case.heads * case.queries * case.width), qkv.dtype)
        stats = self.empty(tuple(case.layout(_STATS)[0]), np.dtype(np.float32))
        q, k, v = case.places(qkv)
        self.run(plan, {_Q: q, _K: k, _V: v, _OUT: out.data.ptr, _STATS: stats.data.ptr})
        return out, stats

    def backward(
        self,
        dout: Any,
        qkv: Any,
        out: Any,
        stats: Any,
        sequence: int,
        form: tuple[int, int],
        causal: bool = True,
    ) -> Any:
        """The gradient of qkv from that of out, and what forward returned."""
        assert dout.shape == out.shape and dout.dtype == out.dtype == qkv.dtype
        case = Case.of(qkv, sequence, form, causal)
        plan = self.plan(self.attention_grad, case)
        dqkv = self.empty(qkv.shape, qkv.dtype)
        (q, k, v), (dq, dk, dv) = case.places(qkv), case.places(dqkv)
        given = {_OUT: out.data.ptr, _STATS: stats.data.ptr, _DOUT: dout.data.ptr}
        self.run(plan, {_Q: q, _K: k, _V: v, **given, _DQ: dq, _DK: dk, _DV: dv})
        return dqkv

    def attention(self, graph: Any, case: Case) -> None:
        """Describe the forward pass: what goes in, the operation, what comes out."""
        q, k, v = (self.input(graph, case, tensor) for tensor in (_Q, _K, _V))
        made = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **case.operation)
        self.outputs(case, (_OUT, _STATS), made)

    def attention_grad(self, graph: Any, case: Case) -> None:
        """Describe the backward pass."""
        names = {"q": _Q, "k": _K, "v": _V, "o": _OUT, "dO": _DOUT, "stats": _STATS}
        given = {name: self.input(graph, case, tensor) for name, tensor in names.items()}
        how = {**case.operation, "use_deterministic_algorithm": self.deterministic}
        self.outputs(case, (_DQ, _DK, _DV), graph.sdpa_backward(**given, **how))

    def input(self, graph: Any, case: Case, tensor: int) -> Any:
        shape, strides = case.layout(tensor)
        kind = self.type_of(case, tensor)
        return graph.tensor(dim=shape, stride=strides, data_type=kind, uid=tensor)

    def outputs(self, case: Case, tensors: Sequence[int], made: Sequence[Any]) -> None:
        """Say how what an operation made shall lie; else it would stay inside of the graph."""
        for tensor, result in zip(tensors, made, strict=True):
            shape, strides = case.layout(tensor)
            result.set_output(True).set_uid(tensor).set_dim(shape).set_stride(strides)
            result.set_data_type(self.type_of(case, tensor))

    def type_of(self, case: Case, tensor: int) -> Any:
        return getattr(self.cudnn.data_type, "FLOAT" if tensor == _STATS else TYPES[case.dtype])

    def plan(self, describe: Callable[[Any, Case], None], case: Case) -> AttentionGraph:
        """The plan of a pass, built at its first call."""
        key = describe.__name__, case
        if key not in self.plans:
            with self.told(f"build {describe.__name__} of {case}"):
                graph = self.build(describe, case)
            self.plans[key] = AttentionGraph(graph, self.memory(graph.get_workspace_size()))
        return self.plans[key]

    def build(self, describe: Callable[[Any, Case], None], case: Case) -> Any:
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
        """At least `size` bytes for a plan; plans share them, as they run one after another.

        Older plans keep what they had: a CUDA graph may hold its address.
        """
        if self.workspace is None or self.workspace.shape[0] < size:
            self.workspace = self.scratch((max(size, 1),), np.dtype(np.uint8))
        return self.workspace

    def run(self, plan: AttentionGraph, tensors: Mapping[int, int]) -> None:
        with self.told("run attention"):
            plan.graph.execute(tensors, plan.workspace.data.ptr, handle=self.handle)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """What cuDNN raises in here becomes a RuntimeError of one line."""
        try:
            yield
        except (RuntimeError, ValueError, self.cudnn.cudnnGraphNotSupportedError) as error:
            version = self.cudnn.backend_version_string()
            reason = " ".join(f"{error}".split())[:_LINE]  # it may go through engine by engine
            raise RuntimeError(f"cuDNN {version} cannot {what}: {reason}") from error


def preload() -> None:
    """Load from where pip put them the libraries that would be looked for elsewhere.

    The frontend finds the CUDA runtime only by its bare name, cuDNN also in the first folder of
    packages; cuDNN finds NVRTC, and that its other half, only by their bare names.
    """
    with suppress(ImportError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("cudart", "nvrtc", "cudnn"):
            with suppress(RuntimeError):
                folder = Path(load_nvidia_dynamic_lib(name).abs_path).parent
                for half in folder.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(half))


def frontend() -> ModuleType:
    """The module `cudnn`.

    It would import torch too, where that is installed: for seconds, and with every CUDA library
    that torch finds.  It needs it only to take torch's tensors.
    """
    absent = sys.modules.setdefault("torch") is None
    try:
        import cudnn
    finally:
        if absent:
            del sys.modules["torch"]
    return cudnn


def loads(name: str) -> bool:
    """Whether the loader finds a library by its bare name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def takes(dtype: DTypeLike, width: int, drop: object, most: int) -> bool:
    """The same for a device whose widest head is `most`."""
    return drop is None and np.dtype(dtype).name in TYPES and width % 8 == 0 and width <= most


def _widest(capability: int) -> int:
    """The widest head of which cuDNN computes the gradient on a device (its support matrix)."""
    if capability < 80:
        return 0
    return 256 if capability == 90 else 128
