"""The rules of the context axis: what it divides, and what goes together with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def wrong_context(config: Config) -> Iterator[str]:
    """Keys of the context axis that do not go together, and sequences that it does not divide."""
    parallel, c, u = config.parallel, config.mesh.c, config.parallel.ulysses
    if parallel.context != "both" and u != 1:
        yield (
            f'parallel.ulysses = {u}: has a meaning with parallel.context = "both" alone, and '
            f"that is {parallel.context!r}; leave it out, or set parallel.context"
        )
        return
    if parallel.context == "both" and not (1 < u < c and c % u == 0):
        fitting = [size for size in range(2, c) if c % size == 0]
        remedy = f"use {' or '.join(map(str, fitting))}" if fitting else 'use context = "ring"'
        yield f"parallel.ulysses = {u} of mesh.c = {c} ranks exchange heads: {remedy}"
        return
    yield from _uneven_sequences(config)
    if parallel.attention == "full" and config.context().rings > 1:
        yield (
            f"parallel.attention = full: keys go round a ring (mesh.c = {c}) chunk by chunk; "
            'leave it out, or use parallel.context = "all-to-all"'
        )


def _uneven_sequences(config: Config) -> Iterator[str]:
    """A sequence that does not divide into the tokens of ranks, or of two chunks of each."""
    context, length = config.context(), config.model.sequence
    parts = context.parts * (2 if context.rings > 1 else 1)
    if length % parts:
        below = length // parts * parts
        nearest = [size for size in (below, below + parts) if size]
        chunks = " x 2 chunks" if context.rings > 1 else ""
        yield (
            f"model.sequence = {length} does not divide over mesh.c = {context.parts}{chunks}: "
            f"use {' or '.join(map(str, nearest))}, or another mesh.c"
        )


def unexchanged_heads(config: Config, members: int) -> Iterator[str]:
    """Heads of keys of a rank, cut over so many `members`, that those that exchange them do not
    divide."""
    model, u = config.model, config.context().heads
    heads = model.kv_heads or model.heads
    here = max(1, heads // members)
    if here % u:
        key = "model.kv_heads" if model.kv_heads else "model.heads"
        remedy = f"use a multiple of {members * u}" if members > 1 else f"use a multiple of {u}"
        yield (
            f"{key} = {heads}: a rank has {here} heads of keys, which do not divide over the {u} "
            f'that exchange heads; {remedy}, or parallel.context = "ring"'
        )
