"""Text files, and text to token ids and back: its bytes, or byte-level BPE trained on it.

Text is UTF-8 in bytes on both sides.  Id 0 is no text: it ends a document in either vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from json import loads as json_of
from pathlib import Path
from types import ModuleType

import numpy as np

from hpc3d.extras import need
from hpc3d.runtime.exit_codes import BadData

END = 0  # in bytes it is NUL, which no text file holds
_END_NAME = "<|end|>"
# What ends a text in published vocabularies.
_ENDS = (_END_NAME, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
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
    end, end_name = END, "NUL"

    def encode(self, text: bytes, whole: bool = False) -> np.ndarray:
        """Return the ids of `text`, uint8[len(text)]."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of the ids in [0, 256), without the ends of documents."""
        return np.asarray(tokens, np.uint8).tobytes().replace(b"\0", b"")


class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; bytes as in GPT-2), or whatever else a
    tokenizer.json of Hugging Face says.  `end` is the id that ends a document, and `end_name` the
    token, None where there is no such."""

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
        known = self._tokenizer.get_vocab()
        self.vocabulary = max(known.values(), default=-1) + 1
        self.end_name = next((name for name in _ENDS if name in known), None)
        self.end = END if self.end_name is None else known[self.end_name]

    def encode(self, text: bytes, whole: bool = False) -> np.ndarray:
        """Return the ids of `text`, uint32, with what begins a `whole` text if anything does."""
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=whole).ids
        return np.array(ids, np.uint32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of the ids, without the ends of documents."""
        return self._tokenizer.decode(np.asarray(tokens).tolist()).encode()


Tokenizer = ByteTokenizer | BpeTokenizer


def tokenizer_named(name: str, json: str) -> Tokenizer:
    """Return the tokenizer of a name that a token file has, and of its JSON text."""
    return BpeTokenizer(json) if name == BpeTokenizer.name else ByteTokenizer()


def tokenizer_from(word: str) -> BpeTokenizer:
    """The tokenizer of a tokenizer.json, of a folder that has one or GPT-2's two files, or of
    ranks as tiktoken keeps them.

    ValueError, in one line, where there is none.
    """
    path = Path(word)
    with reading(
        path,
        "no readable tokenizer",
        "give --tokenizer byte, bpe or a tokenizer.json (hf download MODEL tokenizer.json)",
    ):
        if path.is_dir():
            return _of_folder(path)
        if path.suffix == ".tiktoken":
            return _byte_level(*_of_ranks(path))
        return BpeTokenizer(path.read_text(encoding="utf-8"))


def _of_folder(folder: Path) -> BpeTokenizer:
    if (folder / "tokenizer.json").is_file():
        return BpeTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            numbers = json_of((folder / vocabulary).read_text(encoding="utf-8"))
            lines = (folder / merges).read_text(encoding="utf-8").splitlines()
            pairs = [tuple(line.split(" ")) for line in lines if line.count(" ") == 1]
            return _byte_level(numbers, [pair for pair in pairs if "#version" not in pair[0]])
    raise ValueError("it has no tokenizer.json, and no vocab.json with merges.txt")


def _byte_level(numbers: dict[str, int], merges: Sequence[tuple[str, ...]]) -> BpeTokenizer:
    """GPT-2's way to cut a text, with a vocabulary and merges of one's own."""
    bpe = _library()
    tokenizer = bpe.Tokenizer(bpe.models.BPE(numbers, [*merges]))
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = bpe.decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in _ENDS if name in numbers])
    return BpeTokenizer(tokenizer.to_str())


def _of_ranks(path: Path) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Vocabulary and merges of a file of ranks, `base64 rank` a line.  A token was merged of the
    two parts that merges of lower rank leave of it."""
    lines = path.read_text(encoding="ascii").splitlines()
    ranks = {b64decode(word): int(rank) for word, rank in (line.split() for line in lines if line)}
    letters = _letters()
    spell = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    merges = [
        tuple(map(spell, _parts(token, ranks)))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    numbers = {spell(token): rank for token, rank in ranks.items()}
    if "<|endoftext|>" not in numbers:
        numbers["<|endoftext|>"] = len(numbers)
    return numbers, merges


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, ranks[token]) for a, b in pairwise(parts)]
        place = pairs.index(min(pairs))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in GPT-2's vocabulary: itself where it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def characters(numbers: dict[str, int]) -> BpeTokenizer:
    """A tokenizer of single characters, {character: id}."""
    bpe = _library()
    tokenizer = bpe.Tokenizer(bpe.models.WordLevel(numbers, next(iter(numbers))))
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = bpe.decoders.Fuse()
    return BpeTokenizer(tokenizer.to_str())


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
