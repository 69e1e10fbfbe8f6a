"""Peak memory of the rank with the highest peak, computed from the costs of a step's passes.

When a pass begins, a stage holds the saved activations of all microbatches and chunks that wait
for their backward pass. If the backward pass is split, the stage also holds the tensors saved
between its two halves. The peak memory of the pass itself is added to the size of this data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.pipeline.gradient_buckets import UNITS_IN_FLIGHT
from hpc3d.pipeline.schedule_bound import StageMemory
from hpc3d.pipeline.step_model import PAIR, step_model
from hpc3d.predict.planning.pass_costs import NOTHING, Pass, StageContent

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.instruction import Placement
    from hpc3d.pipeline.step_model import StepModel
    from hpc3d.predict.planning.cost_table import CostTable
    from hpc3d.predict.planning.pass_costs import LayerSample, PartCosts, PassSeconds

_PASS = {"F": 0, "B": 1, "BW": 1, "W": 2}  # index of each pass in a StageWork


class StageWork(NamedTuple):
    """Costs of the passes of one microbatch on a model chunk or stage."""

    forward: Pass
    backward: Pass
    weight: Pass


def model_of(config: Config) -> StepModel:
    """Return the StepModel for the schedule and sizes of a layout."""
    parallel = config.parallel
    return step_model(parallel.schedule, config.mesh.p, parallel.microbatches, parallel.chunks)


def contents(config: Config) -> list[tuple[StageContent, ...]]:
    """Return one tuple per stage, with the StageContent of each of its model chunks."""
    parts, every = tuple(config.layers()), config.model.moe_every
    return _contents_of(model_of(config).placement, parts, every)


def contents_in_order(config: Config) -> list[StageContent]:
    """Return the StageContent of every model chunk, in model order."""
    return _contents_in_order(tuple(config.layers()), config.model.moe_every)


@cache
def _contents_in_order(parts: tuple[range, ...], every: int) -> list[StageContent]:
    last = len(parts) - 1
    return [
        StageContent(len(part), n == 0, n == last, _mixtures(part, every) if every > 1 else 0)
        for n, part in enumerate(parts)
    ]


def _mixtures(part: range, every: int) -> int:
    return part.stop // every - part.start // every


def even(config: Config) -> bool:
    """Return True if all model chunks are identical except for the embedding and the head."""
    if config.parallel.layers_per_stage:
        return False
    every = config.model.moe_every
    return every == 1 or len({_mixtures(part, every) for part in config.layers()}) == 1


@cache
def _contents_of(
    placement: Placement, parts: tuple[range, ...], every: int
) -> list[tuple[StageContent, ...]]:
    contents = _contents_in_order(parts, every)
    return [
        tuple(contents[part] for part in placement.parts_of(stage))
        for stage in range(placement.stages)
    ]


def buckets(gradient: float, size: float) -> int:
    """Return the number of buckets of `size` bytes required for `gradient` bytes of gradients.

    A bucket size of 0, which selects one bucket per tensor, is treated as 1 byte.
    """
    return ceil(gradient / max(1.0, size))


@cache
def stage_content(chunks: tuple[StageContent, ...]) -> StageContent:
    """Return the StageContent of a stage with the given model chunks."""
    layers, first, last, mixtures = zip(*chunks)
    return StageContent(sum(layers), any(first), any(last), sum(mixtures))


@cache
def work_of(parts: PartCosts, content: StageContent, split: bool) -> StageWork:
    """Return the costs of a microbatch's passes on a stage with the given content.

    If `split` is true, the backward pass is split into input and weight gradients.
    """
    forward, back = _passes_of(parts, content)
    return StageWork(forward, *((back.backward, back.weight) if split else (back.whole, NOTHING)))


@cache
def _passes_of(parts: PartCosts, content: StageContent) -> tuple[Pass, PassSeconds]:
    """Return the costs of the forward pass and of the backward passes."""
    ends = [parts.first] * content.first, [parts.last] * content.last
    order, nothing = [*ends[0], *_layers_of(parts, content), *ends[1]], parts.layer * 0
    return sum(order, nothing).forward, sum(reversed(order), nothing)


def _layers_of(parts: PartCosts, content: StageContent) -> list[PassSeconds]:
    if not parts.kinds:
        return [parts.layer * content.layers]
    dense, mixture = parts.kinds
    return [dense * (content.layers - content.mixtures), mixture * content.mixtures]


def fullest(
    costs: CostTable,
    config: Config,
    parts: PartCosts,
    chunks: Sequence[Sequence[StageContent]],
    sums: Pass,
    rest: Pass,
) -> tuple[int, dict[str, int]]:
    """Return the index of the stage with the highest peak memory, and its peak by memory kind.

    `chunks` lists the contents of each stage's model chunks. `sums` and `rest` are the costs of a
    layer's gradient reductions and of its optimizer update. All sizes are in bytes.
    """
    last, sample = len(chunks) - 1, costs.sample(config, config.parallel.zero)
    numbers = {0, min(1, last), max(0, last - 1), last} if even(config) else range(last + 1)
    found = {
        number: stage_bytes(sample, config, parts, chunks[number], number, sums, rest)
        for number in numbers
    }
    stage = max(found, key=lambda number: found[number].total())
    return stage, dict(found[stage])


def stage_bytes(
    sample: LayerSample,
    config: Config,
    parts: PartCosts,
    chunks: Sequence[StageContent],
    number: int,
    sums: Pass,
    rest: Pass,
) -> Counter:
    """Return the peak memory of a rank on stage `number`, as a dict from memory kind to bytes.

    `chunks` lists the contents of the stage's model chunks. `sums` and `rest` are the costs of a
    layer's gradient reductions and of its optimizer update.
    """
    parallel, model, content = config.parallel, model_of(config), stage_content(chunks)
    held, layer = sample.held_by(content), sample.layer_gradient
    times, ahead = held["gradient"] / layer, max(1.0, 2 * parallel.bucket_bytes / layer)
    split, blocks = model.schedule.splits_backward, parts.block * _blocks(model, number)
    works = [work_of(parts, each, split) for each in chunks]
    forward = [work.forward.left for work in works]
    inputs = [work.forward.left + work.backward.left for work in works]
    moments = model.held(number, forward, inputs, pairs=parallel.overlap_experts)
    kinds = {kind for kind, _ in moments}
    fused = split and any([op in ("BW", PAIR) for op, _ in kinds])
    wholes = [work_of(parts, each, False) for each in chunks] if fused else works
    peaks = _peaks(chunks, works, wholes, kinds)
    moments = [(saved, peaks[kind] + blocks) for kind, saved in moments]
    # The update, or the start of the next forward pass, holds at most two gathered buckets.
    # Gradient reductions overlap with the last backward pass.
    early, most = _reduced(sample, config, content)
    backward = parts.layer.weight if split else parts.layer.whole
    remaining = max(1, content.layers - early * len(sample.layers.layers))
    moments += [(0, min(times, ahead) * rest.peak), (0, most * sums.peak)]
    moments += [(remaining * parts.layer.forward.left, early * sums.peak + backward.peak + blocks)]
    saved, passing = max(moments, key=sum)
    if parallel.sync == "stale":
        passing += _part_in_flight(config, held["gradient"]) * times * rest.left
    passes = {"activations in flight": int(saved), "the running pass": int(passing)}
    return held + Counter(passes | {"workspace": parts.workspace})


def _part_in_flight(config: Config, gradient: float) -> float:
    """Return the largest part of a stale agreement that is in flight in a step.

    The gradients of the rank have `gradient` bytes.
    """
    count, every = buckets(gradient, config.parallel.bucket_bytes), config.parallel.local_steps
    return min(1.0, (max(1.0, count / max(1, every)) + 1) / max(1, count))


def _peaks(
    chunks: Sequence[StageContent],
    works: Sequence[StageWork],
    wholes: Sequence[StageWork],
    kinds: Iterable[tuple[str, int]],
) -> dict[tuple[str, int], float]:
    """Return the peak memory of each pass or pair of passes, by its kind (op, chunk)."""
    return {
        (op, chunk): _pair_peak(chunks, works, wholes, chunk)
        if op == PAIR
        else (wholes if op == "BW" else works)[chunk][_PASS[op]].peak
        for op, chunk in kinds
    }


def _pair_peak(
    chunks: Sequence[StageContent],
    works: Sequence[StageWork],
    wholes: Sequence[StageWork],
    chunk: int,
) -> float:
    """Return the peak memory of a pair of passes, of which the forward pass is that of `chunk`.

    When the forward pass saves the activations of a mixture of experts, the backward pass, which
    is that of the other chunk, frees those of another one.
    """
    forward, mixtures = works[chunk].forward, chunks[chunk].mixtures or chunks[chunk].layers
    freed = forward.left * (1 - 1 / max(1, mixtures))
    return forward.peak - freed + wholes[1 - chunk].backward.peak


def stage_memory(
    sample: LayerSample, config: Config, parts: PartCosts, stage: int, memory: float
) -> StageMemory:
    """Return the size and the limit of the saved data on a stage with one model chunk.

    The backward pass must be split. A rank has `memory` bytes.
    """
    (content,) = contents(config)[stage]
    work = work_of(parts, content, True)
    saved = max(0, work.forward.left)
    # The saved data of a forward pass counts from the start of the pass.
    passing = max(work.forward.peak - saved, work.backward.peak, work.weight.peak)
    passing += parts.block * _blocks(model_of(config), stage)
    fixed = sample.held_by(content).total() + parts.workspace + passing
    return StageMemory(saved, max(0, saved + work.backward.left), memory - fixed)


def _reduced(sample: LayerSample, config: Config, content: StageContent) -> tuple[float, float]:
    """Return the size of the gradients that are being reduced, relative to the sample layers.

    The first size is the maximum during a backward pass, and the second one the maximum after it.
    The reductions of at most UNITS_IN_FLIGHT layers, of as many buckets, or of one of several
    chunks are in flight. The gradients of the embedding and the head may be added after the pass.
    """
    gradient, layer = sample.held_by(content)["gradient"], sample.layer_gradient
    parallel, unit = config.parallel, layer / len(sample.layers.layers)
    flying = UNITS_IN_FLIGHT * max(unit, parallel.bucket_bytes)
    if parallel.chunks > 1:
        flying = max(flying, gradient / parallel.chunks)
    posts = min(max(1, content.layers), buckets(gradient, parallel.bucket_bytes) or 1)
    early = min(flying, gradient * (1 - 1 / posts)) if parallel.overlap else 0.0
    most = min(gradient, flying + max(0.0, gradient - content.layers * unit))
    return early / layer, most / layer


def _blocks(model: StepModel, stage: int) -> int:
    """Return the number of message blocks in memory during a pass.

    A stage holds a sent and a received block for each neighboring stage, or for only one of its
    neighbors if a step has a single microbatch. A stage without neighbors holds one block, which
    is its result.
    """
    neighbors = (stage > 0) + (stage < model.stages - 1)
    return 2 * min(neighbors, model.micros) or 1
