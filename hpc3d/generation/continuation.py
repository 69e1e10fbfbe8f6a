"""Autoregressive decoding: all ranks run the model, and rank 0 samples each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.pool import on_host

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.decoder import Decoder

# Callback that receives (logits [samples, vocabulary], token index). It returns one token per
# sample, or `None` to stop the generation.
_Choose = Callable[[np.ndarray, int], Sequence[int] | None]


class TextRequest(NamedTuple):
    """Request to generate `samples` continuations of `prompt`, each of at most `tokens` tokens.

    If `ended`, the prompt is a complete document, and the new tokens do not attend to it.
    `sequences` is the batch size, rounded up from `samples` so that the mesh can shard the batch.
    The additional sequences are duplicates.
    """

    prompt: np.ndarray
    samples: int
    sequences: int
    tokens: int
    ended: bool = False

    def capacity(self, sequence: int) -> int:
        """Return the required KV cache capacity in tokens, at most the context length
        `sequence`."""
        return min(sequence, len(self.prompt) + self.tokens)


def continue_text(decoder: Decoder, wanted: TextRequest, choose: _Choose) -> None:
    """Generate tokens one position at a time on all ranks; rank 0 calls `choose`."""
    tokens, unread = np.tile(wanted.prompt, (wanted.sequences, 1)), len(wanted.prompt)
    for number in range(wanted.tokens):
        logits = decoder.forward(_window(decoder, tokens, unread))[: wanted.samples]
        column = _agreed(decoder.mesh, choose, logits, number)
        if column is None:
            return
        column = np.resize(column, (wanted.sequences, 1))
        if wanted.ended and number == 0:
            decoder.forget()
            tokens = tokens[:, :0]
        tokens, unread = np.concatenate([tokens, column], 1), 1


def _window(decoder: Decoder, tokens: np.ndarray, unread: int) -> np.ndarray:
    """Return the trailing tokens that the decoder must process next.

    If the KV cache has room, these are the last `unread` tokens. Otherwise the cache is cleared,
    and enough trailing tokens are returned to fill half of the cache, or the entire cache if it
    was still empty (the prompt exceeds its capacity).
    """
    kept = decoder.kept
    if kept.length + unread > kept.capacity:
        unread = max(1, kept.capacity // 2) if kept.length else kept.capacity
        decoder.forget()
    return tokens[:, -unread:]


def _agreed(mesh: Mesh, choose: _Choose, logits: Array, number: int) -> np.ndarray | None:
    """Broadcast the tokens chosen by rank 0 and return them, or `None` if generation stops."""
    found = np.empty(0, np.int64)
    if mesh.rank == 0:
        tokens = choose(on_host(logits), number)
        found = np.array([tokens is not None, *(tokens or ())], np.int64)
    found = mesh.world.broadcast(found, 0).wait()
    return found[1:] if found[0] else None
