"""A Transformer block: x + proj(attention(qkv(norm(x)))), then x + down(gelu(up(norm(x))))."""

from math import sqrt
from typing import NamedTuple

import numpy as np

from hpc3d.model.layers import Dropout, LayerNorm, Linear, NormSaved
from hpc3d.ops.attention import attend, attend_again, attend_grad
from hpc3d.ops.gelu import GELU, gelu_grad
from hpc3d.ops.rows import add_bias
from hpc3d.tensor.matmul import Saved


class BlockSaved(NamedTuple):
    """What the backward pass of a block works with: the inputs of its products and norms, [q|k|v]
    and the probabilities of attention (None where backward makes them again), and the slope of
    GELU, or where products do GELU what it was made of."""

    norm1: NormSaved
    qkv_linear: Saved
    qkv: np.ndarray
    probabilities: np.ndarray | None
    proj_linear: Saved
    norm2: NormSaved
    up_linear: Saved
    slope: np.ndarray
    down_linear: Saved


class BlockInput(NamedTuple):
    """What is kept instead where backward runs the whole block again: X, and the weights."""

    x: np.ndarray
    weights: np.ndarray


class Block:
    """Layer number `number` of the model; X and Y lie alike, in the layout of the split's X.

    `recompute` says what backward runs again instead of keeping it (arXiv:2205.05198, section 5):
    "selective" the probabilities of attention, from q and k; "full" the whole block, with its
    messages, from X.  One rank with n elements of X, T tokens of h features a sequence and a heads
    keeps n (16 + a T / h) elements with "none", 16 n with "selective" and n with "full".
    """

    def __init__(self, mesh, parameters, spec, number):
        model, split = spec.sizes, spec.split
        self.mesh, self.model, self.number = mesh, model, number
        self.parameters, self.recompute = parameters, spec.recompute
        self.name = name = f"layers.{number}"
        hidden = model.hidden
        std, last = model.std, model.std / sqrt(2 * model.layers)

        def linear(part, shape, split, std):
            return Linear(mesh, parameters, f"{name}.{part}", shape, split, std, spec.keep)

        def dropout(part, layout):
            return Dropout(mesh, f"{name}.{part}", layout, model.dropout, spec.seed)

        self.norm1 = LayerNorm(mesh, parameters, f"{name}.norm1", hidden, split.x)
        self.qkv = linear("qkv", (hidden, 3 * hidden), split, std)
        self.drop_p = dropout("drop_p", split.y)
        self.proj = linear("proj", (hidden, hidden), split.next(), last)
        self.drop1 = dropout("drop1", split.x)
        self.norm2 = LayerNorm(mesh, parameters, f"{name}.norm2", hidden, split.x)
        self.up = linear("up", (hidden, model.ffn), split, std)
        self.down = linear("down", (model.ffn, hidden), split.next(), last)
        self.drop2 = dropout("drop2", split.x)
        self.gelu = GELU[model.gelu]
        alone = self.up.matmul.is_local and self.down.matmul.is_local
        self.fused_gelu = model.fused_gelu and alone

    def forward(self, x, micro):
        """The block of Y and what `backward` needs: with "full", what `again` needs."""
        y, saved = self.run(x, micro)
        return y, BlockInput(x, self.parameters.value) if self.recompute == "full" else saved

    def again(self, kept, micro):
        """What the forward pass did not keep: it runs once more, with the weights it had."""
        newest = self.parameters.value
        self.parameters.show(kept.weights)
        with self.mesh.trace.scope(phase="recompute"):
            _, saved = self.run(kept.x, micro)
        self.parameters.show(newest)
        return saved

    def run(self, x, micro):
        """The block of Y and what the backward pass works with."""
        self.mesh.trace.layer = self.number
        n1, saved_n1 = self.norm1.forward(x)
        qkv, saved_qkv = self.qkv.forward(n1)
        a, p = self.attend(qkv, micro)
        p = None if self.recompute == "selective" else p
        x, saved_proj = self.join(x, self.proj, a, self.drop1, micro)
        n2, saved_n2 = self.norm2.forward(x)
        g, saved_up, slope = self.rise(n2)
        y, saved_down = self.join(x, self.down, g, self.drop2, micro)
        return y, BlockSaved(
            norm1=saved_n1,
            qkv_linear=saved_qkv,
            qkv=qkv,
            probabilities=p,
            proj_linear=saved_proj,
            norm2=saved_n2,
            up_linear=saved_up,
            slope=slope,
            down_linear=saved_down,
        )

    def backward(self, dy, saved, micro, later):
        self.mesh.trace.layer = self.number
        if self.recompute == "full":
            saved = self.again(saved, micro)
        dh = self.fall(self.drop(self.drop2, dy, micro), saved.down_linear, saved.slope, later)
        dy = self.norm2.backward(
            self.up.backward(dh, saved.up_linear, later), saved.norm2, residual=dy
        )
        da = self.proj.backward(self.drop(self.drop1, dy, micro), saved.proj_linear, later)
        p = saved.probabilities
        if self.recompute == "selective":
            p = self.attend_again(saved.qkv, micro)
        dqkv = self.attend_grad(da, saved.qkv, p, micro)
        return self.norm1.backward(
            self.qkv.backward(dqkv, saved.qkv_linear, later), saved.norm1, residual=dy
        )

    def attend(self, qkv, micro):
        """The core of attention: its output and the probabilities."""
        drop = self.drop_probabilities(micro)
        with self.mesh.trace.span("attention", "attention", self.flops(qkv)):
            return attend(qkv, self.model.sequence, self.model.width, self.mesh.empty, drop)

    def attend_again(self, qkv, micro):
        """The probabilities once more: half of the work."""
        trace, half = self.mesh.trace, self.flops(qkv) // 2
        drop = self.drop_probabilities(micro)
        with trace.scope(phase="recompute"), trace.span("attention", "attention", half):
            return attend_again(qkv, self.model.sequence, self.model.width, self.mesh.empty, drop)

    def attend_grad(self, da, qkv, p, micro):
        """The gradient of [q|k|v] from that of attention's output."""
        model = self.model
        with self.mesh.trace.span("attention", "attention", 2 * self.flops(qkv)):
            drop = self.drop_probabilities(micro)
            return attend_grad(da, qkv, p, model.sequence, model.width, self.mesh.empty, drop)

    def rise(self, n):
        """GELU(up(n)), what backward needs of up, and the slope of GELU; where products do GELU,
        what it was made of."""
        if self.fused_gelu:
            return self.up.activated(n)
        h, saved = self.up.forward(n)
        with self.mesh.trace.span("gelu"):
            return self.gelu(h, self.mesh.empty(h.shape, h.dtype)), saved, h

    def fall(self, dy, saved, slope, later):
        """The gradient of up's result from that of down's."""
        if self.fused_gelu:
            return self.down.backward(dy, saved, later, gelu_at=slope)
        dg = self.down.backward(dy, saved, later)
        with self.mesh.trace.span("gelu"):
            return gelu_grad(slope, dg)

    def join(self, x, linear, a, dropout, micro):
        """x + dropout(linear(a)), and what backward needs of linear."""
        if linear.matmul.y_is_complete and not dropout.rate:
            return linear.forward(a, residual=x)
        y, saved = linear.forward(a)
        y = self.drop(dropout, y, micro)
        with self.mesh.trace.span("residual"):
            return add_bias(x, y, self.mesh.empty(x.shape, x.dtype)), saved

    def drop(self, dropout, x, micro):
        return dropout.apply(x, micro, self.model.sequence, self.model.hidden)

    def drop_probabilities(self, micro):
        """The `Mask` of this rank's attention probabilities, [B, heads * T * T], or None."""
        return self.drop_p.mask(micro, 1, self.model.heads * self.model.sequence**2)

    def flops(self, qkv):
        """Of q k' and p v: 2 products of 2 T D for every row and head."""
        return 4 * self.model.sequence * qkv.size // 3
