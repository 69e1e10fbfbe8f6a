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

# Ratio of communication along x, y and z to its minimum.  Layouts that are short of memory gather
# or recompute the blocks of the forward pass in the backward pass.
_REPEATED = 1.5
_SEVERAL = 4  # sequences in a second measurement, used to isolate the kernel launch time


class SequenceCosts(NamedTuple):
    """Costs without tensor parallelism, for a value of `parallel.recompute`.

    `layer` (a layer) and `ends` (the embedding and the head) give the time of a forward and a
    backward pass as (seconds per microbatch, seconds per sequence). `saved` is the size in bytes
    of a layer's saved activations per sequence. `layer_peak` and `ends_peak` are the peak memory
    of the passes, in bytes per sequence.
    """

    layer: tuple[float, float]
    ends: tuple[float, float]
    saved: int
    layer_peak: int
    ends_peak: int


class ExpectedSteps:
    """Expected step times of layouts of `base` on `ranks` ranks with `memory` bytes each."""

    def __init__(self, base: Config, ranks: int, memory: float, costs: CostTable) -> None:
        self.ranks, self.memory, self.costs = ranks, memory, costs
        self.alone = replace(base, mesh=MeshConfig(x=1, y=1, z=1))
        layers, every = base.model.layers, base.model.moe_every
        stage = StageContent(layers, True, True, layers // every if every > 1 else 0)
        self.held = costs.held(self.alone, stage)
        (_, dense), (_, experts) = summed(self.alone)
        self.dense = dense / (dense + experts)
        self._sequence = cache(self._measured)

    def of(self, candidate: Candidate) -> tuple[float, float]:
        """Return the bytes by which a candidate exceeds the memory limit, and its step time in s.

        Both values are for the best number of microbatches, ZeRO stage and recomputation option.
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
        """Yield (number of microbatches, peak bytes, seconds) of the passes of a step."""
        config, moves = candidate.config, candidate.moves
        mesh, parallel, layers = config.mesh, config.parallel, config.model.layers
        stages, own = mesh.p, layers / mesh.p
        shown = sum(moves.get(axis, 0.0) for axis in ("p", CONTEXT, EXPERTS)) - candidate.hidden
        counts = layouts.microbatches(config, self.ranks)
        once, again = self._gathers(candidate, counts[-1])
        for micros in (count for count in counts if 2 * count >= stages or count == counts[-1]):
            share = config.train.batch / (mesh.d * mesh.e * micros * mesh.x * mesh.y * mesh.z)
            chunks = max(chunks for _, chunks in layouts.schedules(stages, micros, layers))
            fill = 1 + (stages - 1) / (micros * chunks)
            moved = _REPEATED * (once + micros * again) + shown
            for one in self._sequence(mesh.c, parallel.context, parallel.ulysses):
                layer, ends = (each[0] + share * each[1] for each in (one.layer, one.ends))
                busy = micros * (own * layer + ends)
                saved = own * one.saved
                first = min(stages, micros) * saved + one.layer_peak
                yield micros, share * max(first, saved + one.ends_peak), fill * busy + moved

    def _gathers(self, candidate: Candidate, most: int) -> tuple[float, float]:
        """Return two communication times along x, y and z in seconds: a fixed time per step, and
        the additional time per microbatch.

        They are computed from the communication volumes with the fewest and `most` microbatches.
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
        config = with_context(self.alone, c, context, ulysses)
        return [self._costs_with(config, recompute) for recompute in RECOMPUTE]

    def _costs_with(self, config: Config, recompute: str) -> SequenceCosts:
        parallel, times = replace(config.parallel, recompute=recompute), []
        for sequences in (_SEVERAL, 1):
            train = replace(config.train, batch=sequences)
            parts = self.costs.parts(replace(config, parallel=parallel, train=train))
            layer, first, last = parts.layer, parts.first, parts.last
            ends = first.forward + last.forward + last.whole + first.whole
            passes = layer.forward + layer.whole, ends
            times.append([each.seconds - each.waits.total() for each in passes])
        slopes = [(several - one) / (_SEVERAL - 1) for several, one in zip(*times)]
        lines = [(one - slope, slope) for one, slope in zip(times[1], slopes)]
        peak = max(layer.forward.peak, layer.whole.peak)
        return SequenceCosts(*lines, layer.forward.left, peak, ends.peak)
