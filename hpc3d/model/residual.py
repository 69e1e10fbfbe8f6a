"""Residual connections around the branches of a Transformer block: attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array
from hpc3d.model.layers import Dropout, NormInput, NormSaved
from hpc3d.ops.rows import add_bias

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSpec


class PreNorm:
    """Pre-norm residual connection around a branch f: y = x + dropout(f(norm(x))).

    f is branch `number` of a block: 1 is attention, 2 the MLP. If `again` is True, the norm is
    recomputed in the backward pass. NORM is the name of the norm. At most RECOMPUTED norms of a
    block can be recomputed, starting with the first one. A branch has NORMS norms. If SCALED is
    True, the initial weights of the last products of branches depend on the number of layers.
    """

    NORM = "norm"
    NORMS = 1
    RECOMPUTED = 2
    SCALED = True

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        spec: ModelSpec,
        block: str,
        number: int,
        again: bool,
    ) -> None:
        self.mesh, self.hidden, layout = mesh, spec.sizes.hidden, spec.splits["dense"].x
        norm: Any = spec.family.norm
        name = f"{block}.{self.NORM}{number}"
        self.norm = norm(mesh, parameters, name, self.hidden, layout, spec.sizes.epsilon)
        self.dropout = Dropout(mesh, f"{block}.drop{number}", layout, spec)
        self.again = again and number <= self.RECOMPUTED

    def branch_input(self, x: Array) -> tuple[Array, Any]:
        """Return the input of f, and the data saved by the norm (`None` for post-norm)."""
        return self.normed(x)

    def normed(self, x: Array) -> tuple[Array, NormSaved | NormInput]:
        y, saved = self.norm.forward(x)
        return y, NormInput(x) if self.again else saved

    def restored(self, saved: NormSaved | NormInput) -> tuple[Array | None, NormSaved]:
        """Return the recomputed output of the norm, if any, and the data saved by the norm."""
        return self.norm.forward(saved.x) if isinstance(saved, NormInput) else (None, saved)

    def add(
        self, x: Array, micro: Microbatch, saved: Any, last: Any, *inputs: Any
    ) -> tuple[Array, Any, Any]:
        """Run the last layer of the branch f with `inputs`.

        Returns y, the data saved by the layer, and the data saved by the norm, which is `saved` if
        the norm precedes f.
        """
        return *self._sum(x, micro, last, *inputs), saved

    def _sum(self, x: Array, micro: Microbatch, last: Any, *inputs: Any) -> tuple[Array, Any]:
        """Return x + dropout(output of f) and the data saved by the last layer of f.

        If `last.adds_residual` is True, the method `forward` of this layer accepts the argument
        `residual` and adds this array to the output.
        """
        if last.adds_residual and not self.dropout.rate:
            return last.forward(*inputs, residual=x)
        y, saved = last.forward(*inputs)
        return self._added(x, y, micro), saved

    def _added(self, x: Array, y: Array, micro: Microbatch) -> Array:
        y = self.dropout.apply(y, micro, self.hidden)
        with self.mesh.trace.span("residual"):
            return add_bias(x, y, self.mesh.empty(x.shape, x.dtype))

    def total_grad(self, dy: Array, saved: NormSaved) -> Array:
        """Return the gradient of the residual sum, given the gradient of y."""
        return dy

    def branch_grad(self, dtotal: Array, saved: NormSaved, micro: Microbatch) -> Array:
        """Return the gradient of f's output, given the gradient of the residual sum."""
        return self.dropout.apply(dtotal, micro, self.hidden)

    def input_grad(self, dbranch: Array, saved: NormSaved, dtotal: Array) -> Array:
        """Return the gradient of x, given the gradients of f's input and of the residual sum."""
        return self.norm.backward(dbranch, saved, residual=dtotal)


class PostNorm(PreNorm):
    """Post-norm residual connection around a branch f: y = norm(x + dropout(f(x)))."""

    RECOMPUTED = 1
    SCALED = False

    def branch_input(self, x: Array) -> tuple[Array, Any]:
        return x, None

    def add(
        self, x: Array, micro: Microbatch, saved: Any, last: Any, *inputs: Any
    ) -> tuple[Array, Any, Any]:
        total, saved_last = self._sum(x, micro, last, *inputs)
        y, saved = self.normed(total)
        return y, saved_last, saved

    def total_grad(self, dy: Array, saved: NormSaved) -> Array:
        return self.norm.backward(dy, saved, residual=None)

    def input_grad(self, dbranch: Array, saved: NormSaved, dtotal: Array) -> Array:
        with self.mesh.trace.span("residual"):
            return add_bias(dtotal, dbranch, self.mesh.empty(dbranch.shape, dbranch.dtype))


class BranchNorm(PostNorm):
    """Residual connection with a norm at the end of the branch f: y = x + dropout(norm(f(x))).

    OLMo 2 has this connection (arXiv:2501.00656).
    """

    NORM = "post_norm"
    RECOMPUTED = 0
    SCALED = True

    def add(
        self, x: Array, micro: Microbatch, saved: Any, last: Any, *inputs: Any
    ) -> tuple[Array, Any, Any]:
        y, saved_last = last.forward(*inputs)
        y, saved = self.normed(y)
        return self._added(x, y, micro), saved_last, saved

    def total_grad(self, dy: Array, saved: NormSaved) -> Array:
        return dy

    def branch_grad(self, dtotal: Array, saved: NormSaved, micro: Microbatch) -> Array:
        return self.norm.backward(super().branch_grad(dtotal, saved, micro), saved, residual=None)


class SandwichSaved(NamedTuple):
    """Data saved by the norms before and after a branch."""

    before: Any  # NormSaved or NormInput
    after: NormSaved


class SandwichNorm(PreNorm):
    """Residual connection with norms before and after f: y = x + dropout(norm'(f(norm(x)))).

    Gemma 3 has this connection (arXiv:2503.19786).
    """

    NORMS = 2

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        spec: ModelSpec,
        block: str,
        number: int,
        again: bool,
    ) -> None:
        super().__init__(mesh, parameters, spec, block, number, again)
        self.after = BranchNorm(mesh, parameters, spec, block, number, again=False)

    def add(
        self, x: Array, micro: Microbatch, saved: Any, last: Any, *inputs: Any
    ) -> tuple[Array, Any, Any]:
        y, saved_last, after = self.after.add(x, micro, None, last, *inputs)
        return y, saved_last, SandwichSaved(saved, after)

    def restored(self, saved: Any) -> tuple[Array | None, Any]:
        y, before = super().restored(saved.before)
        return y, saved._replace(before=before)

    def branch_grad(self, dtotal: Array, saved: Any, micro: Microbatch) -> Array:
        return self.after.branch_grad(dtotal, saved.after, micro)

    def input_grad(self, dbranch: Array, saved: Any, dtotal: Array) -> Array:
        return super().input_grad(dbranch, saved.before, dtotal)
