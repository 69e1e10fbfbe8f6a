"""Validation texts: separate texts, or the held-out end of the training text.

Every evaluation reads the same windows in the same order, independent of the seed, the step, the
mesh and the microbatches, so that validation losses are comparable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from hpc3d.console.sanitize import counted
from hpc3d.data.batches import IGNORE
from hpc3d.data.documents import permutation, refuse_other_end
from hpc3d.data.mixture import by_key, mixed, refuse_joined, refuse_other_tokenizer
from hpc3d.data.token_file import Tokens, open_tokens
from hpc3d.data.tokenizer import END

VALIDATION = "data.validation"
_NAMED = re.compile(r"\Adata\.(path|validation(\[\d+\])?)")  # key that an error message names
_ORDER = 0  # random seed of the window order, the same for all runs


class TokenRange(Tokens):
    """Token source that contains the tokens [start, stop) of another token source."""

    def __init__(self, tokens: Tokens, start: int, stop: int) -> None:
        self.tokens, self.start, self.stop = tokens, start, stop
        self.tokenizer, self.vocabulary, self.json = tokens.made_by()
        self.end_name, self.sha256, self.digests = tokens.end_name, tokens.sha256, tokens.digests

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        return self.tokens.read(self.start + start, self.start + stop)

    def close(self) -> None:
        self.tokens.close()


class SeparateText(TokenRange):
    """Separate validation text at `path`, whose error messages name `key` instead of data.path.

    Raises a one-line ValueError that begins with `key` if the text cannot be read.
    """

    def __init__(self, path: str | Path, key: str = VALIDATION) -> None:
        self.key = key
        refuse_joined(path, key)
        with naming_key(key):
            tokens = open_tokens(path)
        super().__init__(tokens, 0, len(tokens))
        self.path, self.text_bytes, self.documents = path, tokens.text_bytes, tokens.documents

    def read(self, start: int, stop: int) -> np.ndarray:
        with naming_key(self.key):
            return super().read(start, stop)


def divided(tokens: Tokens, validation: object) -> tuple[Tokens, list[Tokens]]:
    """Return the training text, and a list with the held-out text.

    `validation` is the value of data.validation. If it is a fraction, this fraction of each part
    of `tokens` is held out at its end; otherwise, the list is empty.
    """
    if not isinstance(validation, float):
        return tokens, []
    edges = [(part, len(part) - int(len(part) * validation)) for part in tokens.parts()]
    trained = [TokenRange(part, 0, edge) for part, edge in edges]
    held = [TokenRange(part, edge, len(part)) for part, edge in edges]
    return mixed(trained, tokens.weights), [mixed(held, tokens.weights)]


def separate_texts(
    paths: Sequence[str | Path], tokens: Tokens, separator: int | None = None
) -> list[SeparateText]:
    """Open the validation texts at `paths` of a model that is trained on `tokens`.

    If `separator` is not `None`, it must end the documents of each text. Raises a one-line
    ValueError that begins with data.validation if it does not, or if a text cannot be read, has
    a different tokenizer, or is listed twice.
    """
    with ExitStack() as opened:
        texts: dict[str, SeparateText] = {}
        for key, path in by_key(VALIDATION, paths).items():
            text = opened.enter_context(SeparateText(path, key))
            with naming_key(key):
                refuse_other_tokenizer(text, tokens.parts()[0])
                if separator is not None:
                    refuse_other_end(text, separator, tokens.end())
            if text.sha256 in texts:
                same = texts[text.sha256].key
                raise ValueError(f"{key}: {path} has the same tokens as {same}; list it once")
            texts[text.sha256] = text
        opened.pop_all()
    return [*texts.values()]


def text_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path: its last components.

    All names have the smallest number of components that makes them distinct. Equal paths have
    equal names.
    """
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names}) == len({*parts}):
            return names
    return []


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Replace data.path or data.validation at the start of an error message with `key`."""
    try:
        yield
    except ValueError as error:
        raise type(error)(_NAMED.sub(lambda _: key, str(error))) from error


class ValidationBatches:
    """Evaluation batches. The validation text is split into windows like the training text.

    `count` is the number of batches: enough to cover all windows, but at most `most` (0: no
    limit). An incomplete last batch is padded with sequences without targets. With `remainder`,
    the tokens after the last full window form one more window, padded with tokens without targets.
    Raises ValueError if there are too few tokens for one window.
    """

    def __init__(
        self, tokens: Tokens, sequence: int, batch: int, most: int, remainder: bool = False
    ) -> None:
        assert sequence > 0 and batch > 0 and most >= 0
        least = 2 if remainder else sequence + 1
        if len(tokens) < least:
            raise ValueError(
                f"{VALIDATION}: {counted(len(tokens), 'token')}, but model.sequence = {sequence} "
                f"needs at least {least}; use a longer text, or hold out a larger fraction"
            )
        targets = len(tokens) - 1
        windows = -(-targets // sequence) if remainder else targets // sequence
        filled = -(-windows // batch)
        self.count = min(filled, most) if most else filled
        self._tokens, self._shape = tokens, (batch, sequence)
        self._order = permutation(windows, _ORDER, 0)

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a batch: contiguous int32 arrays [batch, sequence]."""
        batch, sequence = self._shape
        tokens, targets = (np.full(self._shape, value, np.int32) for value in (END, IGNORE))
        windows = self._order[number * batch : (number + 1) * batch].tolist()
        for row, window in enumerate(windows):
            start = window * sequence
            read = self._tokens.read(start, min(start + sequence + 1, len(self._tokens)))
            count = len(read) - 1
            tokens[row, :count], targets[row, :count] = read[:-1], read[1:]
        return tokens, targets
