"""Limits of sizes together; config/input_file.py has the bounds of single keys, and
docs/limits.md the table and the reasons.

Only the standard library: every command reads this before it starts anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

INT32 = 2**31 - 1  # of the columns of a trace
MOST_RANKS = 2**20
MOST_LAYERS = 10_000
MOST_PASSES = 2**18  # forward passes of a schedule that is laid out at once
_MOST_ELEMENTS = 2**56  # of one array of all ranks together: its bytes are counted in int64
MOST_COUNT = 2**53  # steps, updates or sequences of a run: sums of them stay within int64
MEMORY_OF_GROUP = Path("/sys/fs/cgroup/memory.max")


def too_large(config: Any, products: Sequence[tuple[int, Any]]) -> Iterator[str]:
    """Products of sizes that no array can have, and meshes of more ranks than are worked with;
    `products` are those of all blocks, each after the number of blocks that have it."""
    model, ranks = config.model, config.mesh.grid().size
    if ranks > MOST_RANKS:
        yield f"mesh: {ranks} ranks; at most {MOST_RANKS}"
    rows = config.train.batch * model.sequence
    widest = max(*(each.experts * each.outputs for _, each in products), model.vocabulary or 0)
    if scores := not config.chunked():
        widest = max(widest, model.heads * model.sequence)
    arrays = {
        "model.layers x weights of a block": sum(count * each.weights for count, each in products),
        "model.hidden x (vocabulary + sequence)": model.hidden
        * ((model.vocabulary or 0) + model.sequence),
        "train.batch x model.sequence x the widest of its products, vocabulary"
        + scores * " and heads x sequence": rows * widest,
    }
    for name, count in arrays.items():
        if count > _MOST_ELEMENTS:
            yield f"{name} = {count}: at most {_MOST_ELEMENTS} elements; lower one of them"


def too_many_passes(parallel: Any, stages: int) -> Iterator[str]:
    passes = stages * parallel.microbatches * parallel.chunks
    if passes > MOST_PASSES:
        yield (
            f"parallel.microbatches = {parallel.microbatches}: on {stages} x {parallel.chunks} "
            f"parts {passes} forward passes a step, and {MOST_PASSES} are the most; use "
            f"at most {MOST_PASSES // (stages * parallel.chunks)} microbatches"
        )


def memory() -> int:
    """The bytes of memory that the processes of this machine, or of its container, have."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found = min(found, int(MEMORY_OF_GROUP.read_text()))
    return found
