"""Token sources: text files whose bytes are tokens, and token files prepared from texts.

A token file is an HDF5 file with a 1-D dataset `tokens` and attributes that describe it.  The
dataset has the smallest unsigned type that can hold all ids.  The file gets its final name only
when it is complete.  Error messages refer to `data.path`, the key that specifies the file.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.console.small_files import Hdf5Output, replacing
from hpc3d.data.sources import BIN, JSONL, PARQUET, Source
from hpc3d.data.tokenizer import (
    END,
    MASKS,
    PIECE,
    ByteTokenizer,
    Tokenizer,
    kind_of,
    pieces,
    reading,
    reading_text,
    text_files,
    tokenizer_named,
)

if TYPE_CHECKING:
    import h5py

_FORMAT = "hpc3d-tokens"
_VERSION = 1
SUFFIX = ".h5"
_MOST_IDS = 1 << 31  # maximum vocabulary size, because ids are returned as int32
_END = "tokenizer_end"  # HDF5 attribute: end-of-document token; absent in older files
_TEXT_BYTES = "text_bytes"  # HDF5 attribute: UTF-8 bytes of all documents; absent if unknown
_CHUNK = 1 << 16  # tokens per checksum
_SELF_CHECKING = "v110"  # the HDF5 1.10 format also has metadata checksums
_PREPARE = "create it with python -m hpc3d.prepare"

_Report = Callable[[int], None]

_reading_tokens = partial(reading, fault="not a readable token file", remedy=_PREPARE)


class UntokenizedError(ValueError):
    """The text must be tokenized first. The message ends with the `prepare` command."""


class Tokens(contextlib.AbstractContextManager):
    """Token ids on disk: a sequence of documents, each followed by an end-of-document token.

    `vocabulary` is the vocabulary size, `tokenizer` the name of the tokenizer, `json` its JSON
    text, and `end_name` its end-of-document token, or `None` if unknown. `sha256` is the hash of
    all ids, stored in the dtype of the token file. `digests` contains `sha256` and, if known, the
    hashes of the individual documents. `text_bytes` is the size of all documents in UTF-8 bytes,
    or `None` if unknown, and `documents` the number of end-of-document tokens, or `None` if
    unknown. `path` is the path that `open_tokens` opened.
    """

    tokenizer: str
    vocabulary: int
    json: str
    sha256: str
    digests: frozenset[str]
    end_name: str | None = None
    text_bytes: int | None = None
    documents: int | None = None
    path: str | Path = ""
    weights: Sequence[int] = (1,)  # of the parts

    def parts(self) -> Sequence["Tokens"]:
        """Return the texts of a mixture, or the only text."""
        return (self,)

    def made_by(self) -> tuple[str, int, str]:
        """Return the name, vocabulary size and JSON text that identify the tokenizer."""
        return self.tokenizer, self.vocabulary, self.json

    def described(self) -> str:
        """Return the type and vocabulary size of the tokenizer: "characters, vocabulary 65"."""
        return f"{kind_of(self.tokenizer, self.json)}, vocabulary {self.vocabulary}"

    def mask(self) -> int | None:
        """Return the id of the tokenizer's mask token, or None."""
        added = json.loads(self.json).get("added_tokens", [])
        known = {each["content"]: each["id"] for each in added}
        return next((known[name] for name in MASKS if name in known), None)

    def end(self) -> int | None:
        """Return the id of the tokenizer's end-of-document token, or None."""
        return tokenizer_named(self.tokenizer, self.json, self.end_name).end

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids [start, stop) as int32; raise ValueError if the file is damaged."""
        raise NotImplementedError

    def close(self) -> None:
        """Close open files."""

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tokens(path: str | Path, tokenizer: str | None = None) -> Tokens:
    """Open a token file, a text file, or all `*.txt` files of a folder in order of name.

    Each byte of a text file is a token; no token file is written.  Raises a one-line ValueError
    that begins with `data.path` if the file is missing, empty, not text, damaged, or was written
    with a tokenizer other than `tokenizer`.
    """
    if Path(path).suffix in (*JSONL, *PARQUET, *BIN):
        raise UntokenizedError(
            f"data.path: {path} is not a token file; {_PREPARE} {path} -o tokens{SUFFIX}"
        )
    if Path(path).suffix == SUFFIX:
        tokens: Tokens = TokenFile(Path(path))
    else:
        texts = text_files(path)
        if not any(text.stat().st_size for text in texts):
            raise ValueError(f"data.path: {path} is empty; use a file or folder with text")
        tokens = TextTokens(texts)
    tokens.path = path
    if tokenizer not in (None, tokens.tokenizer):
        tokens.close()
        raise ValueError(
            f'data.path: {path} has "{tokens.tokenizer}" tokens, but data.tokenizer is '
            f'"{tokenizer}"; set it to "{tokens.tokenizer}", omit it, or create a token file '
            f"with python -m hpc3d.prepare --tokenizer {tokenizer}"
        )
    return tokens


def tokenizer_of(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a text or token file.

    Raises a one-line ValueError that begins with `data.path` if the file cannot be read.
    """
    if Path(path).suffix != SUFFIX:
        return ByteTokenizer()
    with TokenFile(Path(path)) as tokens:
        return tokenizer_named(tokens.tokenizer, tokens.json, tokens.end_name)


