"""Search for the number of layers per pipeline part with the shortest step that fits in memory.

The embedding and the head take time and memory on the first and last part, so an even partition is
not the fastest. Layers are identical. A greedy assignment, one layer at a time to the stage with
the least work that has memory left, minimizes the work of the heaviest stage. From there, and from
the even partition, the search moves single layers as long as the schedule simulator finds a
shorter step. For M microbatches and f_s, b_s and w_s seconds of stage s forward, backward and in
total, the step time has the lower bound

    sum_{i<s} f_i + M w_s + sum_{i<s} b_i

for each s, without the last sum if W may follow B. With chunks, the bound is M w_s. It rejects
most moves without a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, permutations
from math import inf
from typing import NamedTuple

from hpc3d.pipeline.step_model import StepModel, reduced
from hpc3d.pipeline.timeline import Cost

# Costs in units of a simulated pass: of a pass when the simulator is built, and of a part of the
# model when a partition is checked.
_BUILT = 150
_LOOK = 3
_GAIN = 1e-9  # relative gain of a step above rounding errors


class LayerPipeline(NamedTuple):
    """Pipeline to which layers are assigned, with the StepModel of its schedule.

    `bare` has the costs of each part without layers and `layer` those of a layer, both for one
    microbatch. A stage ends its gradient reductions `sums(stage, layers)` seconds after its
    passes. `held(stage, layers of its chunks)` is the bytes of a rank, at most `memory`.
    """

    model: StepModel
    bare: list[Cost]
    layer: Cost
    sums: Callable[[int, int], float]
    held: Callable[[int, tuple[int, ...]], float]
    memory: float = inf


class LayerCounts:
    """Search for the number of layers of each part, in the order of the model.

    `passes` is the budget of simulated passes, and `left` its unused rest.
    """

    def __init__(self, pipeline: LayerPipeline, passes: int) -> None:
        self.pipeline, self.model, placement = pipeline, pipeline.model, pipeline.model.placement
        self.parts = range(placement.parts)
        self.passes = 4 * placement.parts * self.model.simulated_microbatches
        self.left = passes - _BUILT * self.passes
        self.bare, self.layer = [sum(each[:3]) for each in pipeline.bare], sum(pipeline.layer[:3])
        self.stage_of = [placement.location(part)[0] for part in self.parts]
        self.parts_of = [*map(placement.parts_of, range(placement.stages))]
        self.held = cache(pipeline.held)

    def best(self, even: Sequence[int]) -> tuple[int, ...] | None:
        """Return the layers of each part in the fastest partition found.

        Returns None if the `even` partition is as fast, if no partition found fits in memory, or
        if the budget is too small.
        """
        if self.left <= 0:
            return None
        even = tuple(even)
        backwards = tuple(reversed(self.parts))
        starts = {even, self.level(sum(even), self.parts), self.level(sum(even), backwards)}
        keys = {counts: self.key(counts) for counts in starts}
        found = self.descended(*min(keys.items(), key=lambda item: item[1]))
        return None if found == even or self.excess(found) else found

    def level(self, layers: int, order: Sequence[int]) -> tuple[int, ...]:
        """Return a greedy partition: each layer goes to the lightest stage that has memory left.

        Ties go to the first part in `order`.
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
        """Return the sort key of adding a layer to a part.

        The key has the bytes by which the stage exceeds the memory, the seconds of all its passes,
        and the seconds of the part.
        """
        stage = self.stage_of[part]
        counts[part] += 1
        over, own = self.over(counts, stage), self.of(counts, part)
        work = sum(self.of(counts, other) for other in self.parts_of[stage])
        seconds = self.model.micros * work + self.sums(counts, stage)
        counts[part] -= 1
        return over, seconds, own

    def descended(self, counts: tuple[int, ...], key: tuple[float, float]) -> tuple[int, ...]:
        """Return the counts that no move of a single layer improves."""
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
        """Return True if counts cannot be better than those with `key`."""
        excess, seconds = key
        self.left -= _LOOK * len(self.parts)
        more = self.excess(counts)
        return more > excess or (more == excess and self.least(counts) >= seconds)

    def key(self, counts: Sequence[int]) -> tuple[float, float]:
        """Return (bytes above the memory, seconds of the step); smaller is better."""
        return self.excess(counts), self.seconds(counts)

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the simulated seconds of a step, from its first pass to its last reduction."""
        pipeline, layer = self.pipeline, self.pipeline.layer
        self.left -= self.passes
        costs = [
            Cost(*(one + count * each for one, each in zip(bare[:3], layer[:3])), bare.comm)
            for bare, count in zip(pipeline.bare, counts, strict=True)
        ]
        sums = [self.sums(counts, stage) for stage in range(self.model.stages)]
        return max(reduced(self.model.steady_ends(costs), sums))

    def least(self, counts: Sequence[int]) -> float:
        """Return a lower bound on the seconds of a step."""
        works = [self.model.micros * work for work in self.work(counts)]
        if self.model.chunks > 1:
            return max(works)
        layer, bare = self.pipeline.layer, self.pipeline.bare
        ways = [one.forward + count * layer.forward for one, count in zip(bare, counts)]
        if not self.model.schedule.splits_backward:
            ways = [self.of(counts, part) for part in self.parts]
        return max(work + way for work, way in zip(works, accumulate(ways, initial=0.0)))

    def work(self, counts: Sequence[int]) -> list[float]:
        """Return the seconds of a microbatch on each stage."""
        found = [0.0] * self.model.stages
        for part, stage in enumerate(self.stage_of):
            found[stage] += self.of(counts, part)
        return found

    def of(self, counts: Sequence[int], part: int) -> float:
        """Return the seconds of a microbatch on a part."""
        return self.bare[part] + counts[part] * self.layer

    def excess(self, counts: Sequence[int]) -> float:
        """Return the bytes above the memory, summed over stages."""
        return sum(self.over(counts, stage) for stage in range(self.model.stages))

    def over(self, counts: Sequence[int], stage: int) -> float:
        """Return the bytes of a stage above the memory."""
        return max(0.0, self.held(stage, self.chunks_of(counts, stage)) - self.pipeline.memory)

    def sums(self, counts: Sequence[int], stage: int) -> float:
        return self.pipeline.sums(stage, sum(self.chunks_of(counts, stage)))

    def chunks_of(self, counts: Sequence[int], stage: int) -> tuple[int, ...]:
        """Return the layers of each chunk of a stage."""
        return tuple([counts[part] for part in self.parts_of[stage]])
