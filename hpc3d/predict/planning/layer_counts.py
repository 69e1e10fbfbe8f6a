"""Search for the number of layers per model chunk that minimizes the step time and fits in memory.

The embedding and the head take time and memory on the first and the last model chunk, so an even
partition is not optimal. All layers are assumed to be identical. A greedy algorithm assigns one
layer at a time to the least loaded stage with enough free memory, which minimizes the work of the
slowest stage. The search starts from this partition or the even one, whichever is faster, and
moves one layer at a time as long as the simulated step becomes shorter. If stage s takes f_s
seconds for a forward pass, b_s for a backward pass and w_s in total, a step of M microbatches
takes at least

    sum_{i<s} f_i + M w_s + sum_{i<s} b_i

for each s, without the last sum if the backward pass is split. With several chunks per stage, the
bound is M w_s. These bounds reject most moves without a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, permutations
from math import inf
from typing import NamedTuple

from hpc3d.pipeline.step_model import StepModel, reduced
from hpc3d.pipeline.timeline import Cost

# Costs relative to the simulation of one pass: building the simulator costs _BUILT per pass, and
# computing a lower bound costs _LOOK per model chunk.
_BUILT = 150
_LOOK = 3
_GAIN = 1e-9  # minimum relative improvement of the step time; larger than rounding errors


class LayerPipeline(NamedTuple):
    """Costs of a pipeline for any assignment of layers to model chunks.

    `model` is the StepModel of the pipeline's schedule.

    For one microbatch, `bare` lists the Cost of each model chunk without layers, and `layer` is
    the Cost of a layer. `sums(stage, layers)` returns the exposed time of gradient reductions in
    seconds. `held(stage, layers of each chunk)` returns the peak memory of a rank in bytes, which
    must not exceed `memory`.
    """

    model: StepModel
    bare: list[Cost]
    layer: Cost
    sums: Callable[[int, int], float]
    held: Callable[[int, tuple[int, ...]], float]
    memory: float = inf


class LayerCounts:
    """Search for the best number of layers in each model chunk.

    `passes` is the maximum number of passes to simulate, and `left` is the number that remains.
    """

    def __init__(self, pipeline: LayerPipeline, passes: int) -> None:
        self.pipeline, self.model, placement = pipeline, pipeline.model, pipeline.model.placement
        self.parts = range(placement.parts)
        self.passes = 4 * placement.parts * self.model.simulated_microbatches
        self.left = passes - _BUILT * self.passes
        self.bare, self.layer = [sum(each[:3]) for each in pipeline.bare], sum(pipeline.layer[:3])
        self.stage_of = [placement.location(part)[0] for part in self.parts]
        self.parts_of = [*map(placement.parts_of, range(placement.stages))]
        self.held, self.simulated = cache(pipeline.held), cache(self._simulated)

    def best(self, even: Sequence[int]) -> tuple[int, ...] | None:
        """Return the number of layers of each model chunk in the fastest partition found.

        Returns `None` if this is the `even` partition, if it does not fit in memory, or if the
        budget is too small.
        """
        if self.left <= 0:
            return None
        even = tuple(even)
        keys = {counts: self.key(counts) for counts in {even, *self.leveled(sum(even))}}
        found = self.descended(*min(keys.items(), key=lambda item: item[1]))
        return None if found == even or self.excess(found) else found

    def can_fit(self, layers: int) -> bool:
        """Return True if one of the greedy partitions of the layers fits in memory."""
        return not all(map(self.excess, self.leveled(layers)))

    def leveled(self, layers: int) -> list[tuple[int, ...]]:
        """Return two greedy partitions, which break ties between model chunks differently."""
        return [self.level(layers, order) for order in (self.parts, tuple(reversed(self.parts)))]

    def level(self, layers: int, order: Sequence[int]) -> tuple[int, ...]:
        """Return a greedy partition, which adds each layer to the stage with the least work.

        Stages that would exceed the memory limit are chosen last. Among equally loaded model
        chunks, the first one in `order` is chosen.
        """
        counts = [0] * len(self.parts)
        heights = [self.level_with(counts, part) for part in self.parts]
        for _ in range(layers):
            lowest = min(order, key=heights.__getitem__)
            counts[lowest] += 1
            for part in self.parts_of[self.stage_of[lowest]]:  # other stages are unchanged
                heights[part] = self.level_with(counts, part)
        return tuple(counts)

    def level_with(self, counts: list[int], part: int) -> tuple[float, float, float]:
        """Return the sort key for adding a layer to model chunk `part`.

        The key consists of three values after the layer has been added: the number of bytes above
        the stage's memory limit, the time of the stage per step in seconds, and the time of the
        model chunk per microbatch in seconds.
        """
        stage = self.stage_of[part]
        counts[part] += 1
        over, own = self.over(counts, stage), self.of(counts, part)
        work = sum(self.of(counts, other) for other in self.parts_of[stage])
        seconds = self.model.micros * work + self.sums(counts, stage)
        counts[part] -= 1
        return over, seconds, own

    def descended(self, counts: tuple[int, ...], key: tuple[float, float]) -> tuple[int, ...]:
        """Improve a partition by moving one layer at a time; return the final layer counts.

        `key` is the sort key of the initial partition `counts`.
        """
        better = True
        while better:
            better = False
            for giver, taker in permutations(self.parts, 2):
                if self.left <= 0:
                    return counts
                moved = [*counts]
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
                if moved[giver] < 0 or self.is_hopeless(moved, key):
                    continue
                other = self.key(moved)
                if other[0] < key[0] or (other[0] == key[0] and other[1] < (1 - _GAIN) * key[1]):
                    counts, key, better = tuple(moved), other, True
        return counts

    def is_hopeless(self, counts: Sequence[int], key: tuple[float, float]) -> bool:
        """Return True if partition `counts` cannot have a smaller sort key than `key`.

        The excess memory of the partition and a lower bound on its step time are compared with
        `key`.
        """
        excess, seconds = key
        self.left -= _LOOK * len(self.parts)
        more = self.excess(counts)
        return more > excess or (more == excess and self.least(counts) >= seconds)

    def key(self, counts: Sequence[int]) -> tuple[float, float]:
        """Return the sort key of a partition; smaller keys are better.

        The key consists of the number of bytes above the memory limit and the step time in
        seconds.
        """
        return self.excess(counts), self.seconds(counts)

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the simulated time, in seconds, from the first pass to the last gradient
        reduction."""
        self.left -= self.passes
        return self.simulated(tuple(counts))  # the last moves are tried again

    def _simulated(self, counts: tuple[int, ...]) -> float:
        pipeline, layer = self.pipeline, self.pipeline.layer
        costs = [
            Cost(*(one + count * each for one, each in zip(bare[:3], layer[:3])), bare.comm)
            for bare, count in zip(pipeline.bare, counts, strict=True)
        ]
        sums = [self.sums(counts, stage) for stage in range(self.model.stages)]
        return max(reduced(self.model.steady_ends(costs), sums))

    def least(self, counts: Sequence[int]) -> float:
        """Return a lower bound on the step time in seconds."""
        works = [self.model.micros * work for work in self.work(counts)]
        if self.model.chunks > 1:
            return max(works)
        layer, bare = self.pipeline.layer, self.pipeline.bare
        ways = [one.forward + count * layer.forward for one, count in zip(bare, counts)]
        if not self.model.schedule.splits_backward:
            ways = [self.of(counts, part) for part in self.parts]
        return max(work + way for work, way in zip(works, accumulate(ways, initial=0.0)))

    def work(self, counts: Sequence[int]) -> list[float]:
        """Return the compute time per microbatch on each stage, in seconds."""
        found = [0.0] * self.model.stages
        for part, stage in enumerate(self.stage_of):
            found[stage] += self.of(counts, part)
        return found

    def of(self, counts: Sequence[int], part: int) -> float:
        """Return the compute time per microbatch on model chunk `part`, in seconds."""
        return self.bare[part] + counts[part] * self.layer

    def excess(self, counts: Sequence[int]) -> float:
        """Return the number of bytes above the memory limit, summed over all stages."""
        return sum(self.over(counts, stage) for stage in range(self.model.stages))

    def over(self, counts: Sequence[int], stage: int) -> float:
        """Return the number of bytes by which a stage exceeds the memory limit, or 0."""
        return max(0.0, self.held(stage, self.chunks_of(counts, stage)) - self.pipeline.memory)

    def sums(self, counts: Sequence[int], stage: int) -> float:
        return self.pipeline.sums(stage, sum(self.chunks_of(counts, stage)))

    def chunks_of(self, counts: Sequence[int], stage: int) -> tuple[int, ...]:
        """Return the number of layers in each model chunk of a stage."""
        return tuple([counts[part] for part in self.parts_of[stage]])
