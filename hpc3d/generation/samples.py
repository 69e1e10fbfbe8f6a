"""Sampling on rank 0: draw the next token of each sample, and write the generated texts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.generation.text_stream import TextStream

if TYPE_CHECKING:
    from hpc3d.generation.sampling import Sampling
    from hpc3d.generation.trained_model import TrainedModel

_ENOUGH, _ENDED, _STOPPED = "tokens", "end of text", "user"  # reasons why generation stopped


class Samples:
    """Sampler of `count` continuations of a text.

    Pass the method `choose` to `continue_text` as its callback. A single sample is streamed to
    `write(text)` as it is generated; multiple samples are written at the end. `stopping()` returns
    True if the user has interrupted generation.
    """

    def __init__(
        self,
        model: TrainedModel,
        sampling: Sampling,
        count: int,
        write: Callable[[str], object],
        stopping: Callable[[], bool],
    ) -> None:
        self.sampling, self.choices = sampling, model.choices
        self.ends: Collection[int] = model.ends
        self.streams = [TextStream(model.tokenizer) for _ in range(count)]
        self.ended = [False] * count
        self.write, self.stopping, self.reason = write, stopping, _ENOUGH

    def choose(self, logits: np.ndarray, number: int) -> list[int] | None:
        """Return the next token of each sample, or `None` to stop generation."""
        if self.stopping():
            self.reason = _STOPPED
            return None
        column = [
            self.sampling.draw(row[: self.choices], sample, number)
            for sample, row in enumerate(logits)
        ]
        for sample, token in enumerate(column):
            self._take(sample, token)
        if all(self.ended):
            self.reason = _ENDED
            return None
        return column

    def _take(self, sample: int, token: int) -> None:
        self.ended[sample] |= token in self.ends
        if self.ended[sample]:
            return
        piece = self.streams[sample].push(token)
        if len(self.streams) == 1:
            self.write(piece)

    def finish(self, prompt: str) -> None:
        """Write the remaining text of a single sample, or all texts of several samples."""
        ends = [stream.end() for stream in self.streams]
        if len(ends) == 1:
            self.write(f"{ends[0]}\n")
            return
        for number, stream in enumerate(self.streams, 1):
            self.write(f"=== {number} of {len(ends)}\n{prompt}{stream.text}\n")

    def results(self) -> list[dict[str, Any]]:
        """Return one dict per sample, with the keys text, tokens and ended.

        `tokens` lists the token ids, and `ended` is True if an end token was generated.
        """
        return [
            {"text": stream.text, "tokens": stream.tokens, "ended": ended}
            for stream, ended in zip(self.streams, self.ended, strict=True)
        ]
