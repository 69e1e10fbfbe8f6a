"""Training batches: each epoch visits every window of a text once, in a new random order."""

from collections.abc import Mapping

import numpy as np

from hpc3d.console.sanitize import counted
from hpc3d.data.documents import ShuffledDocuments, permutation
from hpc3d.data.mixture import by_key
from hpc3d.data.token_file import Tokens

IGNORE = -100  # target value that excludes a token from the loss
_ROUNDS = 2**63  # round r of a mixture uses the random numbers of epoch _ROUNDS + r
USED = "sequences of "  # prefix of a text's hash in the position of a mixture


class Batches:
    """Training batches, determined by the tokens, the batch shape, `seed` and the step.

    A window consists of `sequence` input tokens and the AHEAD tokens after them, which complete
    the targets.  AHEAD is 1 if each target is the next token, and 0 for masked tokens.  Windows
    start every `sequence` tokens, so each token is a target once per epoch, except for the first
    AHEAD tokens and an incomplete last window.  An epoch is a permutation of the windows.  A batch
    that reaches the end of an epoch continues with windows of the next epoch.

    The texts of a mixture have separate windows and epochs.  With weights w, coprime integers,
    each round of sum(w) sequences contains w[i] sequences of text i, in a random order.

    `shuffle_documents` gives the documents of each text a new order in each epoch, before windows
    are formed.  The attribute `windows` is the number of windows per epoch of each text.  Raises
    ValueError if a text has too few tokens for one window.
    """

    AHEAD = 1

    def __init__(self, tokens: Tokens, sequence: int, batch: int, seed: int) -> None:
        assert sequence > 0 and batch > 0 and 0 <= seed < 2**64
        self._parts = tokens.parts()
        for key, part in by_key("data.path", self._parts).items():
            if len(part) < sequence + self.AHEAD:
                raise ValueError(
                    f"{key}: {counted(len(part), 'token')}, but model.sequence = {sequence} "
                    f"needs at least {sequence + self.AHEAD}; use a longer text, or lower "
                    "model.sequence"
                )
        self.windows = [(len(part) - self.AHEAD) // sequence for part in self._parts]
        self._sequence, self._batch, self._seed = sequence, batch, seed
        weights = np.array(tokens.weights)
        self._weights, self._slots = weights, np.repeat(np.arange(len(weights)), weights)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._documents: list[ShuffledDocuments] = []
        # Step i starts with sequence number i * batch + _skipped.  `go_on` sets _skipped to
        # account for earlier steps with a different batch size, and _ahead to the sequences of
        # each text that an earlier mixture used in addition to those of this mixture.
        self._skipped, self._ahead = 0, np.zeros(len(weights), int)

    def shuffle_documents(self, end: int) -> None:
        """Shuffle the documents of each text, which the token `end` ends, in each epoch."""
        self._documents = [ShuffledDocuments(each, end, self._seed) for each in self._parts]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a step: contiguous int32 arrays [batch, sequence]."""
        first = step * self._batch + self._skipped
        windows = np.stack([self._window(first + row) for row in range(self._batch)])
        return windows[:, : self._sequence].copy(), windows[:, self.AHEAD :].copy()

    def go_on(self, step: int, sequences: int, position: Mapping[str, int] | None = None) -> None:
        """Resume at `step` of a run that has used `sequences` sequences, even if the batch size
        has changed.

        If the stored `position` contains a text of this mixture, each text continues where it
        ended, and new texts start at their first window.
        """
        self._skipped = sequences - step * self._batch
        keys = [USED + part.sha256 for part in self._parts] if position else []
        if position and {*keys} & {*position}:
            known = np.array([position.get(key, 0) for key in keys])
            self._ahead = known - self._used(sequences)

    def position(self, step: int) -> dict[str, int]:
        """Return the position in the data at the start of `step`.

        The position is the number of sequences used in all epochs (`sequences`). For a single
        text, it also contains the epoch, and the number used in this epoch (`offset`). For a
        mixture, it contains the number of sequences of each text.
        """
        sequences = step * self._batch + self._skipped
        used = (self._used(sequences) + self._ahead).tolist()
        if len(used) > 1:
            texts = zip(self._parts, used, strict=True)
            return {"sequences": sequences} | {USED + part.sha256: n for part, n in texts}
        epoch, offset = divmod(used[0], self.windows[0])
        return {"epoch": epoch, "offset": offset, "sequences": sequences}

    def epochs(self, step: int) -> list[float]:
        """Return the number of epochs of each text at the start of `step`."""
        used = self._used(step * self._batch + self._skipped) + self._ahead
        return (used / self.windows).tolist()

    def _window(self, number: int) -> np.ndarray:
        """Read the tokens of a sequence of the run."""
        text = int(self._round(number)[number % len(self._slots)])
        used = int(self._used(number)[text] + self._ahead[text])
        epoch, offset = divmod(used, self.windows[text])
        start = int(self._order(text, self.windows[text], epoch)[offset]) * self._sequence
        stop = start + self._sequence + self.AHEAD
        if self._documents:
            return self._documents[text].read(epoch, start, stop)
        return self._parts[text].read(start, stop)

    def _used(self, number: int) -> np.ndarray:
        """Return the number of sequences of each text among the first `number` sequences."""
        rounds, slot = divmod(number, len(self._slots))
        begun = np.bincount(self._round(number)[:slot], minlength=len(self._weights))
        return rounds * self._weights + begun

    def _round(self, number: int) -> np.ndarray:
        """Return the texts of the sequences in the round that contains sequence `number`."""
        rounds = _ROUNDS + number // len(self._slots)
        return self._slots[self._order(-1, len(self._slots), rounds)]

    def _order(self, text: int, windows: int, epoch: int) -> np.ndarray:
        """Return the order of the windows of a text (-1: of the slots of a round), cached."""
        if text not in self._orders or self._orders[text][0] != epoch:
            self._orders[text] = epoch, permutation(windows, self._seed, epoch)
        return self._orders[text][1]
