"""Proof that a layout of a model reduces and gathers every value exactly once.

The forward and backward passes of the model run on arrays that have no data, only the state of
their value along each mesh axis (hpc3d.predict.proof.states). One block of each kind is run. The
proof covers the operands of all operations and collectives, dropout masks, the output and the
saved activations of each layer, and the gradient of each parameter before and after its reduction.

It does not cover pipeline messages, the order of shards in a gathered array, compressed gradients,
the optimizer, the agreements of local updates, and the values that other ranks own in SUMMA. GPU
kernels that fuse several operations are checked as separate operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hpc3d.comm.mesh import COPIES
from hpc3d.model.layers import immediately
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.spec import recompute_of
from hpc3d.model.stage import LayerRange, build
from hpc3d.ops.random import Mask
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.predict.proof.flat_gradient import FlatGradient
from hpc3d.predict.proof.state_check import StateCheck, saved_arrays
from hpc3d.predict.proof.stated_array import StatedArray, Varying
from hpc3d.predict.proof.stated_mesh import stated_mesh
from hpc3d.predict.proof.states import LOCAL, PARTIAL, PARTS, States, named
from hpc3d.training.trainer import parameters_of, spec_of

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameter
    from hpc3d.tensor.layout import Layout


def prove(config: Config, vocabulary: int) -> None:
    """Prove that the layout of a resolved `config` is correct, unless `guard.layout` is false.

    Raises
    ------
    ValueError
        If it is not. The message names the layer, the value and the mesh axis.
    """
    config = replace(config, parallel=replace(config.parallel, offload=()))
    sizes = {**config.sizes(), "p": 1}
    if config.parallel.local_steps:
        sizes[COPIES] = 1  # each worker trains on its own
    axes = [axis for axis, size in sizes.items() if size > 1]
    if not (axes and config.guard.layout):
        return
    program = partial(_Program, config, vocabulary, sizes)
    first = program({})
    recorded = [first.passes()]
    for axis in axes:
        last = program({axis: sizes[axis] - 1}, rows=first.check.rows)
        recorded.append(last.passes())
    varied = [
        frozenset(axis for axis, other in zip(axes, others) if not _equal(value, other))
        for value, *others in zip(*recorded, strict=True)
    ]
    checked = program({}, varied)
    checked.passes()
    checked.reductions()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mask):
        return all(map(_equal, a, b))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


class _Unit(NamedTuple):
    """Part of the model with a forward and a backward pass: a block, the embedding or the head."""

    module: Any
    layer: int
    part: str


class _Program:
    """Passes and gradient reductions of the model on the rank at `coords` of the mesh.

    `varied` and `rows` are those of `StateCheck`.
    """

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        sizes: dict[str, int],
        coords: dict[str, int],
        varied: Sequence[frozenset[str]] | None = None,
        rows: Sequence[int | None] | None = None,
    ) -> None:
        self.config, self.check = config, StateCheck(self._where, varied, rows)
        self.mesh: Mesh = stated_mesh(sizes, {**dict.fromkeys(sizes, 0), **coords}, self.check)
        self.spec = spec_of(config, vocabulary)
        self.parameters = parameters_of(self.mesh, config)
        layers: Any = LayerRange(self._layers(), first=True, last=True)  # type: ignore[arg-type]
        (self.stage,) = build(self.mesh, self.parameters, self.spec, [layers])
        blocks = [_Unit(block, block.number, "block") for block in self.stage.blocks]
        ends: Any = self.stage.embeddings, self.stage.head
        first, last = (_Unit(end, -1, end.name) for end in ends)
        self.units = [first, *blocks, last]
        self.parameters.allocate(config.seed)
        for item in self.parameters:
            item.value = _alone(item.value, f"value of {item.name}")
            item.value.cell.states = self._states(item.layout)
            if not item.frozen:
                item.grad = _alone(item.grad, f"gradient of {item.name}")

    def _layers(self) -> list[int]:
        """Return one layer of each kind."""
        sizes, recompute = self.spec.sizes, self.spec.recompute
        kinds = {
            (sizes.mixes(each), sizes.window_of(each), recompute_of(recompute, each)): each
            for each in range(sizes.layers)
        }
        return sorted(kinds.values())

    def _where(self) -> str:
        trace = self.mesh.trace
        layer = f"layer {trace.layer}, " if trace.layer >= 0 else ""
        return f"guard.layout: {layer}{trace.part}, {trace.phase}"

    def _states(self, layout: Layout) -> States:
        """Return the states of a block in a layout."""
        states = dict.fromkeys(layout.owned, 0)
        states |= {axis: PARTS * dim for dim, axes in enumerate(layout) for axis in axes}
        return {axis: state for axis, state in states.items() if self.mesh.size(axis) > 1}

    def passes(self) -> list[Any]:
        """Run both passes; return the host values that may depend on mesh coordinates."""
        micro, trace = self._microbatch(), self.mesh.trace
        saved: list[Any] = []
        x: Any = None
        for unit in self.units:
            with trace.scope(unit.layer, "forward pass", unit.part):
                forward = unit.module.forward
                x, kept = forward(micro) if x is None else forward(x, micro)
                self._check_saved(kept)
                self._check_block(x, "output")
                saved.append(kept)
        dy: Any = None
        for unit in reversed(self.units):
            backward, kept = unit.module.backward, saved.pop()
            with trace.scope(unit.layer, "backward pass", unit.part):
                if dy is None:
                    dy = backward(micro, kept, immediately)
                else:
                    dy = backward(dy, kept, micro, immediately)
                self._check_block(dy, "gradient of the input")
        with trace.scope(part="gradients", phase="end of the backward pass"):
            for item in self.parameters:
                if not item.frozen:
                    self._check_gradient(item)
        return self.check.recorded

    def _microbatch(self) -> Microbatch:
        """Return a microbatch whose sequences and chunks of sequences all differ."""
        train, context = self.config.train, self.spec.context
        count, few = -(-train.batch // self.config.parallel.microbatches), 2 * self.mesh.ranks
        count = count if count % few else few  # fewer tokens, sharded in the same way
        numbers = np.arange(count + context.length - 1)
        tokens = context.cut(sliding_window_view(numbers, context.length))
        return Microbatch(0, 0, tokens, tokens, 1.0, self._host_value)

    def _host_value(self, micro: Microbatch, name: str, make: Any) -> Any:
        value = make(micro)
        axes = self.check.varies(value)
        if isinstance(value, np.ndarray):
            value = value.view(Varying)
            value.axes = axes
        return value

    def _check_block(self, x: Any, name: str) -> None:
        """Check that a block has the layout of X, and set its states, which are now known."""
        if isinstance(x, StatedArray):
            states = self._states(self.spec.splits["dense"].x)
            self._compare(f"the {name} ({x.cell.name})", x.states, states, "the layout of X")
            x.cell.states = None
            x.become(states, f"{name} of a layer")

    def _compare(
        self, name: str, states: States | None, expected: States, declaration: str
    ) -> None:
        for axis in () if states is None else sorted({*states, *expected}):
            found, wanted = (named(each.get(axis)) for each in (states, expected))
            if found != wanted:
                self.check.refuse(
                    f"{name} is {found} along axis {axis}, but {declaration} declares that it is "
                    f"{wanted}"
                )

    def _check_saved(self, saved: Any) -> None:
        for array in saved_arrays(saved):
            for axis, state in (array.states or {}).items():
                if state in (PARTIAL, LOCAL):
                    self.check.refuse(
                        f"the saved activation ({array.cell.name}) is {named(state)} along axis "
                        f"{axis}; reduce it before it is saved"
                    )

    def _check_gradient(self, item: Parameter) -> None:
        """Check the gradient of a parameter at the end of the backward pass."""
        expected, grad = self._states(item.updated_layout), item.grad
        if grad.states is None:
            self.check.refuse(f"the {grad.cell.name} is never computed")
            return
        # The gradients of a replicated value that differ between ranks are the terms of a sum.
        states = {
            axis: state if axis in expected else PARTIAL for axis, state in grad.states.items()
        }
        partial = [axis for group in item.partial for axis in group.split()]
        expected |= {axis: PARTIAL for axis in partial if self.mesh.size(axis) > 1}
        self._compare(f"the {grad.cell.name}", states, expected, "Parameters.add")
        grad.cell.states = states

    def reductions(self) -> None:
        """Run the gradient reductions of a step, and check that no gradient remains partial."""
        parameters = self.parameters
        parameters.grad = FlatGradient(parameters)
        buckets = Buckets(parameters, self.config.parallel.bucket_bytes)
        with self.mesh.trace.scope(part="gradients", phase="end of the step"):
            buckets.all_finished(self.stage.units)
            buckets.wait()
            for item in filter(parameters.updates, parameters):
                states = {} if item.frozen else item.grad.states
                for axis in (axis for axis, state in states.items() if state == PARTIAL):
                    self.check.refuse(
                        f"the {item.grad.cell.name} is still a partial sum along axis {axis}"
                    )


def _alone(block: StatedArray, name: str) -> StatedArray:
    """Return a parameter's block as an array of its own, which is not a view of a flat array."""
    array = StatedArray(block.shape, block.dtype, block.pool, block.lease)
    array.cell.name, array.cell.fixed = name, True
    return array
