"""Text files, and text to token ids and back: its bytes, or byte-level BPE trained on it.

Text is UTF-8 in bytes on both sides.  Id 0 is no text: it ends a document in either vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from hpc3d.extras import need
from hpc3d.runtime.exit_codes import BadData

END = 0  # in bytes it is NUL, which no text file holds
_END_NAME = "<|end|>"
_SMALLEST_BPE = 257  # one id for each byte, and END
PIECE = 1 << 20  # characters of text, or tokens, in memory at a time


@contextlib.contextmanager
def reading(path: Path, fault: str, remedy: str) -> Iterator[Path]:
    """Make one line of whatever reading `path` raises: a damage has many faces."""
    try:
        yield path
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"data.path: {path} is {fault} ({reason}); {remedy}") from error


reading_text = partial(
    reading, fault="no readable UTF-8 text", remedy="name another or convert it with iconv"
)


def text_files(path: str | Path) -> list[Path]:
    """Return the file, or the `*.txt` of the folder by name; ValueError without any."""
    if os.path.isfile(path):
        return [Path(path)]
    if not os.path.isdir(path):
        raise ValueError(
            f"data.path: {path!s:.200} does not exist; name a text, a folder or a .h5 file"
        )
    texts = sorted(text for text in Path(path).glob("*.txt") if text.is_file())
    if not texts:
        raise ValueError(f"data.path: the folder {path} has no *.txt; put UTF-8 texts there")
    return texts


def pieces(text: Path) -> Iterator[bytes]:
    """Yield a UTF-8 file in pieces of about PIECE characters, cut at ends of lines.

    Raises ValueError for a file that is no text.
    """
    with reading_text(text), open(text, encoding="utf-8", newline="") as file:
        # a text may be one long line: also readline is bounded
        while piece := file.read(PIECE) + file.readline(PIECE):
            if "\0" in piece:
                raise ValueError("it holds NUL bytes")
            yield piece.encode()


class ByteTokenizer:
    """The bytes of the text are its tokens."""

    name = "byte"
    vocabulary = 256
    json = "{}"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, uint8[len(text)]."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of the ids in [0, 256), without the ends of documents."""
        return np.asarray(tokens, np.uint8).tobytes().replace(b"\0", b"")


class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; bytes as in GPT-2)."""

    name = "bpe"

    def __init__(self, text: str) -> None:
        """Load a tokenizer from its JSON text; ValueError where it is invalid."""
        bpe = _library()
        try:
            self._tokenizer = bpe.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"not the JSON text of a BPE tokenizer: {error}") from error
        # "<|end|>" inside a text is text
        self._tokenizer.encode_special_tokens = True
        self.json = text
        self.vocabulary = self._tokenizer.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, uint32."""
        ids = self._tokenizer.encode(text.decode()).ids
        return np.array(ids, np.uint32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of the ids, without the ends of documents."""
        return self._tokenizer.decode(np.asarray(tokens).tolist()).encode()


Tokenizer = ByteTokenizer | BpeTokenizer


def tokenizer_named(name: str, json: str) -> Tokenizer:
    """Return the tokenizer of a name that a token file has, and of its JSON text."""
    return BpeTokenizer(json) if name == BpeTokenizer.name else ByteTokenizer()


def train_bpe(pieces: Iterable[bytes], vocabulary: int) -> BpeTokenizer:
    """Learn merges from `pieces` of text until there are `vocabulary` ids.

    The same text gives the same tokenizer.  A short text may give fewer ids.
    """
    if vocabulary < _SMALLEST_BPE:
        raise ValueError(
            f"--vocabulary {vocabulary}: BPE over bytes needs at least {_SMALLEST_BPE}"
        )
    bpe = _library()
    tokenizer = bpe.Tokenizer(bpe.models.BPE())
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = bpe.decoders.ByteLevel()
    trainer = bpe.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END_NAME],
        initial_alphabet=sorted(bpe.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.decode() for piece in pieces), trainer)
    return BpeTokenizer(tokenizer.to_str())


def _library() -> ModuleType:
    """Return the module `tokenizers`; ValueError where it is not installed."""
    need("tokenizer bpe", "tokenizers")
    import tokenizers

    return tokenizers
