"""MLP of a Transformer block: down(f(up(x))), where f is GELU, SwiGLU or GeGLU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.model.layers import Linear
from hpc3d.model.spec import ModelSpec, recompute_of
from hpc3d.ops.gelu import GELU, gelu_grad
from hpc3d.ops.swiglu import swiglu_grad
from hpc3d.tensor.chunked import chunked_matmul
from hpc3d.tensor.matmul import Saved

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.tensor.prefetch import Weight


class Activation:
    """Activation function of an MLP (GELU, SwiGLU or GeGLU), for a matrix or a stack of them."""

    def __init__(self, mesh: Mesh, spec: ModelSpec) -> None:
        self.mesh, self.gated = mesh, spec.family.gated
        self.function: Any = spec.family.gate or GELU[spec.sizes.gelu]
        self.name = "swiglu" if self.gated else "gelu"  # of trace events

    def forward(self, h: Array, overwrite: bool = True) -> Array:
        """Return f(h); overwrite h with the derivatives of f, unless `overwrite` is False."""
        width = h.shape[-1] // (1 + self.gated)
        out = self.mesh.empty((*h.shape[:-1], width), h.dtype)
        with self.mesh.trace.span(self.name):
            slopes = h if overwrite else self._copied(h)
            self.function(_matrix(slopes), _matrix(out))
        return out

    def _copied(self, h: Array) -> Array:
        copy = self.mesh.empty(h.shape, h.dtype)
        copy[...] = h
        return copy

    def backward(self, slopes: Array, dg: Array) -> Array:
        """Return the gradient of h, given the gradient of f(h). `slopes` is overwritten."""
        with self.mesh.trace.span(self.name):
            (swiglu_grad if self.gated else gelu_grad)(_matrix(slopes), _matrix(dg))
        return slopes


def _matrix(stack: Array) -> Array:
    return stack.reshape(len(stack), -1) if stack.ndim == 3 else stack


class MlpSaved(NamedTuple):
    """Data saved for the backward pass of an MLP.

    `up` and `down` contain the operands of the two matrix products. `slopes` contains the
    derivatives of the activation or, if GELU is fused into the products, the input of GELU.

    If the activation is recomputed ("mlp_act"), `slopes` contains its input, and `down` lacks its
    output. If the up projection is recomputed as well ("mlp"), `slopes` is `None`, and `up`
    contains stored blocks.
    """

    up: Saved
    slopes: SavedActivation
    down: Saved


class Mlp:
    """MLP y = down(f(up(x))) with `ffn` hidden features, or a stack of the MLPs of all `experts`.

    The initial weights of the down projection have the standard deviation `last`. The input of a
    stack is X[rows, E/e, h], for the E/e experts of a rank. Empty slots do not contribute to any
    gradient, because the gradients of their outputs are zero.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        spec: ModelSpec,
        name: str,
        ffn: int,
        last: float,
        experts: int | None = None,
    ) -> None:
        split, hidden = spec.splits["experts" if experts else "dense"], spec.sizes.hidden
        product: Any = partial(chunked_matmul, mesh, **spec.product_settings)

        def linear(part, inputs, outputs, split, std, interleaved=(1, 1)):
            matmul = product(split, stacked=experts is not None)
            shape = (inputs, experts, outputs) if experts else (inputs, outputs)
            biased = part in spec.family.biased
            return Linear(parameters, f"{name}.{part}", shape, matmul, std, biased, interleaved)

        kinds = 1 + spec.family.gated
        self.up = linear("up", hidden, kinds * ffn, split, spec.sizes.std, (kinds, 1))
        self.down = linear("down", ffn, hidden, split.next(), last)
        self.activation = Activation(mesh, spec)
        alone = self.up.matmul.is_local and self.down.matmul.is_local
        modules = recompute_of(spec.recompute)
        self.again = "mlp" in modules
        self.again_act = not self.again and "mlp_act" in modules
        self.fused_gelu = spec.sizes.fused_gelu and alone and not self.again_act

    def weights(self, saved: MlpSaved | None = None) -> list[Weight]:
        """Return the linear layers and their saved data, in the order in which they gather W.

        If `saved` is given, the layers are in the order of the backward pass.
        """
        if saved is None:
            return [(self.up, None), (self.down, None)]
        return [(self.down, saved.down), (self.up, saved.up)]

    @property
    def adds_residual(self) -> bool:
        return self.down.adds_residual

    def forward(
        self, x: Array, micro: Microbatch, residual: Array | None = None
    ) -> tuple[Array, MlpSaved]:
        """Return Y, plus `residual` if given, and the data saved for the backward pass.

        `residual` may be given only if `adds_residual` is True.
        """
        g, saved_up, slopes = self._hidden(x, overwrite=not self.again_act)
        y, saved_down = self.down.forward(g, residual)
        if self.again:
            saved_up, slopes = Saved(x, self.up.stored_w(), ""), None
        if self.again or self.again_act:
            saved_down = self.down.with_input(saved_down, None)
        return y, MlpSaved(saved_up, slopes, saved_down)

    def _hidden(self, x: Array, overwrite: bool = True) -> tuple[Array, Saved, Any]:
        """Return f(up(x)), the data saved by the up projection, and `slopes` of `MlpSaved`.

        If `overwrite` is False, the input of f is returned instead of `slopes`.
        """
        if self.fused_gelu:
            return self.up.activated(x)
        h, saved = self.up.forward(x)
        return self.activation.forward(h, overwrite), saved, h

    def with_input(self, saved: MlpSaved, x: Array | None) -> MlpSaved:
        """Return the saved data with the stored block `x` of X, or without X if x is `None`."""
        return saved._replace(up=self.up.with_input(saved.up, x))

    def restored(self, saved: MlpSaved) -> MlpSaved:
        """Recompute the data that `forward` did not save."""
        if self.again:
            g, up, slopes = self._hidden(saved.up.x)
        elif self.again_act:
            g, up, slopes = self.activation.forward(saved.slopes), saved.up, saved.slopes
        else:
            return saved
        return MlpSaved(up, slopes, self.down.with_input(saved.down, g))

    def backward(
        self, dy: Array, saved: MlpSaved, micro: Microbatch, defer: Callable[..., None]
    ) -> Array:
        if self.fused_gelu:
            dh: Any = self.down.backward(dy, saved.down, defer, gelu_at=saved.slopes)
        else:
            dh = self.activation.backward(saved.slopes, self.down.backward(dy, saved.down, defer))
        return self.up.backward(dh, saved.up, defer)
