"""Transformer block with attention, and an MLP or a mixture of experts.

    pre-norm       y = x + proj(attention(qkv(norm(x))))     z = y + mlp(norm(y))
    post-norm      y = norm(x + proj(attention(qkv(x))))     z = norm(y + mlp(y))
    parallel       y = x + proj(attention(qkv(norm(x))))     z = y + mlp(norm(x))
    branch norm    y = x + norm(proj(attention(qkv(x))))     z = y + norm(mlp(y))
    sandwich norm  y = x + norm'(proj(attention(qkv(norm(x)))))     z = y + norm'(mlp(norm(y)))

In some families, q and k are normalized before attention (hpc3d.model.qkv.query_norm).

The fields of `Family` describe the differences between model families.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.model.context_attention import attention_of
from hpc3d.model.experts import ExpertMixture
from hpc3d.model.layers import Linear
from hpc3d.model.mlp import Mlp
from hpc3d.model.qkv.grouped_qkv import GroupedQkv, GroupedSaved
from hpc3d.model.spec import recompute_of
from hpc3d.tensor.chunked import chunked_matmul
from hpc3d.tensor.matmul import Saved
from hpc3d.tensor.prefetch import Prefetch

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.prefetch import Weight


class BlockSaved(NamedTuple):
    """Data saved for the backward pass of a block.

    The fields hold the inputs of its matrix products and norms, and the data saved by attention
    and the MLP.

    If modules other than "core_attn" are recomputed, the data to recompute is missing, and
    `weights` is the flat array of the weights.
    """

    norm1: Any  # NormSaved, NormInput or SandwichSaved
    qkv_linear: Saved | GroupedSaved
    query_norm: Any  # QueryNormSaved, or None
    attention: Any
    proj_linear: Saved
    norm2: Any  # NormSaved, NormInput or SandwichSaved
    mlp: Any
    weights: Array | None = None


class BlockInput(NamedTuple):
    """Data saved for a fully recomputed block: its input X, and the flat array of its weights."""

    x: SavedActivation
    weights: Array


class Block:
    """Transformer block. Its input and output have the same layout, and `number` is its index.

    `recompute` selects activation checkpointing (arXiv:2205.05198, section 5). "full" recomputes
    the complete block from X, including its communication. For sequences of T tokens with h
    features and a heads, a rank that stores n elements of X saves n (16 + a T / h) elements
    without recomputation and n elements with "full". The following modules can be recomputed
    instead. Each reduces the number of saved elements, here for a dense block of GPT-2:

        core_attn    n a T / h   attention probabilities, recomputed from q and k
        layernorm    2 n         outputs of the norms, recomputed from the inputs of the norms
        mlp_act      4 n         output of the activation, recomputed from its input
        mlp          8 n         input and output of the activation, recomputed from X of the MLP

    In a post-norm block, only the first norm is recomputed: the output of the second norm is the
    input of the next block. In a block with norms at the end of branches, no norm is recomputed.
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, number: int) -> None:
        model, split, family = spec.sizes, spec.splits["dense"], spec.family
        hidden, std = model.hidden, model.std
        product: Any = partial(chunked_matmul, mesh, **spec.product_settings)
        self.mesh, self.number, self.parameters = mesh, number, parameters
        self.recompute = recompute_of(spec.recompute, number)
        self.name = name = f"layers.{number}"
        self.parallel = family.parallel
        # GPT-2 scales the initial weights of residual projections by 1 / sqrt(2 * layers)
        # (Radford et al. 2019).
        last = std / sqrt(2 * model.layers) if family.connection.SCALED else std

        def linear(part, shape, split, std, interleaved=(1, 1)):
            biased = part in family.biased
            return Linear(
                parameters, f"{name}.{part}", shape, product(split), std, biased, interleaved
            )

        def qkv():
            if model.form.queries == 1:
                return linear("qkv", (hidden, model.qkv), split, std, (3, model.form.width))
            return GroupedQkv(parameters, name, model, product(split), std, "qkv" in family.biased)

        connection: Any = family.connection
        connected = partial(connection, mesh, parameters, spec, name)
        again = "layernorm" in self.recompute
        self.residual1 = connected(1, again)
        self.qkv = qkv()
        self.query_norm = family.query_norm and family.query_norm(mesh, parameters, spec, name)
        self.window = model.window_of(number)
        attention_spec = spec.of_layer(number)
        self.attention = attention_of(mesh, f"{name}.drop_p", attention_spec, self.window)
        self.proj = linear("proj", (model.attended, hidden), split.next(), last)
        self.residual2 = connected(2, again)
        self.mixes = model.mixes(number)
        self.mlp: Mlp | ExpertMixture = (
            ExpertMixture(mesh, parameters, spec, name, last)
            if self.mixes
            else Mlp(mesh, parameters, spec, name, model.ffn, last)
        )
        self.prefetch = Prefetch(self.weights()) if spec.prefetch else None

    def weights(self, saved: BlockSaved | None = None) -> list[Weight]:
        """Return the linear layers and their saved data, in the order in which they gather W.

        If `saved` is given, the layers are in the order of the backward pass.
        """
        if saved is None:
            return [(self.qkv, None), (self.proj, None), *self.mlp.weights()]
        attention = (self.proj, saved.proj_linear), (self.qkv, saved.qkv_linear)
        return [*self.mlp.weights(saved.mlp), *attention]

    def forward(self, x: Array, micro: Microbatch) -> tuple[Array, BlockSaved | BlockInput]:
        """Return this rank's shard of the output Y, and the data saved for the backward pass.

        The saved data is a `BlockInput` if the block is fully recomputed.
        """
        y, saved = self.forward_saving(x, micro)
        return y, BlockInput(x, self.parameters.value) if "full" in self.recompute else saved

    def _restored(self, kept: BlockSaved | BlockInput, micro: Microbatch) -> BlockSaved:
        """Recompute the block or its modules with the saved weights; return the activations."""
        newest = self.parameters.value
        assert kept.weights is not None
        self.parameters.use(kept.weights)
        with self.mesh.trace.scope(phase="recompute"):
            if isinstance(kept, BlockInput):
                _, saved = self.forward_saving(kept.x, micro)
            else:
                n1, norm1 = self.residual1.restored(kept.norm1)
                n2, norm2 = self.residual2.restored(kept.norm2)
                saved = self._with_outputs(kept._replace(norm1=norm1, norm2=norm2), n1, n2)
                with self.mesh.trace.scope(part="MLP"):
                    saved = saved._replace(mlp=self.mlp.restored(saved.mlp))
        self.parameters.use(newest)
        return saved

    def _with_outputs(
        self, saved: BlockSaved, first: Array | None, second: Array | None
    ) -> BlockSaved:
        """Return the saved data with these outputs of recomputed norms; `None` removes them."""
        if not self.residual1.again:
            return saved
        if not self.residual2.again:  # post-norm
            return saved._replace(mlp=self.mlp.with_input(saved.mlp, first))
        qkv = self.qkv.with_input(saved.qkv_linear, first)
        return saved._replace(qkv_linear=qkv, mlp=self.mlp.with_input(saved.mlp, second))

    def forward_saving(self, x: Array, micro: Microbatch) -> tuple[Array, BlockSaved]:
        """Return this rank's shard of the output Y, and the data saved by each module."""
        if self.prefetch:
            self.prefetch.begin(self.weights())
        residual1, residual2 = self.residual1, self.residual2
        with self.mesh.trace.scope(part="attention"):
            n1, saved_norm1 = residual1.branch_input(x)
            qkv, saved_qkv = self.qkv.forward(n1)
            saved_query_norm = self.query_norm and self.query_norm.forward(qkv)
            a, saved_attention = self.attention.forward(qkv, micro)
            y, saved_proj, saved_norm1 = residual1.add(x, micro, saved_norm1, self.proj, a)
        with self.mesh.trace.scope(part="MLP"):
            n2, saved_norm2 = residual2.branch_input(x if self.parallel else y)
            y, saved_mlp, saved_norm2 = residual2.add(y, micro, saved_norm2, self.mlp, n2, micro)
        saved = BlockSaved(
            saved_norm1,
            saved_qkv,
            saved_query_norm,
            saved_attention,
            saved_proj,
            saved_norm2,
            saved_mlp,
            self.parameters.value if self.recompute - {"core_attn"} else None,
        )
        return y, self._with_outputs(saved, None, None)

    def backward(
        self,
        dy: Array,
        saved: BlockSaved | BlockInput,
        micro: Microbatch,
        defer: Callable[..., None],
    ) -> Array:
        if isinstance(saved, BlockInput) or saved.weights is not None:
            saved = self._restored(saved, micro)
        if self.prefetch:
            self.prefetch.begin(self.weights(saved))
        with self.mesh.trace.scope(part="MLP"):
            dy = self.residual2.total_grad(dy, saved.norm2)
            dx = self.residual2.branch_grad(dy, saved.norm2, micro)
            dx = self.mlp.backward(dx, saved.mlp, micro, defer)
            dtotal = self.residual2.input_grad(dx, saved.norm2, dy)
        with self.mesh.trace.scope(part="attention"):
            dtotal = self.residual1.total_grad(dtotal, saved.norm1)
            da = dy if self.parallel else dtotal
            da = self.residual1.branch_grad(da, saved.norm1, micro)
            da = self.proj.backward(da, saved.proj_linear, defer)
            dqkv = self.attention.backward(da, saved.attention, micro)
            if self.query_norm:
                self.query_norm.backward(dqkv, saved.query_norm)
            dx = self.qkv.backward(dqkv, saved.qkv_linear, defer)
            if self.prefetch:
                defer(self.prefetch.later, None)
            return self.residual1.input_grad(dx, saved.norm1, dtotal)
