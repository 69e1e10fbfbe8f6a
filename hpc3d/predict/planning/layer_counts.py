"""How many layers each part of a pipeline takes, so that the step is short and every stage fits.

The first part has the embedding and the last one the head, which take time and memory as well:
as many layers for every part are not what is shortest.  Layers are equal, so that given out one
at a time, each to the stage with least to do that has room, they make the heaviest stage as light
as it can be.  From there, and from even parts, single layers are moved as long as the step gets
shorter on the clock of its schedule.  With M microbatches, f_s, b_s and w_s seconds of stage s
forward, backward and in all, a step lasts at least

    sum_{i<s} f_i + M w_s + sum_{i<s} b_i

without the last sum where W may follow B, and with chunks M w_s alone; this tells of most moves
that the clock need not be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, permutations
from math import inf
from typing import NamedTuple

from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.schedule import find
from hpc3d.pipeline.step_model import simulated_microbatches, steady_ends
from hpc3d.pipeline.timeline import Cost

_BUILT = 150  # times as long as a pass on the clock takes one of a clock that is made
_LOOK = 3  # passes on the clock take as long as a part of a partition that is looked at
_GAIN = 1e-9  # of a step: what is less is rounding


class LayerPipeline(NamedTuple):
    """What layers are given out to: a schedule of so many stages, microbatches and chunks.

    `bare` are the costs of each part without layers, `layer` those of a layer, both for a
    microbatch; a stage ends its sums `sums(layers)` seconds after its passes.  `held(stage,
    layers of its chunks)` are the bytes of a rank, and no more than `memory` fit.
    """

    schedule: str
    stages: int
    micros: int
    chunks: int
    bare: list[Cost]
    layer: Cost
    sums: Callable[[int, int], float]
    held: Callable[[int, tuple[int, ...]], float]
    memory: float = inf


class LayerCounts:
    """The search for the layers of each part, in the order of the model.

    It ends after so many `passes` on the clock; `left` are those that it did not need.
    """

    def __init__(self, pipeline: LayerPipeline, passes: int) -> None:
        self.pipeline, schedule = pipeline, find(pipeline.schedule)
        self.place = Placement(pipeline.stages, pipeline.chunks, schedule.v_shaped)
        self.splits, self.parts = schedule.splits_backward, range(self.place.parts)
        self.passes = (
            4 * self.place.parts * simulated_microbatches(pipeline.stages, pipeline.micros)
        )
        self.left = passes - _BUILT * self.passes
        self.bare, self.layer = [sum(each[:3]) for each in pipeline.bare], sum(pipeline.layer[:3])
        self.stage_of = [self.place.place(part)[0] for part in self.parts]
        chunks = range(pipeline.chunks)
        self.parts_of = [
            [self.place.part(stage, chunk) for chunk in chunks] for stage in range(pipeline.stages)
        ]
        self.held = cache(pipeline.held)

    def best(self, even: Sequence[int]) -> tuple[int, ...] | None:
        """The layers of each part in the shortest step that was found; None where `even` parts are
        as good, where nothing that was found fits, or where the passes are too few."""
        if self.left <= 0:
            return None
        even = tuple(even)
        backwards = tuple(reversed(self.parts))
        starts = {even, self.level(sum(even), self.parts), self.level(sum(even), backwards)}
        keys = {counts: self.key(counts) for counts in starts}
        found = self.descended(*min(keys.items(), key=lambda item: item[1]))
        return None if found == even or self.excess(found) else found

    def level(self, layers: int, order: Sequence[int]) -> tuple[int, ...]:
        """Layers given out one at a time to the lightest stage that has room, and of equal ones to
        the first in `order`."""
        counts = [0] * len(self.parts)
        heights = [self.level_with(counts, part) for part in self.parts]
        for _ in range(layers):
            lowest = min(order, key=heights.__getitem__)
            counts[lowest] += 1
            for part in self.parts_of[self.stage_of[lowest]]:  # no other stage has changed
                heights[part] = self.level_with(counts, part)
        return tuple(counts)

    def level_with(self, counts: list[int], part: int) -> tuple[float, float, float]:
        """By which bytes a stage is too full with a layer more on a part, and the seconds of all
        its passes and of those of the part."""
        stage = self.stage_of[part]
        counts[part] += 1
        over, own = self.over(counts, stage), self.of(counts, part)
        work = sum(self.of(counts, other) for other in self.parts_of[stage])
        seconds = self.pipeline.micros * work + self.sums(counts, stage)
        counts[part] -= 1
        return over, seconds, own

    def descended(self, counts: tuple[int, ...], key: tuple[float, float]) -> tuple[int, ...]:
        """The counts from which no move of one layer leads to something better."""
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
        """Whether counts cannot be better than those with a key."""
        excess, seconds = key
        self.left -= _LOOK * len(self.parts)
        more = self.excess(counts)
        return more > excess or (more == excess and self.least(counts) >= seconds)

    def key(self, counts: Sequence[int]) -> tuple[float, float]:
        """(bytes above the memory, seconds of the step): what is smaller is better."""
        return self.excess(counts), self.seconds(counts)

    def seconds(self, counts: Sequence[int]) -> float:
        """Those of a step, from its first pass to the end of its sums, on the clock."""
        pipeline, layer = self.pipeline, self.pipeline.layer
        self.left -= self.passes
        costs = [
            Cost(*(one + count * each for one, each in zip(bare[:3], layer[:3])), bare.comm)
            for bare, count in zip(pipeline.bare, counts, strict=True)
        ]
        ends = steady_ends(
            pipeline.schedule, pipeline.stages, pipeline.micros, pipeline.chunks, costs
        )
        return max(end + self.sums(counts, stage) for stage, end in enumerate(ends))

    def least(self, counts: Sequence[int]) -> float:
        """The seconds of a step at least."""
        works = [self.pipeline.micros * work for work in self.work(counts)]
        if self.pipeline.chunks > 1:
            return max(works)
        layer, bare = self.pipeline.layer, self.pipeline.bare
        ways = [one.forward + count * layer.forward for one, count in zip(bare, counts)]
        if not self.splits:
            ways = [self.of(counts, part) for part in self.parts]
        return max(work + way for work, way in zip(works, accumulate(ways, initial=0.0)))

    def work(self, counts: Sequence[int]) -> list[float]:
        """Seconds of a microbatch on each stage."""
        found = [0.0] * self.pipeline.stages
        for part, stage in enumerate(self.stage_of):
            found[stage] += self.of(counts, part)
        return found

    def of(self, counts: Sequence[int], part: int) -> float:
        """Seconds of a microbatch on a part."""
        return self.bare[part] + counts[part] * self.layer

    def excess(self, counts: Sequence[int]) -> float:
        """Bytes above the memory, of all stages together."""
        return sum(self.over(counts, stage) for stage in range(self.pipeline.stages))

    def over(self, counts: Sequence[int], stage: int) -> float:
        """Bytes of a stage above the memory."""
        return max(0.0, self.held(stage, self.chunks_of(counts, stage)) - self.pipeline.memory)

    def sums(self, counts: Sequence[int], stage: int) -> float:
        return self.pipeline.sums(stage, sum(self.chunks_of(counts, stage)))

    def chunks_of(self, counts: Sequence[int], stage: int) -> tuple[int, ...]:
        """The layers of each chunk of a stage."""
        return tuple([counts[part] for part in self.parts_of[stage]])
