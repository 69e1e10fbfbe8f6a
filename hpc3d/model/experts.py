"""Mixture of experts that replaces the MLP of a block.

Each token is routed to `top_k` experts, and all-to-alls along axis e send tokens to their experts.
The layer corresponds to Switch (Fedus et al. 2021, arXiv:2101.03961) with one expert per token, to
GShard (Lepikhin et al. 2020, arXiv:2006.16668) with two, and to Mixtral (Jiang et al. 2024,
arXiv:2401.04088) without token dropping. A routing group is a sequence or, if a sequence is
sharded over several ranks, the part of it that a rank stores. Each expert has C slots per routing
group (its capacity), assigned in order of token position, first choices before second choices.
Tokens beyond the capacity are dropped. Unless sequences are sharded, the set of dropped tokens
depends neither on the mesh nor on the microbatch. Without a capacity limit, no token is dropped,
and C depends on the largest number of tokens that are routed to one expert.

    X[rows, h] --route--> choices, weights
      |  dispatch        [e R, E/e, h]      R slot rows per rank of e
      |  all-to-all
      |  experts' MLPs   [e R, E/e, h]      one stacked product each, sharded by x, y, z
      |  all-to-all
      |  combine         weighted sum of a token's rows
    Y[rows, h]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.arrays.pool import has_values, on_host
from hpc3d.comm.mesh import CONTEXT, EXPERTS
from hpc3d.model.layers import Linear, immediately, row_axes
from hpc3d.model.mlp import Mlp, MlpSaved
from hpc3d.ops.routing import (
    RouterLoss,
    Routes,
    SlotForm,
    add_excess,
    combine,
    combine_grad,
    counts_of,
    dispatch,
    dispatch_grad,
    load_of,
    route,
    route_grad,
    router_loss,
    shares_of,
    slots_of,
)
from hpc3d.ops.rows import add_bias
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Saved, sharded_matmul

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.comm.communicator import Pending
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.prefetch import Weight
    from hpc3d.tensor.split import Split


class MixtureSaved(NamedTuple):
    """Data saved for the backward pass of a mixture of experts.

    `routes` covers only this rank's own rows; `slots` and `weights` [rows, top_k] cover all rows
    of X.  `y` is the output of the experts after the all-to-all.
    """

    router: Saved
    routes: Routes
    loss: RouterLoss
    slots: Array
    weights: Array
    experts: MlpSaved
    y: SavedActivation
    shared: MlpSaved | None


class ExpertMixture:
    """Mixture of experts of block `name`, whose input and output have the layout of the block's X.

    Each rank routes its own rows: it computes complete rows of router logits. Expert indices and
    gate weights are then all-gathered along the axes that shard loop k (the features of X).

    `auxiliary_loss` is this rank's share of the router losses in the last forward pass. A token
    has the z-loss z lse^2 (Zoph et al. 2022, arXiv:2202.08906), where lse is the log-sum-exp of
    its router logits, and the balance loss alpha E sum_i f_i P_i (Fedus et al. 2021, equation 4),
    where f_i is the fraction of its sequence's choices that select expert i, and P_i is its router
    probability of expert i. E is the number of experts, z is model.z_loss, and alpha is
    model.balance_loss. If several ranks route the same token, only one counts its losses.
    """

    adds_residual = False

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, name: str, last: float
    ) -> None:
        sizes, split = spec.sizes, spec.splits["dense"]
        assert sizes.experts
        self.mesh, self.form, self.context = mesh, sizes.experts, spec.context
        matmul = sharded_matmul(mesh, split.by_rows(), spec.keep, reduced=spec.reduced)
        shape = (sizes.hidden, self.form.count)
        self.router = Linear(parameters, f"{name}.router", shape, matmul, sizes.std, biased=False)
        self.bias = self._balancing_bias(parameters, f"{name}.router.bias", matmul)
        mlp = partial(Mlp, mesh, parameters, spec, last=last)
        self.experts = mlp(f"{name}.experts", sizes.ffn, experts=self.form.count)
        shared = self.form.shared
        self.shared = mlp(f"{name}.shared", shared * sizes.ffn) if shared else None
        self.parts, self.multiple = mesh.size(EXPERTS), _least_rows(mesh, spec.splits["experts"])
        self.notes = matmul.split.y.rows.is_first_copy(mesh)
        sharding = [axis for axis in split.x[0] if axis not in split.m.split()]
        self.sharding = [axis for axis in sharding if mesh.size(axis) > 1]
        self.auxiliary_loss: Any = 0.0

    def _balancing_bias(self, parameters, name, matmul):
        """Register the balancing bias b_i (arXiv:2408.15664), used only to select experts.

        After each step, b_i decreases by a fixed rate if expert i was selected more often than the
        average expert, and increases if it was selected less often. The gradient of b_i is
        therefore defined as the number of selections of expert i minus the average over all
        experts, multiplied by the number of experts.
        """
        if not self.form.balance_bias:
            return None
        return parameters.add(
            name,
            (self.form.count,),
            Layout(""),
            partial=row_axes(matmul.split.y),
            sign_rate=self.form.balance_bias,
        )

    def weights(self, saved: MixtureSaved | None = None) -> list[Weight]:
        """Return the linear layers and their saved data, in the order in which they gather W.

        If `saved` is given, the layers are in the order of the backward pass.
        """
        shared = self.shared.weights(saved and saved.shared) if self.shared else []
        experts = self.experts.weights(saved and saved.experts)
        return [(self.router, saved and saved.router), *shared, *experts]

    def forward(self, x: Array, micro: Microbatch) -> tuple[Array, MixtureSaved]:
        """Return the output Y and the data saved for the backward pass."""
        logits, saved_router = self.router.forward(x)
        with self.mesh.trace.span("routing"):
            routes = route(logits, self.form.top_k, self.bias and self.bias.value)
        choices, weights = (self._along_k(each).wait() for each in routes[:2])
        form = self._slots(choices, micro)
        slots, loss = self._decide(routes, choices, form, micro)
        pending = self.mesh.comm(EXPERTS).all_to_all(self._dispatched(x, slots, form))
        y, saved_shared = self.shared.forward(x, micro) if self.shared else (None, None)
        rows, saved_experts = self.experts.forward(self._arrived(pending), micro)
        rows = self._arrived(self.mesh.comm(EXPERTS).all_to_all(rows))
        out = self.mesh.empty(x.shape, x.dtype)
        with self.mesh.trace.span("combine", "lookup"):
            combine(_flat(rows), slots, weights, out)
        saved = (routes, loss, slots, weights, saved_experts, rows, saved_shared)
        return self._sum(out, y), MixtureSaved(saved_router, *saved)

    def with_input(self, saved: MixtureSaved, x: Array | None) -> MixtureSaved:
        """Return the saved data with the stored block `x` of X, or without X if x is `None`."""
        shared = saved.shared
        if self.shared and shared:
            shared = self.shared.with_input(shared, x)
        return saved._replace(router=self.router.with_input(saved.router, x), shared=shared)

    def restored(self, saved: MixtureSaved) -> MixtureSaved:
        """Recompute the data that the MLPs did not save in `forward`."""
        shared = saved.shared
        if self.shared and shared:
            shared = self.shared.restored(shared)
        return saved._replace(experts=self.experts.restored(saved.experts), shared=shared)

    def _along_k(self, block: Array) -> Pending:
        """Start an all-gather of a block along loop k; return a handle to all rows."""
        matmul = self.router.matmul
        return matmul.gather(block, matmul.split.y, matmul.axes["k"])

    def _decide(
        self, routes: Routes, choices: Array, slot_form: SlotForm, micro: Microbatch
    ) -> tuple[Array, RouterLoss]:
        """Assign slots to the routed tokens and record the router losses.

        Returns the slot of each routed token, and the data from which the losses are computed.
        """
        form, own = self.form, len(routes.lse)
        start = own * self.mesh.index(self.router.matmul.split.k.split())
        shares, first = self._shares(choices, micro, routes.probs.dtype)
        balance = form.balance_loss * form.count
        loss = RouterLoss(shares, first + start, micro.tokens.shape[1], balance, form.z_loss)
        with self.mesh.trace.span("routing"):
            slots = slots_of(choices, slot_form)
        self.auxiliary_loss = 0.0
        if self.notes and micro.training:
            self._note(routes, slots[start : start + own], loss)
        return slots, loss

    def _shares(self, choices: Array, micro: Microbatch, dtype: DTypeLike) -> tuple[Array, int]:
        """Return the fraction of routed tokens per expert for each sequence, and a row index.

        The sequences are those that contain this rank's rows or, if tensor axes shard a sequence,
        the rows of all ranks along these axes. The row index is the position of this rank's first
        row of X in these sequences.
        """
        (rows, top_k), tokens, first = choices.shape, micro.tokens.shape[1], 0
        group = gcd(rows, tokens)
        with self.mesh.trace.span("routing"):
            counts = counts_of(choices, group, self.form.count)
        if group < tokens:
            first = rows * self.mesh.index(self.sharding)
            for axis in reversed(self.sharding):
                counts = self.mesh.comm(axis).all_gather(counts).wait()
        counts = counts.reshape(1, -1, tokens // group, self.form.count)
        if self.context.parts > 1:
            counts = self.mesh.comm(CONTEXT).all_gather(counts).wait()
        with self.mesh.trace.span("routing"):
            return shares_of(counts, tokens * self.context.parts * top_k, dtype), first

    def _note(self, routes: Routes, slots: Array, loss: RouterLoss) -> None:
        """Compute this rank's router losses; record them and each expert's load in the trace."""
        with self.mesh.trace.span("routing"):
            losses = router_loss(routes.probs, routes.lse, loss)
            chosen, kept = load_of(routes.experts, slots, self.form.count)
        self.auxiliary_loss = losses[0] + losses[1]
        self.mesh.trace.routed(chosen, kept, losses)

    def _slots(self, choices: Array, micro: Microbatch) -> SlotForm:
        """Return the slot layout (`SlotForm`) for the rows of X with these `choices`."""
        form, group = self.form, len(choices)
        if form.capacity:
            group = gcd(group, micro.tokens.shape[1])
            capacity = form.slots(group)
        else:
            capacity = form.sufficient_slots(group, self._largest_load(choices))
        held = -(-(len(choices) // group * capacity) // self.multiple) * self.multiple
        return SlotForm(group, form.count, capacity, self.parts, held)

    def _largest_load(self, choices: Array) -> int:
        """Return the largest number of tokens that a rank routes to one expert.

        The maximum is taken over the ranks that exchange or gather slots, which must have equal
        numbers of slots. In a prediction, whose arrays have no values, the load is assumed to be
        balanced, and the result is 0.
        """
        with self.mesh.trace.span("routing"):
            counts = counts_of(choices, len(choices), self.form.count)
        for axis in (*self.sharding, EXPERTS):
            counts = self.mesh.comm(axis).all_gather(counts).wait()
        return int(on_host(counts).max()) if has_values(counts) else 0

    def _dispatched(self, x: Array, slots: Array, form: SlotForm) -> Array:
        """Copy the rows of X to their expert slots; return all slots as an array [e R, E/e, h]."""
        shape = form.parts * form.rows, form.count // form.parts, x.shape[1]
        out = self.mesh.empty(shape, x.dtype)
        with self.mesh.trace.span("dispatch", "lookup"):
            dispatch(x, slots, _flat(out))
        return out

    def _arrived(self, pending: Pending) -> Array:
        """Wait for an all-to-all, and let the other pass of a pair compute in the meantime."""
        self.mesh.passes.switch()
        return pending.wait()

    def backward(
        self,
        dy: Array,
        saved: MixtureSaved,
        micro: Microbatch,
        defer: Callable[..., None] = immediately,
    ) -> Array:
        comm, empty = self.mesh.comm(EXPERTS), self.mesh.empty
        rows = empty(saved.y.shape, dy.dtype)
        with self.mesh.trace.span("combine", "lookup"):
            _, dweights = combine_grad(dy, _flat(saved.y), saved.slots, saved.weights, _flat(rows))
        pending = comm.all_to_all(rows)
        dx = self._router_grad(dweights, saved, micro, defer)
        if self.shared and saved.shared:
            dx = self._sum(dx, self.shared.backward(dy, saved.shared, micro, defer))
        rows = self.experts.backward(self._arrived(pending), saved.experts, micro, defer)
        rows = self._arrived(comm.all_to_all(rows))
        out = empty(dy.shape, dy.dtype)
        with self.mesh.trace.span("dispatch", "lookup"):
            dispatch_grad(_flat(rows), saved.slots, out)
        return self._sum(out, dx)

    def _router_grad(
        self,
        dweights: Array,
        saved: MixtureSaved,
        micro: Microbatch,
        defer: Callable[..., None],
    ) -> Array:
        """Return the router's contribution to the gradient of X.

        `dweights` is this rank's partial sum, over loop k, of the gradient of the gate weights.
        """
        matmul = self.router.matmul
        own = matmul.reduce(dweights, matmul.split.y, matmul.axes["k"]).wait()
        dlogits = self.mesh.empty(saved.routes.probs.shape, saved.y.dtype)
        with self.mesh.trace.span("routing"):
            route_grad(own, saved.routes, saved.loss, micro.factor(), dlogits)
        if self.bias:
            defer(self._bias_grad, saved.routes.experts)
        return self.router.backward(dlogits, saved.router, defer)

    def _bias_grad(self, choices: Array) -> None:
        """Add E * (load of each expert - mean load) to the gradient of the balancing bias."""
        with self.mesh.trace.span("gradient"):
            add_excess(self.bias.grad, choices)

    def _sum(self, out: Array, other: Array | None) -> Array:
        if other is None:
            return out
        with self.mesh.trace.span("residual"):
            return add_bias(out, other, out)


def _flat(rows: Array) -> Array:
    """Reshape an array of slots [R, E/e, h] to a matrix with one row per slot."""
    return rows.reshape(-1, rows.shape[-1])


def _least_rows(mesh: Mesh, split: Split) -> int:
    """Return a number that must divide the number of slot rows per rank of axis e.

    The mesh axes that shard loop k can then shard the output rows of the up projection evenly.
    """
    gathered = mesh.size(EXPERTS) * mesh.count(
        [axis for axis in split.n.split() if axis in split.x[0]]
    )
    scattered = mesh.count([axis for axis in split.k.split() if axis in split.y[0]])
    return scattered // gcd(scattered, gathered)