class TextTokens(Tokens):
    """Byte tokens of text files. The files are read on demand and never held in memory."""

    tokenizer = ByteTokenizer.name
    vocabulary = ByteTokenizer.vocabulary
    json = ByteTokenizer.json

    def __init__(self, texts: Sequence[Path]) -> None:
        sizes, digests, every = [], set(), hashlib.sha256()
        for text in texts:
            size, digest = 0, hashlib.sha256()
            for piece in (*pieces(text), bytes([END])):
                size += len(piece)
                digest.update(piece)
                every.update(piece)
            sizes.append(size)
            digests |= {digest.hexdigest()} if size > 1 else set()
        self.sha256 = every.hexdigest()
        self.digests = frozenset({*digests, self.sha256})
        self._texts = texts
        self._starts = np.cumsum([0, *sizes])
        self.text_bytes = sum(sizes) - len(sizes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        tokens = np.full(stop - start, END, np.int32)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop))
        for document in range(first, last):
            begin, end = self._starts[document : document + 2].tolist()
            low, high = max(start, begin), min(stop, end - 1)
            with reading_text(self._texts[document]) as text:
                part = np.fromfile(text, np.uint8, high - low, offset=low - begin)
                if len(part) < high - low:
                    raise ValueError("the file was truncated during the run")
            tokens[low - start : high - start] = part
        return tokens


