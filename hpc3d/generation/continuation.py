"""A text, token by token: all ranks run the model, rank 0 chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.pool import on_host

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.decoder import Decoder

# (logits [samples, vocabulary], number of the token) -> a token per sample, or None to end.
_Choose = Callable[[np.ndarray, int], Sequence[int] | None]


class TextRequest(NamedTuple):
    """The ids of the `prompt`, and the most `tokens` of each of the `samples` that continue it.

    The model runs on `sequences`, which divide over the axes: those beyond the samples are copies.
    """

    prompt: np.ndarray
    samples: int
    sequences: int
    tokens: int

    def capacity(self, sequence: int) -> int:
        """The positions that a model of a `sequence` has to keep."""
        return min(sequence, len(self.prompt) + self.tokens)


def continue_text(decoder: Decoder, wanted: TextRequest, choose: _Choose) -> None:
    """Let rank 0 `choose` the tokens, one position after another, on all ranks together."""
    tokens, unread = np.tile(wanted.prompt, (wanted.sequences, 1)), len(wanted.prompt)
    for number in range(wanted.tokens):
        logits = decoder.forward(_window(decoder, tokens, unread))[: wanted.samples]
        column = _agreed(decoder.mesh, lambda found=logits, at=number: choose(on_host(found), at))
        if column is None:
            return
        column = np.resize(column, (wanted.sequences, 1))
        tokens, unread = np.concatenate([tokens, column], 1), 1


def _window(decoder: Decoder, tokens: np.ndarray, unread: int) -> np.ndarray:
    """The last tokens that the decoder has to read: the `unread` ones where they have room.

    Where they have not, it begins anew: with the newer half of what it keeps, or of a prompt that
    is longer than that with all that it can keep.
    """
    kept = decoder.kept
    if kept.length + unread > kept.capacity:
        unread = max(1, kept.capacity // 2) if kept.length else kept.capacity
        decoder.forget()
    return tokens[:, -unread:]


def _agreed(mesh: Mesh, choose: Callable[[], Sequence[int] | None]) -> np.ndarray | None:
    """What rank 0 chooses, on all ranks."""
    found = np.empty(0, np.int64)
    if mesh.rank == 0:
        tokens = choose()
        found = np.array([tokens is not None, *(tokens or ())], np.int64)
    found = mesh.world.broadcast(found, 0).wait()
    return found[1:] if found[0] else None
