"""Text files and tokenizers: one token per byte, or byte-level BPE.

Tokenizers encode UTF-8 bytes and decode to UTF-8 bytes. The byte tokenizer and BPE tokenizers
trained by hpc3d use id 0 as the end-of-document token.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from json import loads as json_of
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hpc3d.console.exit_codes import BadData
from hpc3d.console.sanitize import file_and_reason
from hpc3d.runtime.optional_packages import need

END = 0  # the NUL byte, which no text file contains
END_NAME = "<|end|>"
# End-of-text tokens of published vocabularies. The order matters, because some vocabularies use
# <|end|> or </s> for another purpose.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", END_NAME, "<|im_end|>", "[SEP]")
MASKS = "[MASK]", "<mask>"  # mask tokens in published vocabularies
_SMALLEST_BPE = 257  # 256 byte tokens and END
PIECE = 1 << 20  # maximum number of characters or tokens processed at a time


@contextlib.contextmanager
def reading(path: Path, fault: str, remedy: str) -> Iterator[Path]:
    """Convert exceptions raised while reading a file to BadData, and pass BadData on."""
    try:
        yield path
    except BadData:
        raise
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"data.path: {path} is {fault} ({reason}); {remedy}") from error


_ACCEPTED = "a text file, a folder of *.txt files, or a .h5 token file"
# Magic bytes of gzip, bzip2, xz, Zstandard and zip files.
_COMPRESSED = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PK\3\4"

reading_text = partial(
    reading, fault="not a readable UTF-8 text", remedy="use another file, or convert it with iconv"
)


def text_files(path: str | Path, accepted: str = _ACCEPTED) -> list[Path]:
    """Return `path` if it is a file, or the sorted `*.txt` files of a folder.

    Raises ValueError if there is no such file; the message names the `accepted` kinds of files.
    """
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(6).startswith(_COMPRESSED):
                raise ValueError(f"data.path: {path!s:.200} is compressed; unpack it first")
        return [Path(path)]
    if not os.path.isdir(path):
        what = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise ValueError(f"data.path: {path!s:.200} {what}; use {accepted}")
    try:
        found = (text for text in Path(path).iterdir() if text.name.endswith(".txt"))
        texts = sorted(text for text in found if text.is_file())
    except OSError as error:
        raise ValueError(f"data.path: {file_and_reason(error)}; make it readable") from None
    if not texts:
        raise ValueError(f"data.path: the folder {path} has no *.txt files; add UTF-8 text files")
    return texts


def refuse_repeated(texts: Sequence[Path]) -> None:
    """Raise ValueError if a file occurs twice, such as a file that is also in a listed folder."""
    repeated = [text for text, count in Counter(map(Path.resolve, texts)).items() if count > 1]
    if repeated:
        what = f"{repeated[0]} is listed twice; specify it once, or only its folder"
        raise ValueError(f"data.path: {what}")


def pieces(text: Path) -> Iterator[bytes]:
    """Yield the content of a UTF-8 file in pieces of about PIECE characters, split at line ends.

    Raises ValueError if the file is not text.
    """
    with reading_text(text), open(text, encoding="utf-8", newline="") as file:
        # the size of readline is limited, because a text may be a single long line
        while piece := file.read(PIECE) + file.readline(PIECE):
            if "\0" in piece:
                raise ValueError("the file contains NUL bytes")
            yield piece.encode()


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of the text."""

    name = "byte"
    vocabulary = 256
    json = "{}"
    end, end_name = END, END_NAME
    fallback: frozenset[int] = frozenset()

    def encode(self, text: bytes, special: bool = False) -> np.ndarray:
        """Return the token ids of `text` as uint8[len(text)]."""
        return np.frombuffer(text, np.uint8)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return one array of token ids per text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> bytes:
        """Decode token ids in [0, 256) to UTF-8 bytes, dropping end-of-document tokens."""
        return np.asarray(tokens, np.uint8).tobytes().replace(b"\0", b"")


