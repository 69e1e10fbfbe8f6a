"""Limits on combinations of model, batch and mesh sizes.

Bounds on individual keys are in input_file.py. docs/limits.md lists and explains all limits.
This module uses only the standard library, because the parsers of all commands import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

INT32 = 2**31 - 1  # largest value of an int32 column in a trace
MOST_RANKS = 2**20
MOST_LAYERS = 10_000
MOST_PASSES = 2**18  # maximum number of forward passes in a schedule, which is held in memory
_MOST_ELEMENTS = 2**56  # maximum array size in elements, so that its size in bytes fits in int64
# Maximum number of steps, updates or sequences in a run, so that sums of them fit in int64.
MOST_COUNT = 2**53


def too_large(config: Any, products: Sequence[tuple[int, Any]]) -> Iterator[str]:
    """Yield a message if the mesh is too large, and a message for each array that is too large.

    `products` is a list of pairs (number of blocks, matrix product that each of them contains).
    """
    model, ranks = config.model, config.mesh.grid().size
    if ranks > MOST_RANKS:
        yield f"mesh: {ranks} ranks; use at most {MOST_RANKS}"
    rows = config.train.batch * model.sequence
    widest = max(*(each.experts * each.outputs for _, each in products), model.vocabulary or 0)
    if scores := not config.chunked():
        widest = max(widest, model.heads * model.sequence)
    arrays = {
        "model.layers x weights of a block": sum(count * each.weights for count, each in products),
        "model.hidden x (vocabulary + sequence)": model.hidden
        * ((model.vocabulary or 0) + model.sequence),
        "train.batch x model.sequence x the largest of layer width, vocabulary"
        + scores * " and heads x sequence": rows * widest,
    }
    for name, count in arrays.items():
        if count > _MOST_ELEMENTS:
            yield f"{name} = {count} exceeds {_MOST_ELEMENTS} elements; reduce one of these sizes"


def too_many_passes(parallel: Any, stages: int) -> Iterator[str]:
    passes = stages * parallel.microbatches * parallel.chunks
    if passes > MOST_PASSES:
        yield (
            f"parallel.microbatches = {parallel.microbatches}: {stages} stages x "
            f"{parallel.chunks} chunks need {passes} forward passes per step, more than "
            f"{MOST_PASSES}; use at most {MOST_PASSES // (stages * parallel.chunks)} microbatches"
        )
