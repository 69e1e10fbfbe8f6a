"""What rank 0 does with logits: it draws the tokens of all samples, and gives their texts out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.generation.text_stream import TextStream

if TYPE_CHECKING:
    from hpc3d.generation.sampling import Sampling
    from hpc3d.generation.trained_model import TrainedModel

_ENOUGH, _ENDED, _STOPPED = "tokens", "end of text", "user"  # why a text is over


class Samples:
    """The continuations of one text, `count` of them; `choose` is what `continue_text` takes.

    `write(text)` gets the text of the only sample as it comes, that of several at the end.
    `stopping()` says whether the user wants no more.
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
        """The next token of each sample, or None where there is nothing more to draw."""
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
        """Write what is left: the end of the only sample, or all texts one after another."""
        ends = [stream.end() for stream in self.streams]
        if len(ends) == 1:
            self.write(f"{ends[0]}\n")
            return
        for number, stream in enumerate(self.streams, 1):
            self.write(f"=== {number} of {len(ends)}\n{prompt}{stream.text}\n")

    def results(self) -> list[dict[str, Any]]:
        """Text and tokens of each sample, and whether it came to its end, as plain values."""
        return [
            {"text": stream.text, "tokens": stream.tokens, "ended": ended}
            for stream, ended in zip(self.streams, self.ended, strict=True)
        ]
