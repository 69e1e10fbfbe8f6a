"""A Transformer block: x + proj(attention(qkv(norm(x)))), then x + mlp(norm(x)), of one MLP or of
a mixture of experts; or with the norms last, norm(x + proj(attention(qkv(x)))), then
norm(x + mlp(x)).  What differs from family to family is data of `Family`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.model.context_attention import attention_of
from hpc3d.model.experts import ExpertMixture
from hpc3d.model.grouped_qkv import GroupedQkv, GroupedSaved
from hpc3d.model.layers import Dropout, LayerNorm, Linear, NormSaved
from hpc3d.model.mlp import Mlp
from hpc3d.model.spec import recompute_of
from hpc3d.ops.rows import add_bias
from hpc3d.tensor.matmul import Saved, sharded_matmul

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSpec


class BlockSaved(NamedTuple):
    """What the backward pass of a block works with: the inputs of its products and norms, and what
    attention and MLP saved."""

    norm1: NormSaved
    qkv_linear: Saved | GroupedSaved
    attention: Any
    proj_linear: Saved
    norm2: NormSaved
    mlp: Any


class BlockInput(NamedTuple):
    """What is kept instead where backward runs the whole block again: X, and the weights."""

    x: SavedActivation
    weights: Array


class Block:
    """Layer number `number` of the model; X and Y lie alike, in the layout of the split's X.

    `recompute` says what backward runs again instead of keeping it (arXiv:2205.05198, section 5):
    "selective" the probabilities of attention, from q and k; "full" the whole block, with its
    messages, from X.  One rank with n elements of X, T tokens of h features a sequence and a heads
    keeps n (16 + a T / h) elements with "none", 16 n with "selective" and n with "full".
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, number: int) -> None:
        model, split, family = spec.sizes, spec.splits["dense"], spec.family
        hidden, std = model.hidden, model.std
        product = partial(sharded_matmul, mesh, keep=spec.keep, scales=spec.scales)
        self.mesh, self.model, self.number = mesh, model, number
        self.parameters, self.recompute = parameters, recompute_of(spec.recompute, number)
        self.name = name = f"layers.{number}"
        self.first_norm = family.first_norm
        # With pre-norm the sum of all residual branches is not normalized (Radford et al. 2019).
        last = std / sqrt(2 * model.layers) if self.first_norm else std

        def linear(part, shape, split, std, interleaved=(1, 1)):
            biased = part in family.biased
            return Linear(
                parameters, f"{name}.{part}", shape, product(split), std, biased, interleaved
            )

        def qkv():
            if model.form.queries == 1:
                return linear("qkv", (hidden, model.qkv), split, std, (3, model.form.width))
            return GroupedQkv(parameters, name, model, product(split), std, "qkv" in family.biased)

        def norm(part):
            return family.norm(mesh, parameters, f"{name}.{part}", hidden, split.x, model.epsilon)

        def dropout(part, layout):
            return Dropout(mesh, f"{name}.{part}", layout, spec)

        self.norm1 = norm("norm1")
        self.qkv = qkv()
        self.attention = attention_of(mesh, f"{name}.drop_p", spec)
        self.proj = linear("proj", (hidden, hidden), split.next(), last)
        self.drop1 = dropout("drop1", split.x)
        self.norm2 = norm("norm2")
        self.mixes = model.mixes(number)
        self.mlp: Mlp | ExpertMixture = (
            ExpertMixture(mesh, parameters, spec, name, last)
            if self.mixes
            else Mlp(mesh, parameters, spec, name, model.ffn, last)
        )
        self.drop2 = dropout("drop2", split.x)

    def forward(self, x: Array, micro: Microbatch) -> tuple[Array, BlockSaved | BlockInput]:
        """The block of Y and what `backward` needs: with "full", what `_recomputed` needs."""
        y, saved = self.forward_saving(x, micro)
        return y, BlockInput(x, self.parameters.value) if self.recompute == "full" else saved

    def _recomputed(self, kept: BlockInput, micro: Microbatch) -> BlockSaved:
        """What the forward pass did not keep: it runs once more, with the weights it had."""
        newest = self.parameters.value
        self.parameters.use(kept.weights)
        with self.mesh.trace.scope(phase="recompute"):
            _, saved = self.forward_saving(kept.x, micro)
        self.parameters.use(newest)
        return saved

    def forward_saving(self, x: Array, micro: Microbatch) -> tuple[Array, BlockSaved]:
        """The block of Y and what the backward pass works with."""
        n1, before1 = self._norm(self.norm1, x, first=True)
        qkv, saved_qkv = self.qkv.forward(n1)
        a, saved_attention = self.attention.forward(qkv, micro)
        proj, mlp = self.proj, self.mlp
        x, saved_proj = self._add_residual(
            x, partial(proj.forward, a), proj.adds_residual, self.drop1, micro
        )
        x, after1 = self._norm(self.norm1, x, first=False)
        n2, before2 = self._norm(self.norm2, x, first=True)
        y, saved_mlp = self._add_residual(
            x, partial(mlp.forward, n2, micro), mlp.adds_residual, self.drop2, micro
        )
        y, after2 = self._norm(self.norm2, y, first=False)
        return y, BlockSaved(
            norm1=before1 or after1,  # type: ignore[arg-type]  # one of them is there
            qkv_linear=saved_qkv,
            attention=saved_attention,
            proj_linear=saved_proj,
            norm2=before2 or after2,  # type: ignore[arg-type]
            mlp=saved_mlp,
        )

    def backward(
        self,
        dy: Array,
        saved: BlockSaved | BlockInput,
        micro: Microbatch,
        defer: Callable[..., None],
    ) -> Array:
        if isinstance(saved, BlockInput):
            saved = self._recomputed(saved, micro)
        dy = self._last_norm_grad(self.norm2, dy, saved.norm2)
        dx = self._apply_dropout(self.drop2, dy, micro)
        dx = self.mlp.backward(dx, saved.mlp, micro, defer)
        dy = self._first_norm_grad(self.norm2, dx, saved.norm2, dy)
        dy = self._last_norm_grad(self.norm1, dy, saved.norm1)
        da = self.proj.backward(
            self._apply_dropout(self.drop1, dy, micro), saved.proj_linear, defer
        )
        dqkv = self.attention.backward(da, saved.attention, micro)
        dx = self.qkv.backward(dqkv, saved.qkv_linear, defer)
        return self._first_norm_grad(self.norm1, dx, saved.norm1, dy)

    def _norm(self, norm: LayerNorm, x: Array, first: bool) -> tuple[Array, NormSaved | None]:
        """norm(x) and what backward needs of it, at the one of the two places where it is; x at
        the other."""
        return norm.forward(x) if first == self.first_norm else (x, None)

    def _last_norm_grad(self, norm: LayerNorm, dy: Array, saved: NormSaved) -> Array:
        """The gradient of what a half of a block ends with, before its norm if that is last."""
        return dy if self.first_norm else norm.backward(dy, saved, residual=None)

    def _first_norm_grad(
        self, norm: LayerNorm, dx: Array, saved: NormSaved, residual: Array
    ) -> Array:
        """The gradient of what a half of a block begins with: that of the branch, before its norm
        if that is first, plus that of the residual."""
        if self.first_norm:
            return norm.backward(dx, saved, residual)
        with self.mesh.trace.span("residual"):
            return add_bias(residual, dx, self.mesh.empty(dx.shape, dx.dtype))

    def _add_residual(
        self,
        x: Array,
        forward: Callable[..., Any],
        adds_residual: bool,
        dropout: Dropout,
        micro: Microbatch,
    ) -> tuple[Array, Any]:
        """x + dropout(y) of what `forward` gives, y and what backward needs of it."""
        if adds_residual and not dropout.rate:
            return forward(residual=x)
        y, saved = forward()
        y = self._apply_dropout(dropout, y, micro)
        with self.mesh.trace.span("residual"):
            return add_bias(x, y, self.mesh.empty(x.shape, x.dtype)), saved

    def _apply_dropout(self, dropout: Dropout, x: Array, micro: Microbatch) -> Array:
        return dropout.apply(x, micro, self.model.hidden)
