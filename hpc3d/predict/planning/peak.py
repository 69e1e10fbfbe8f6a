"""The memory of a step put together from the costs of its passes: what the fullest rank holds.

A stage goes through its schedule.  As a pass begins it holds the activations of the microbatches
and chunks that wait for their backward pass and what those between B and W keep, and on top of
that comes what the pass itself needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.schedule import find
from hpc3d.pipeline.step_model import kept_by_pass
from hpc3d.predict.planning.pass_costs import NOTHING, Pass

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.pass_costs import PartCosts, PassSeconds

_PASS = {"F": "forward", "B": "backward", "BW": "backward", "W": "weight"}


class StageWork(NamedTuple):
    """The passes of a part of the model on a microbatch."""

    forward: Pass
    backward: Pass
    weight: Pass


class StageContent(NamedTuple):
    """What a part of the model holds: so many layers, and which of the ends; where some layers
    have mixtures of experts, how many of these do."""

    layers: int
    first: bool
    last: bool
    mixtures: float = 0


def contents(config: Config) -> list[tuple[StageContent, ...]]:
    """The Content of every chunk of every stage."""
    parallel, v_shaped = config.parallel, find(config.parallel.schedule).v_shaped
    return _contents_of(
        Placement(config.mesh.p, parallel.chunks, v_shaped), *contents_in_order(config)
    )


def contents_in_order(config: Config) -> list[StageContent]:
    """The Content of every part, in the order of the model."""
    parts, every = config.layers(), config.model.moe_every
    last = len(parts) - 1
    return [
        StageContent(len(part), n == 0, n == last, _mixtures(part, every) if every > 1 else 0)
        for n, part in enumerate(parts)
    ]


def _mixtures(part: range, every: int) -> int:
    return part.stop // every - part.start // every


def even(config: Config) -> bool:
    """Whether the parts of a pipeline are alike but for its ends."""
    if config.parallel.layers_per_stage:
        return False
    every = config.model.moe_every
    return every == 1 or len({_mixtures(part, every) for part in config.layers()}) == 1


@cache
def _contents_of(place: Placement, *contents: StageContent) -> list[tuple[StageContent, ...]]:
    return [
        tuple(contents[place.part(stage, chunk)] for chunk in range(place.chunks))
        for stage in range(place.stages)
    ]


def buckets(gradient: float, megabytes: float) -> int:
    """How many buckets a gradient of so many bytes fills; one of no size has a tensor."""
    return ceil(gradient / max(1.0, 1e6 * megabytes))


@cache
def stage_content(chunks: tuple[StageContent, ...]) -> StageContent:
    """The Content of a stage."""
    layers, first, last, mixtures = zip(*chunks)
    return StageContent(sum(layers), any(first), any(last), sum(mixtures))


@cache
def work_of(parts: PartCosts, content: StageContent, split: bool) -> StageWork:
    """The StageWork of a Content on a microbatch, its backward pass in halves where it is
    `split`."""
    ends = [parts.first] * content.first, [parts.last] * content.last
    order, nothing = [*ends[0], *_layers_of(parts, content), *ends[1]], parts.layer * 0
    forward, back = sum(order, nothing).forward, sum(reversed(order), nothing)
    return StageWork(forward, *((back.backward, back.weight) if split else (back.whole, NOTHING)))


def _layers_of(parts: PartCosts, content: StageContent) -> list[PassSeconds]:
    """The layers of a Content, those with a mixture last."""
    if not parts.kinds:
        return [parts.layer * content.layers]
    dense, mixture = parts.kinds
    return [dense * (content.layers - content.mixtures), mixture * content.mixtures]


def working_bytes(
    config: Config,
    parts: PartCosts,
    chunks: Sequence[StageContent],
    number: int,
    gradient: float,
    sums: int,
    rest: int,
) -> dict[str, int]:
    """What the rank of stage `number`, of these `chunks`, holds at the worst moment beside its
    parameters, by kind.  `gradient` are the bytes of its gradients, `sums` and `rest` those that
    their sums and the update need."""
    parallel, stages = config.parallel, config.mesh.p
    split = find(parallel.schedule).splits_backward
    works = [work_of(parts, content, split) for content in chunks]
    blocks = parts.block * messages(stages, parallel.microbatches, number)
    moments = [*_moments_of(config, number, works, blocks), (0, rest)]
    layers = max(1, stage_content(chunks).layers)
    layer = parts.layer.weight if split else parts.layer.whole
    posts = min(layers, buckets(gradient, parallel.bucket_mb) or 1)
    early = sums * (1 - 1 / posts) if parallel.overlap else 0
    moments += [(0, sums), (parts.layer.forward.left, early + layer.peak + blocks)]
    held, passing = max(moments, key=sum)
    return {"activations in flight": int(held), "the running pass": int(passing)}


def messages(stages: int, micros: int, stage: int) -> int:
    """Blocks beside a pass: one to and one from each neighbour, as far as there are microbatches;
    on one stage its result."""
    neighbours = (stage > 0) + (stage < stages - 1)
    return 2 * min(neighbours, micros) or 1


def _moments_of(
    config: Config, number: int, works: Sequence[StageWork], blocks: int
) -> Iterator[tuple[int, int]]:
    """(the most bytes that wait as a pass begins, bytes of the pass at its peak), by kind."""
    forward = [work.forward.left for work in works]
    inputs = [work.forward.left + work.backward.left for work in works]
    parallel, stages = config.parallel, config.mesh.p
    sizes = stages, parallel.microbatches, parallel.chunks
    for (op, chunk), states in kept_by_pass(parallel.schedule, *sizes, number):
        held = (states @ np.array([*forward, *inputs])).max()
        yield held, getattr(works[chunk], _PASS[op]).peak + blocks