class BpeTokenizer:
    """Byte-level byte-pair encoding tokenizer (Sennrich et al. 2016; bytes as in GPT-2).

    Any other tokenizer stored as a Hugging Face tokenizer.json is also supported.  `end_name` is
    the end-of-document token, and `end` its id.  The default is the first token in ENDS that is in
    the vocabulary.  Both are `None` if there is no such token.  `fallback` contains the ids of the
    tokens <0x00> to <0xFF>, which encode the UTF-8 bytes of characters outside the vocabulary.
    `special_tokens` maps the ids of special tokens to their text.  `special` selects whether
    `encode_batch` recognizes them in documents, and `recognized` is true if it has found one.
    Otherwise, `ordinary` lists those in the first documents, which are encoded as ordinary text.
    """

    name, special = "bpe", False

    def __init__(self, text: str, end_name: str | None = None) -> None:
        """Load a tokenizer from its JSON text.

        Raises ValueError if the text is invalid, or the tokenizer has no token `end_name`.
        """
        self._tokenizer = _loaded(text)
        self.json = text
        known = self._tokenizer.get_vocab()
        self.vocabulary = max(known.values(), default=-1) + 1
        if end_name is not None and end_name not in known:
            raise ValueError(f"{end_name!r} is not a token of the tokenizer")
        self.end_name = end_name or next((name for name in ENDS if name in known), None)
        self.end: int | None = known.get(self.end_name)
        self.fallback = self._byte_tokens(known)
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {id_: each.content for id_, each in added if each.special}
        self.special_tokens = {id_: special[id_] for id_ in special if id_ not in self.fallback}
        self.recognized = False
        self.ordinary: list[str] | None = None

    def _byte_tokens(self, known: Mapping[str, int]) -> frozenset[int]:
        """Return the ids of the tokens that the decoder converts to single bytes."""
        ids = [known[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in known]
        text = self._tokenizer.decode([known.get("<0x41>", 0)], skip_special_tokens=False)
        return frozenset(ids if text == "A" else ())

    def encode(self, text: bytes, special: bool = False) -> np.ndarray:
        """Return the token ids of `text` as uint32.

        If `special` is true, special tokens in the text, such as <|im_start|>, are recognized, and
        the special tokens that the tokenizer puts around a text, such as [CLS] and [SEP], are
        added. Otherwise, special tokens in the text are encoded as ordinary text.
        """
        with self._encoding([text], special):
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=special).ids
        return np.array(ids, np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode texts on all cores; return one array of ids per text.

        No special tokens are added. Those in the texts are recognized if `special` is true.
        """
        several = [text.decode() for text in texts]
        with self._encoding(texts, self.special):
            found = self._tokenizer.encode_batch_fast(several, add_special_tokens=False)
        rows = [np.array(each.ids, np.uint32) for each in found]
        if self.special:
            known = [*self.special_tokens]
            self.recognized |= any(np.isin(row, known).any() for row in rows)
        elif self.ordinary is None:  # searches only the documents of the first call
            names = self.special_tokens.values()
            self.ordinary = [name for name in names if any(name in text for text in several)]
        return rows

    @contextlib.contextmanager
    def _encoding(self, texts: Sequence[bytes], special: bool = False) -> Iterator[None]:
        """Convert library errors raised while encoding a text to ValueError.

        The message names the unknown character, if there is one. `special` selects whether special
        tokens in the texts are recognized.
        """
        self._tokenizer.encode_special_tokens = not special
        try:
            yield
        except UnicodeDecodeError:
            raise
        except Exception as error:  # the library raises plain Exception
            letters = dict.fromkeys("".join(text.decode() for text in texts))
            odd = next((each for each in letters if self.id_of(each) is None), None)
            what = str(error) if odd is None else f"it contains {odd!r}, which the tokenizer lacks"
            raise ValueError(what) from error

    def decode(self, tokens: np.ndarray) -> bytes:
        """Decode token ids to UTF-8 bytes, dropping special tokens such as end-of-document tokens.

        Byte-fallback tokens are decoded even if the tokenizer declares them as special.
        """
        ids = [each for each in np.asarray(tokens).tolist() if each not in self.special_tokens]
        return self._tokenizer.decode(ids, skip_special_tokens=False).encode()

    def has(self, ids: object) -> bool:
        """Return True if `ids` is a valid token id or a list of valid token ids."""
        several = ids if isinstance(ids, list) else [ids]
        return all(type(each) is int and 0 <= each < self.vocabulary for each in several)

    def id_of(self, token: object) -> int | None:
        """Return the id of a token, or None for an unknown token."""
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None


def _loaded(text: str) -> Any:
    """Load a tokenizer from its JSON text; disable padding, truncation and BPE dropout.

    Raises ValueError if the text is not a tokenizer.
    """
    bpe = library()
    try:
        loaded = bpe.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library may panic
        raise ValueError(f"not the JSON text of a BPE tokenizer: {error}") from error
    loaded.no_padding()
    loaded.no_truncation()
    if getattr(loaded.model, "dropout", None):
        loaded.model.dropout = None
    return loaded


def same_rules(one: str, other: str) -> bool:
    """Return True if two JSON texts describe the same tokenizer.

    Padding, truncation, and changes of the JSON format between library versions are ignored. The
    library is imported only if the texts differ.
    """
    if one == other or json_of(one) == json_of(other):
        return True
    return json_of(_loaded(one).to_str()) == json_of(_loaded(other).to_str())


_KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "words"}


def kind_of(name: str, rules: str) -> str:
    """Return the type of a tokenizer, such as "wordpiece", given its name and JSON text."""
    found = json_of(rules) if rules else {}
    kind = _KINDS.get(found.get("model", {}).get("type"), name)
    splits = found.get("pre_tokenizer") or {}
    if kind == "words" and splits.get("pattern") == {"String": ""}:
        return "characters"
    return kind


Tokenizer = ByteTokenizer | BpeTokenizer


def tokenizer_named(name: str, json: str, end_name: str | None) -> Tokenizer:
    """Build the tokenizer described by the name, JSON text and end token of a token file."""
    return BpeTokenizer(json, end_name) if name == BpeTokenizer.name else ByteTokenizer()


def train_bpe(pieces: Iterable[bytes], vocabulary: int) -> BpeTokenizer:
    """Train a BPE tokenizer with a vocabulary of up to `vocabulary` tokens on `pieces` of text.

    The result depends only on the text and `vocabulary`.  A short text may yield fewer tokens.
    """
    if vocabulary < _SMALLEST_BPE:
        raise ValueError(
            f"--vocabulary {vocabulary}: byte-level BPE needs at least {_SMALLEST_BPE} tokens"
        )
    bpe = library()
    tokenizer = bpe.Tokenizer(bpe.models.BPE())
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = bpe.decoders.ByteLevel()
    trainer = bpe.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_NAME],
        initial_alphabet=sorted(bpe.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.decode() for piece in pieces), trainer)
    return BpeTokenizer(tokenizer.to_str(), END_NAME)


def library() -> ModuleType:
    """Return the module `tokenizers`; raise ValueError if it is not installed."""
    need("tokenizer bpe", "tokenizers")
    import tokenizers

    return tokenizers
