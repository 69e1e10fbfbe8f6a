"""What the commands take at most, stated once; docs/limits.md has the table and the reasons.

Only the standard library: every command reads this before it starts anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

INT32 = 2**31 - 1  # of the columns of a trace
MOST_RANKS = 2**20
MOST_LAYERS = 10_000
MOST_PASSES = 2**18  # forward passes of a schedule that is laid out at once
_MOST_ELEMENTS = 2**56  # of one array of all ranks together: its bytes are counted in int64
MOST_COUNT = 2**53  # steps, updates or sequences of a run: sums of them stay within int64
MEMORY_OF_GROUP = Path("/sys/fs/cgroup/memory.max")

# Key of the input file -> its least and its largest value.
SIZES = {
    "mesh.p": (1, 1024),
    **{f"mesh.{axis}": (1, MOST_RANKS) for axis in "dcexyz"},
    "parallel.ulysses": (1, MOST_RANKS),
    "parallel.microbatches": (1, MOST_PASSES),
    "parallel.chunks": (1, MOST_LAYERS),
    "parallel.compression_rank": (1, 2**20),
    "model.layers": (1, MOST_LAYERS),
    "model.hidden": (1, 2**20),
    "model.heads": (1, 2**20),
    "model.kv_heads": (1, 2**20),
    "model.ffn": (1, 2**22),
    "model.sequence": (1, 2**27),
    "model.vocabulary": (1, 2**27),
    "model.padding": (0, 2**27),
    "model.experts": (0, 2**20),
    "model.top_k": (1, 2**10),
    "model.moe_every": (1, MOST_LAYERS),
    "model.shared_experts": (0, 2**10),
    "train.steps": (1, INT32),
    "train.batch": (1, 2**20),
    "train.warmup": (0, INT32),
    "train.decay_steps": (1, INT32),
    "train.cooldown": (1, INT32),
    "train.eval_every": (0, INT32),
    "train.eval_batches": (0, INT32),
    "checkpoint.every": (0, INT32),
    "checkpoint.keep": (1, INT32),
    "guard.replicas_every": (0, INT32),
    "guard.abft_every": (0, INT32),
    "trace.sync_every": (1, INT32),
}

# Key of the input file -> its least value, and what it must be below.
RANGES = {
    "seed": (0, 2**64),
    "parallel.bucket_mb": (0, inf),
    "model.dropout": (0, 1),
    "model.norm_epsilon": (0, 1),
    "model.rope_theta": (1, inf),
    "model.capacity": (0, inf),
    "model.balance_loss": (0, inf),
    "model.z_loss": (0, inf),
    "model.balance_bias": (0, 1),
    "train.learning_rate": (0, inf),
    "train.weight_decay": (0, inf),
    "train.clip": (0, inf),
    "train.max_minutes": (0, inf),
    "guard.loss_spike_sigma": (0, inf),
    "run.watchdog_s": (0.1, 1e9),
}


def out_of_bounds(config: Any) -> Iterator[str]:
    """Whole numbers that are not within SIZES."""
    for key, (least, most) in SIZES.items():
        value = attrgetter(key)(config)
        if value is not None and not least <= value <= most:
            yield _out_of_range(key, value, least, most)


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


def _out_of_range(key: str, value: float, least: int, most: int) -> str:
    """The line against a number that is not within its bounds."""
    found = f"{key} = {shown(value)}: must be at least {least}"
    return found if value < least else f"{found} and at most {most}"


def shown(value: float) -> str:
    """A number in few characters, or how many digits it has."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def memory() -> int:
    """The bytes of memory that the processes of this machine, or of its container, have."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found = min(found, int(MEMORY_OF_GROUP.read_text()))
    return found
