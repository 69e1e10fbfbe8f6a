"""GPU matrix products (GEMMs) with fused epilogues, computed by cuBLASLt.

Every call specifies its stream and workspace, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int
from typing import Any

import numpy as np

from hpc3d.cuda.cublaslt_library import (
    REFUSALS,
    SUCCESS,
    Heuristic,
    Library,
    Unsupported,
    load,
)
from hpc3d.cuda.cublaslt_plan import ProductPlan, operand_of

# Bit masks of the split-K reduction schemes that cuBLASLt may use: any scheme, or only
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE.
_ANY_REDUCTION, _COMPUTE_TYPE_REDUCTION = 7, 2


class Lt:
    """cuBLASLt handle for one stream of the current device.

    `workspace` is the (address, size in bytes) of a dedicated buffer; the address is a multiple of
    256. If `tf32` is True, float32 GEMMs round their operands to TF32 but accumulate in float32.
    """

    def __init__(
        self, stream_ptr: int, workspace: tuple[int, int], tf32: bool = False, library: Any = None
    ) -> None:
        self.stream, (self.workspace, self.bytes), self.tf32 = stream_ptr, workspace, tf32
        assert self.workspace % 256 == 0, self.workspace
        self.library = Library(library or load())
        self.handle = self.library.create("")
        self.preference = self.library.create("MatmulPreference")
        self._prefer("MAX_WORKSPACE_BYTES", self.bytes)
        self.plans = {}

    def product(
        self,
        a: Any,
        b: Any,
        out: Any,
        bias: Any = None,
        add: Any = None,
        bias_grad: Any = None,
        gelu_input: Any = None,
        gelu_at: Any = None,
        scale: float = 1.0,
    ) -> None:
        """Compute out[m, n] = scale a[m, k] b[k, n] + add[m, n] + bias[n], accumulated in float32.

        Arrays provide CuPy's `data.ptr`, `shape`, `strides` and `dtype`. a and b have the same
        type: float32, float16 or bfloat16. out has this type or float32, and all other arrays have
        the type of out. `add` and out may be the same array. a and b may be transposed views: one
        of their strides must be one element. Batches [g, m, k] share the bias.

        `bias_grad[n]` receives the sum over the rows of b. If the product is a weight gradient X'
        dY, this sum is the bias gradient. `gelu_input[m, n]` receives the result before the
        activation, and out receives the tanh-GELU of this result. With `gelu_at[m, n]`, out is the
        result multiplied by the derivative of tanh-GELU at `gelu_at`.

        The call is asynchronous. If k is 0, array operations on the current stream write to out;
        the current stream must be the stream of this object.

        Raises Unsupported, before anything is written, if no kernel supports the combination.
        """
        vector = bias if bias_grad is None else bias_grad
        matrix = gelu_input if gelu_at is None else gelu_at
        if bias_grad is not None and scale != 1:
            raise Unsupported("cuBLASLt does not document whether `scale` affects bias_grad")
        if not (a.size and b.size):
            return _without_terms(b, out, bias, add, bias_grad, matrix)
        key = tuple(map(operand_of, (a, b, out, add, bias, bias_grad, gelu_input, gelu_at)))
        self.run(self.planned(key, vector, matrix), a, b, out, add, scale)

    def coded_product(self, a: Any, b: Any, out: Any) -> None:
        """Compute out[m, n] = a[m, k] b[k, n] for float8 matrices (hpc3d.ops.float8.Coded).

        Products are accumulated in float32. a is stored as [m, k] and b as [n, k], the only layout
        that cuBLASLt accepts. m, k and n are multiples of 16. out is float32, float16 or bfloat16.

        Raises Unsupported, before anything is written, if cuBLASLt has no suitable kernel.
        """
        if not (a.size and b.size):
            return _without_terms(b, out)
        left, right = a.codes, b.codes.T
        factors = operand_of(left, a.kind), operand_of(right, b.kind)
        key = (*factors, operand_of(out), *[None] * 5)
        plan = self.planned(key)
        plan.set("A_SCALE_POINTER", b.scale.data.ptr)
        plan.set("B_SCALE_POINTER", a.scale.data.ptr)
        self.run(plan, left, right, out, None, 1.0)

    def planned(
        self, key: tuple[tuple | None, ...], vector: Any = None, matrix: Any = None
    ) -> ProductPlan:
        """Return the plan of a GEMM, with the addresses of the epilogue's vector and matrix.

        The plan is created, and its cuBLASLt algorithm selected, on first use. The algorithm
        depends on the address alignment of each array.
        """
        plan = self.plans.get(key)
        if new := plan is None:
            plan = ProductPlan(self.library, key, self.tf32)
        plan.point(vector, matrix)
        if new:
            self._select_algorithm(plan)
            self.plans[key] = plan
        return plan

    def _select_algorithm(self, plan: ProductPlan) -> None:
        for name, operand in plan.operands.items():
            self._prefer(f"MIN_ALIGNMENT_{name}_BYTES", operand.alignment)
        wide = plan.operands["D"].dtype == np.float32
        self._prefer("REDUCTION_SCHEME_MASK", _ANY_REDUCTION if wide else _COMPUTE_TYPE_REDUCTION)
        found, count = Heuristic(), c_int()
        told = self.handle, plan.operation, *plan.layouts.values(), self.preference
        answer = 1, byref(found), byref(count)
        self.library.call("cublasLtMatmulAlgoGetHeuristic", *told, *answer, refusals=REFUSALS)
        if count.value == 0 or found.state != SUCCESS:
            raise Unsupported(f"cuBLASLt has no algorithm for {plan}")
        plan.algorithm = found.algorithm

    def _prefer(self, attribute: str, value: int) -> None:
        self.library.set("MatmulPreference", self.preference, attribute, value)

    def run(self, plan: ProductPlan, a: Any, b: Any, out: Any, add: Any, scale: float) -> None:
        layouts = plan.layouts
        self.library.call(
            "cublasLtMatmul",
            self.handle,
            plan.operation,
            byref(c_float(scale)),
            b.data.ptr,
            layouts["A"],
            a.data.ptr,
            layouts["B"],
            byref(c_float(add is not None)),
            (out if add is None else add).data.ptr,
            layouts["C"],
            out.data.ptr,
            layouts["D"],
            byref(plan.algorithm),
            self.workspace,
            self.bytes,
            self.stream,
            refusals=REFUSALS,
        )


def _without_terms(
    b: Any, out: Any, bias: Any = None, add: Any = None, bias_grad: Any = None, gelu: Any = None
) -> None:
    """Write the result of a GEMM with an empty operand, without calling cuBLASLt.

    If k is 0, the product a b is zero; otherwise, out has no elements.
    """
    if bias_grad is not None and b.size:
        raise Unsupported("cuBLASLt does not support bias_grad if out has no rows")
    if gelu is not None and out.size:
        raise Unsupported("cuBLASLt does not support a GELU epilogue if k = 0")
    if bias_grad is not None:
        bias_grad.fill(0)
    if add is None:
        out.fill(0)
    elif add is not out:
        out[...] = add
    if bias is not None:
        out += bias