class TokenFile(Tokens):
    """Token file that is open for reading.

    Raises ValueError if the file is missing, truncated, damaged, or in a newer format.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise ValueError(f"data.path: {path} {what}; {_PREPARE}")
        self._path = path
        with contextlib.ExitStack() as opened, _reading_tokens(path):
            # no locking: a token file never changes, and some parallel file systems lack locks
            file = opened.enter_context(h5py.File(path, "r", locking=False))
            self._describe(file)
            self._close = opened.pop_all().close

    def _describe(self, file: "h5py.File") -> None:
        form, version = file.attrs.get("format"), file.attrs.get("version")
        if form != _FORMAT.encode() or version != _VERSION:
            raise ValueError(f"format {form}, version {version}, not {_FORMAT}, {_VERSION}")
        self.tokenizer = str(file.attrs["tokenizer"], "utf-8")
        self.json = str(file.attrs["tokenizer_json"], "utf-8")
        self.sha256 = str(file.attrs["sha256"], "utf-8")
        self.digests = frozenset({self.sha256})
        self.vocabulary = int(file.attrs["vocabulary"])
        self.documents = int(file.attrs["documents"])
        self.end_name = str(file.attrs.get(_END, b""), "utf-8") or None
        self._tokens = _own_dataset(file, "tokens")
        self.dtype = self._tokens.dtype
        length = int(file.attrs["length"])
        if self._tokens.shape != (length,) or self.dtype.kind != "u":
            raise ValueError(f"{length} tokens expected, found {self._tokens}")
        if self.vocabulary > _MOST_IDS:
            raise ValueError(f"vocabulary {self.vocabulary} is above {_MOST_IDS}")
        if _TEXT_BYTES in file.attrs:
            self.text_bytes = int(file.attrs[_TEXT_BYTES])
        elif self.tokenizer == ByteTokenizer.name:  # each document has one more token, its end
            self.text_bytes = length - self.documents

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        with _reading_tokens(self._path):
            tokens = self._tokens[start:stop]
            if np.any(tokens >= self.vocabulary):
                raise ValueError(f"an id in [{start}, {stop}) is not below {self.vocabulary}")
        return tokens.astype(np.int32)

    def close(self) -> None:
        self._close()


def _own_dataset(file: "h5py.File", name: str) -> "h5py.Dataset":
    """Return a dataset stored in this file; reject links, because the file is untrusted."""
    import h5py

    dataset = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} is not a dataset of this file")
    return dataset


def verify(path: str | Path) -> None:
    """Read a complete token file; raise ValueError if the tokens do not match their SHA-256."""
    digest = hashlib.sha256()
    with TokenFile(Path(path)) as tokens:
        for start in range(0, len(tokens), PIECE):
            piece = tokens.read(start, min(start + PIECE, len(tokens)))
            digest.update(piece.astype(tokens.dtype))
        if digest.hexdigest() != tokens.sha256:
            raise ValueError(f"data.path: {path} does not match its SHA-256; {_PREPARE}")


def write_tokens(
    path: Path,
    texts: Sequence[Path],
    tokenizer: Tokenizer,
    report: _Report = lambda size: None,
    field: str = "text",
) -> None:
    """Tokenize `texts` piece by piece and write the token file `path`.

    `texts` are files in a format of hpc3d.data.sources, with documents in the field or column
    `field`.  `report` is called with the number of bytes of each piece.  Raises ValueError if a
    file is not text, and OSError if a write fails; `path` is then unchanged.
    """
    import h5py

    dtype = np.min_scalar_type(tokenizer.vocabulary - 1).newbyteorder("<")
    layout = {"chunks": (_CHUNK,), "maxshape": (None,), "fletcher32": True}
    digest, documents = hashlib.sha256(), 0
    sources = [Source(text, tokenizer, field) for text in texts]
    with (
        replacing(path) as temporary,
        Hdf5Output(temporary, "w+") as disk,
        h5py.File(disk, "w", libver=_SELF_CHECKING, locking=False) as file,
    ):
        dataset = file.create_dataset("tokens", (0,), dtype, **layout)
        for ids, size in chain.from_iterable(sources):
            part, length = ids.astype(dtype), len(dataset)
            dataset.resize((length + len(part),))
            dataset[length:] = part
            digest.update(part)
            documents += np.count_nonzero(part == tokenizer.end)
            disk.check()
            report(size)
        file.attrs.update(_described(sources, tokenizer))
        file.attrs.update(length=len(dataset), documents=documents)
        file.attrs.update(sha256=_fixed(digest.hexdigest()))


def _described(sources: Sequence[Source], tokenizer: Tokenizer) -> dict:
    """Return the HDF5 attributes of a token file after all `sources` have been read."""
    known = {_END: _fixed(tokenizer.end_name)} if tokenizer.end_name else {}
    sizes = [each.text_bytes for each in sources if each.text_bytes is not None]
    if len(sizes) == len(sources):
        known[_TEXT_BYTES] = sum(sizes)
    return known | {
        "format": _fixed(_FORMAT),
        "version": _VERSION,
        "tokenizer": _fixed(tokenizer.name),
        "tokenizer_json": _fixed(tokenizer.json),
        "vocabulary": tokenizer.vocabulary,
        "sources": _fixed([each.path.name for each in sources]),
    }


def _fixed(text: str | list[str]) -> np.ndarray:
    """Convert text to fixed-length strings, because HDF5 cannot checksum variable-length ones."""
    import h5py

    encoded = np.char.encode(text, "utf-8", "replace")
    return encoded.astype(h5py.string_dtype("utf-8", encoded.itemsize))
