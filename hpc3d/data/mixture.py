"""Mixtures of texts, whose sequences alternate in a ratio given by integer weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpc3d.data.token_file import SUFFIX, Tokens, open_tokens
from hpc3d.data.tokenizer import refuse_repeated, text_files

_Item = TypeVar("_Item")


def open_texts(
    paths: Sequence[str | Path], weights: Sequence[int], tokenizer: str | None = None
) -> Tokens:
    """Open the texts at `paths`, and mix them by `weights` if there are several.

    Raises a one-line ValueError that begins with `data.path` if a text cannot be read, if it or
    one of its files is in the mixture twice, or if its tokenizer differs from that of the first
    text.
    """
    for path in paths:
        refuse_joined(path)
    with ExitStack() as opened:
        parts = [opened.enter_context(open_tokens(path, tokenizer)) for path in paths]
        known: dict[str, str | Path] = {}
        for path, part in zip(paths, parts, strict=True):
            refuse_other_tokenizer(part, parts[0])
            _refuse_other_end(part, parts[0])
            if part.sha256 in known:
                raise ValueError(
                    f"data.path: {path} has the same tokens as {known[part.sha256]}; list the "
                    "text once, and raise its entry in data.weights"
                )
            known[part.sha256] = path
        texts = [path for path in paths if Path(path).suffix != SUFFIX]
        refuse_repeated([*chain.from_iterable(map(text_files, texts))])
        opened.pop_all()
    return mixed(parts, weights)


def refuse_joined(path: str | Path, key: str = "data.path") -> None:
    """Raise a one-line ValueError if `path`, the value of `key`, is several paths with commas.

    The paths can be in brackets and quotes, as in a list of an input file.
    """
    texts = [text.strip(" []'\"") for text in str(path).split(",")]
    if len(texts) > 1 and not Path(path).exists():
        listed = " ".join([key, *texts]) if key.startswith("--") else f"'{json.dumps(texts)}'"
        raise ValueError(f"{key}: {path} does not exist; set several texts as {listed}")


def refuse_other_tokenizer(text: Tokens, first: Tokens) -> None:
    """Raise a one-line ValueError if the tokenizer of `text` differs from the one of `first`."""
    if text.made_by() != first.made_by():
        file = Path(first.path).suffix == SUFFIX
        raise ValueError(
            f"data.path: the tokenizer of {text.path} ({text.described()}) differs from that of "
            f"{first.path} ({first.described()}); prepare all texts with the same tokenizer, "
            f"such as --tokenizer {first.path if file else first.tokenizer}"
        )


def _refuse_other_end(text: Tokens, first: Tokens) -> None:
    """Raise a one-line ValueError if the end-of-document token of `text` differs from `first`."""
    if text.end_name != first.end_name and text.end() != first.end():
        raise ValueError(
            f"data.path: the end-of-document token of {text.path} ({text.end_name}) differs from "
            f"that of {first.path} ({first.end_name}); prepare all texts with the same --end"
        )


def by_key(key: str, items: Sequence[_Item]) -> dict[str, _Item]:
    """Return a dict from a name to each item: KEY for one item, otherwise KEY[0], KEY[1], etc."""
    if len(items) == 1:
        return {key: items[0]}
    return {f"{key}[{number}]": each for number, each in enumerate(items)}


def mixed(parts: Sequence[Tokens], weights: Sequence[int]) -> Tokens:
    """Return the mixture of `parts`, or the only part."""
    return parts[0] if len(parts) == 1 else Mixture(parts, weights)


class Mixture(Tokens):
    """Several texts with one tokenizer. Reading the mixture concatenates the texts.

    Training batches draw `weights[i]` of each sum(`weights`) sequences from text i.
    """

    def __init__(self, parts: Sequence[Tokens], weights: Sequence[int]) -> None:
        self._parts, self.weights = parts, tuple(weights)
        self.tokenizer, self.vocabulary, self.json = parts[0].made_by()
        self.end_name = parts[0].end_name
        self.sha256 = hashlib.sha256("".join(each.sha256 for each in parts).encode()).hexdigest()
        self.digests = frozenset().union(*(each.digests for each in parts))
        self._starts = np.cumsum([0, *map(len, parts)])

    def parts(self) -> Sequence[Tokens]:
        return self._parts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        pieces = [np.empty(0, np.int32)]
        for part, begin in zip(self._parts, self._starts.tolist(), strict=False):
            low, high = max(start - begin, 0), min(stop - begin, len(part))
            if low < high:
                pieces.append(part.read(low, high))
        return np.concatenate(pieces)

    def close(self) -> None:
        for part in self._parts:
            part.close()
