"""Training batches: each epoch visits every window of the text once, in a new random order."""

import numpy as np

from hpc3d.console.sanitize import counted
from hpc3d.data.token_file import Tokens

IGNORE = -100  # target value that excludes a token from the loss


class Batches:
    """Training batches, determined by the tokens, the batch shape, `seed` and the step.

    A window consists of `sequence` input tokens and the AHEAD tokens after them, which complete
    the targets.  AHEAD is 1 if each target is the next token, and 0 for masked tokens.  Windows
    start every `sequence` tokens, so each token is a target once per epoch, except for the first
    AHEAD tokens and an incomplete last window.  An epoch is a permutation of the windows.  A batch
    that reaches the end of an epoch continues with windows of the next epoch.

    The attribute `windows` is the number of windows per epoch.  Raises ValueError if there are too
    few tokens for one window.
    """

    AHEAD = 1

    def __init__(self, tokens: Tokens, sequence: int, batch: int, seed: int) -> None:
        assert sequence > 0 and batch > 0 and 0 <= seed < 2**64
        if len(tokens) < sequence + self.AHEAD:
            raise ValueError(
                f"data.path: {counted(len(tokens), 'token')}, but model.sequence = {sequence} "
                f"needs at least {sequence + self.AHEAD}; use a longer text, or lower "
                "model.sequence"
            )
        self.windows = (len(tokens) - self.AHEAD) // sequence
        self._tokens, self._sequence, self._batch, self._seed = tokens, sequence, batch, seed
        self._epoch, self._order = 0, permutation(self.windows, seed, 0)
        # Step i starts with sequence number i * batch + _skipped.  `go_on` sets _skipped to
        # account for earlier steps with a different batch size.
        self._skipped = 0

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a step: contiguous int32 arrays [batch, sequence]."""
        first = step * self._batch + self._skipped
        numbers = range(first, first + self._batch)
        chosen = [self._window(*divmod(number, self.windows)) for number in numbers]
        starts = [window * self._sequence for window in chosen]
        length = self._sequence + self.AHEAD
        windows = np.stack([self._tokens.read(start, start + length) for start in starts])
        return windows[:, : self._sequence].copy(), windows[:, self.AHEAD :].copy()

    def go_on(self, step: int, sequences: int) -> None:
        """Resume at `step` of a run that has used `sequences` sequences, even if the batch size
        has changed."""
        self._skipped = sequences - step * self._batch

    def position(self, step: int) -> dict[str, int]:
        """Return the position in the data at the start of `step`.

        The position is the epoch, the number of sequences used in this epoch (`offset`), and the
        number used in all epochs (`sequences`).
        """
        sequences = step * self._batch + self._skipped
        epoch, offset = divmod(sequences, self.windows)
        return {"epoch": epoch, "offset": offset, "sequences": sequences}

    def _window(self, epoch: int, offset: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.windows, self._seed, epoch)
        return int(self._order[offset])


def permutation(windows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the windows in an epoch, int64[windows].

    The order does not depend on the orders of earlier epochs.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.random.Generator(bits).permutation(windows)
