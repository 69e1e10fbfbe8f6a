"""Expected step times of candidates, which set the order in which a search times them.

The lower bounds assume unlimited memory. With a limit, candidates recompute activations, run more
microbatches or use a higher ZeRO stage, so step times of candidates with equal bounds differ by
several times. This model scales the costs of a sequence on one rank to each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.mesh import CONTEXT, EXPERTS, data_axes, expert_data_axes, plane
from hpc3d.config.input_file import MeshConfig
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.bounds import summed, volumes
from hpc3d.predict.planning.candidates import RECOMPUTE
from hpc3d.predict.planning.contexts import with_context
from hpc3d.predict.planning.pass_costs import StageContent

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.cost_table import CostTable

# Communication along x, y and z relative to its minimum: layouts that are short of memory gather
# or recompute the blocks of the forward pass in the backward pass.
_REPEATED = 1.5


class SequenceCosts(NamedTuple):
    """Costs of a sequence without tensor parallelism, for a value of `parallel.recompute`.

    `layer` and `ends` are the times in seconds of the forward and backward pass of a layer, and
    of the embedding and the head. A layer saves activations of `saved` bytes. `layer_peak` and
    `ends_peak` are the peaks of the passes in bytes.
    """

    layer: float
    ends: float
    saved: int
    layer_peak: int
    ends_peak: int


class ExpectedSteps:
    """Expected steps of the layouts of `base` on `ranks` ranks with `memory` bytes each.

    `launches` is the time in seconds of the kernel launches of a layer for a microbatch.
    """

    def __init__(
        self, base: Config, ranks: int, memory: float, costs: CostTable, launches: float
    ) -> None:
        self.ranks, self.memory, self.costs, self.launches = ranks, memory, costs, launches
        self.alone = replace(
            base, mesh=MeshConfig(x=1, y=1, z=1), train=replace(base.train, batch=1)
        )
        layers, every = base.model.layers, base.model.moe_every
        stage = StageContent(layers, True, True, layers // every if every > 1 else 0)
        self.held = costs.held(self.alone, stage)
        (_, dense), (_, experts) = summed(self.alone)
        self.dense = dense / (dense + experts)
        self._sequence = cache(self._measured)

    def of(self, candidate: Candidate) -> tuple[float, float]:
        """Return the bytes by which a candidate exceeds the memory, and its step time in seconds.

        They are those of the best number of microbatches, ZeRO stage and recomputation.
        """
        best, sums = (inf, inf), self._sums(candidate)
        for micros, needed, seconds in self._passes(candidate):
            for zero, held, reduction in sums:
                # ZeRO 2 reduces the gradients of each microbatch; ZeRO 3 also gathers parameters.
                rounds = (1, 1, (1 + micros) / 2, 1.5 * micros)[zero]
                excess = max(0.0, held + needed - self.memory)
                best = min(best, (excess, seconds + rounds * reduction))
        return best

    def _passes(self, candidate: Candidate) -> Iterator[tuple[int, float, float]]:
        """Yield (number of microbatches, bytes, seconds) of the passes of a step."""
        config, moves = candidate.config, candidate.moves
        mesh, parallel, layers = config.mesh, config.parallel, config.model.layers
        stages, own = mesh.p, layers / mesh.p
        shown = sum(moves.get(axis, 0.0) for axis in ("p", CONTEXT, EXPERTS)) - candidate.hidden
        counts = layouts.microbatches(config, self.ranks)
        once, each = self._gathers(candidate, counts[-1])
        for micros in (count for count in counts if 2 * count >= stages or count == counts[-1]):
            share = config.train.batch / (mesh.d * mesh.e * micros * mesh.x * mesh.y * mesh.z)
            chunks = max(chunks for _, chunks in layouts.schedules(stages, micros, layers))
            fill = 1 + (stages - 1) / (micros * chunks)
            moved = _REPEATED * (once + micros * each) + shown
            for one in self._sequence(mesh.c, parallel.context, parallel.ulysses):
                layer = self.launches + share * one.layer
                busy = micros * (own * layer + share * one.ends)
                saved = own * one.saved
                first = min(stages, micros) * saved + one.layer_peak
                yield micros, share * max(first, saved + one.ends_peak), fill * busy + moved

    def _gathers(self, candidate: Candidate, most: int) -> tuple[float, float]:
        """Return the communication times along x, y and z in seconds: those of a step that do not
        depend on the number of microbatches, and those of each microbatch.

        The numbers of elements with the fewest and with `most` microbatches determine both.
        """
        config, moves, few = candidate.config, candidate.moves, candidate.config.mesh.p
        axes = [axis for axis in "xyz" if axis in moves]
        seconds = sum(moves[axis] for axis in axes)
        if most == few or not axes:
            return seconds, 0.0
        known, found = volumes(config), volumes(config, most)
        more = sum(moves[axis] * (found[axis] / known[axis] - 1) for axis in axes)
        return seconds - few * more / (most - few), more / (most - few)

    def _sums(self, candidate: Candidate) -> list[tuple[int, float, float]]:
        """Return (ZeRO stage, bytes of parameters, gradients and optimizer state, seconds of a
        gradient reduction) for every ZeRO stage."""
        mesh, sizes = candidate.config.mesh, candidate.config.mesh.sizes()
        axes = {plane(data_axes(sizes)), plane(expert_data_axes(sizes))}
        seconds = sum(candidate.moves.get(axis, 0.0) for axis in axes)
        share = (self.dense + (1 - self.dense) / mesh.e) / (mesh.p * mesh.x * mesh.y * mesh.z)
        found, held, replicas = [], share * self.held.total(), mesh.replicas()
        for zero, kind in enumerate(("", "optimizer", "gradient", "parameter")):
            held -= (1 - 1 / replicas) * share * self.held[kind]
            found.append((zero, held, seconds))
        return found if replicas > 1 else found[:1]

    def _measured(self, c: int, context: str, ulysses: int) -> list[SequenceCosts]:
        """Measure the SequenceCosts on c context-parallel ranks for each value of recompute."""
        config, found = with_context(self.alone, c, context, ulysses), []
        for recompute in RECOMPUTE:
            parallel = replace(config.parallel, recompute=recompute)
            parts = self.costs.parts(replace(config, parallel=parallel))
            layer, first, last = parts.layer, parts.first, parts.last
            passes = layer.forward + layer.whole
            ends = first.forward + last.forward + last.whole + first.whole
            found.append(
                SequenceCosts(
                    passes.seconds - passes.waits.total() - self.launches,
                    ends.seconds - ends.waits.total(),
                    layer.forward.left,
                    max(layer.forward.peak, layer.whole.peak),
                    ends.peak,
                )
            )
        return found
