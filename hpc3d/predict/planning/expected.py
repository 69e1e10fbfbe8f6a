"""Expected step times, which determine the order in which candidate layouts are estimated.

The lower bounds on the step time assume unlimited memory. If memory is limited, candidates
recompute activations, run more microbatches or use a higher ZeRO stage, so candidates with equal
bounds can have very different step times. This model measures the costs of one sequence on one
rank and scales them to each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.mesh import data_axes, expert_data_axes, plane
from hpc3d.config.input_file import MeshConfig
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.bounds import summed, tensor_replicas
from hpc3d.predict.planning.contexts import with_context
from hpc3d.predict.planning.pass_costs import StageContent

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.cost_table import CostTable

# If memory is tight, each microbatch needs three collectives per weight matrix: a gather in the
# forward pass, and a gather and a reduce-scatter of the gradient in the backward pass. `volumes`
# counts only two.
_GATHERED = 1.5


class SequenceCosts(NamedTuple):
    """Costs of one sequence on one rank, for a given value of `parallel.recompute`.

    `layer` is the time of the forward and backward pass of a layer in seconds, and `outer` that of
    the embedding and the head together. `saved` is the size of a layer's saved activations, and
    `layer_peak` and `outer_peak` are the peak memory of the passes with their workspaces, in
    bytes.
    """

    layer: float
    outer: float
    saved: int
    layer_peak: int
    outer_peak: int


class ExpectedSteps:
    """Model of step times on `ranks` ranks with `memory` bytes per rank."""

    def __init__(self, base: Config, ranks: int, memory: float, costs: CostTable) -> None:
        self.ranks, self.memory, self.costs = ranks, memory, costs
        mesh, train = MeshConfig(x=1, y=1, z=1), replace(base.train, batch=1)
        self.single_rank = replace(base, mesh=mesh, train=train)
        layers, every = base.model.layers, base.model.moe_every
        stage = StageContent(layers, True, True, layers // every if every > 1 else 0)
        self.held = costs.held(self.single_rank, stage)
        (_, dense), (_, experts) = summed(self.single_rank)
        self.dense = dense / (dense + experts)
        self._sequence = cache(self._measured)

    def of(self, candidate: Candidate) -> tuple[float, float]:
        """Return the number of bytes above the memory limit, and the step time in seconds.

        Both values are for the candidate's best combination of microbatches, ZeRO stage and
        recomputation.
        """
        best, zeros = (inf, inf), self._zeros(candidate)
        for micros, needed, seconds in self._passes(candidate):
            for held, once, more in zeros:
                excess = held + needed - self.memory
                step = excess if excess > 0 else 0.0, seconds + once + micros * more
                if step < best:
                    best = step
                if excess <= 0:
                    break  # higher ZeRO stages are slower
        return best

    def _passes(self, candidate: Candidate) -> Iterator[tuple[int, float, float]]:
        """Yield tuples (number of microbatches, peak memory in bytes, time of the passes in s).

        The tuples cover all combinations of the number of microbatches and `parallel.recompute`.
        """
        config, moves = candidate.config, candidate.moves
        mesh, parallel, layers = config.mesh, config.parallel, config.model.layers
        stages, own, tensor = mesh.p, layers / mesh.p, mesh.tensor_ranks()
        rows = config.splits["dense"].m.split()
        weights = sum(moves[axis] for axis in "xyz" if axis in moves and axis in rows)
        others = sum(moves.values()) - candidate.hidden - weights
        sequences = config.train.batch / (mesh.d * mesh.e * tensor)
        copies = prod(tensor_replicas(config, "n").values())  # replicas of some activations
        counts = layouts.microbatches(config, self.ranks)
        costs = self._sequence(mesh.c, parallel.context, parallel.ulysses)
        for micros in (count for count in counts if 2 * count >= stages or count == counts[-1]):
            chunks = max(chunks for _, chunks in layouts.schedules(stages, micros, layers))
            busy = sequences * (1 + (stages - 1) / (micros * chunks))
            moved = others + _GATHERED * weights * micros / stages
            waiting = min(stages, micros)
            for one in costs:
                saved = own * one.saved
                most = max(waiting * saved + one.layer_peak, saved + one.outer_peak)
                seconds = busy * (own * one.layer + one.outer) + moved
                yield micros, sequences * copies / micros * most, seconds

    def _zeros(self, candidate: Candidate) -> list[tuple[float, float, float]]:
        """Return (bytes, extra seconds, extra seconds per microbatch) for each ZeRO stage.

        The bytes are those of the parameters, gradients and optimizer state on a rank.
        """
        mesh, sizes = candidate.config.mesh, candidate.config.sizes()
        axes = {plane(data_axes(sizes)), plane(expert_data_axes(sizes))}
        seconds = sum(candidate.moves.get(axis, 0.0) for axis in axes)
        copies = prod(tensor_replicas(candidate.config, "m").values())
        tensor, replicas = mesh.tensor_ranks(), prod(sizes[axis] for axis in data_axes(sizes))
        share = (self.dense + (1 - self.dense) / mesh.e) * copies / (mesh.p * tensor)
        # ZeRO 2 reduces gradients once per microbatch; ZeRO 3 also gathers parameters.
        more = (0.0, 0.0), (-seconds / 2, seconds / 2), (-seconds, 1.5 * seconds)
        held = share * self.held.total()
        found = [(held, 0.0, 0.0)]
        for kind, times in zip(("optimizer", "gradient", "parameter"), more):
            held -= (1 - 1 / replicas) * share * self.held[kind]
            found.append((held, *times))
        return found if replicas > 1 else found[:1]

    def _measured(self, c: int, context: str, ulysses: int) -> list[SequenceCosts]:
        """Measure the SequenceCosts for each value of `parallel.recompute`, with c
        context-parallel ranks."""
        config, found = with_context(self.single_rank, c, context, ulysses), []
        for recompute in layouts.RECOMPUTE:
            parallel = replace(config.parallel, recompute=recompute)
            parts = self.costs.parts(replace(config, parallel=parallel))
            layer, first, last = parts.layer, parts.first, parts.last
            passes = layer.forward + layer.whole
            outer = first.forward + last.forward + last.whole + first.whole
            found.append(
                SequenceCosts(
                    passes.seconds - passes.waits.total(),
                    outer.seconds - outer.waits.total(),
                    layer.forward.left,
                    max(layer.forward.peak, layer.whole.peak) + parts.workspace,
                    outer.peak + parts.workspace,
                )
            )
        return found
