"""Input formats for token files: text, JSON lines, Parquet, and nanoGPT or Megatron-LM tokens.

    .txt       one document per file
    .jsonl     one JSON object per line; one field contains the document
    .parquet   one document per row; one column contains the document
    .bin       nanoGPT: uint16 token ids, including end-of-document tokens
    .bin .idx  Megatron-LM: token ids, and an index of sequences and documents

Files are read in pieces.  An invalid file causes a ValueError with a one-line message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc3d.console.exit_codes import BadData
from hpc3d.data.tokenizer import PIECE, Tokenizer, pieces, reading
from hpc3d.runtime.optional_packages import need

JSONL, PARQUET, BIN = (".jsonl", ".ndjson"), (".parquet",), (".bin",)
_LINE = 1 << 28  # maximum bytes per line of a JSON lines file
_ROWS = 256  # number of Parquet rows read at a time
_OF_A_DOCUMENT = 64  # fixed cost of tokenizing a segment, expressed in characters
_MEGATRON, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequence count, document count + 1
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # type code -> dtype of ids


class _DocumentPart(NamedTuple):
    """Segment of a document.

    `last` is True for the last segment of the document. `size` is the segment's size in the file,
    in bytes.
    """

    text: bytes
    last: bool
    size: int


class Source:
    """Iterator over the token ids of a file.

    `text_bytes` is the size of the documents read so far, in UTF-8 bytes, or `None` if the file
    contains ids.

    The `end` token of the tokenizer, if it has one, is appended to each document. If the file
    already contains ids, the token is added only to Megatron-LM documents that lack it.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, field: str = "text") -> None:
        self.path, self.tokenizer, self.field = path, tokenizer, field
        self.text_bytes = None if path.suffix in BIN else 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield pairs (array of token ids, number of bytes that they occupy in the file)."""
        if self.path.suffix in BIN:
            yield from self._given_ids()
            return
        known = [] if self.tokenizer.end is None else [self.tokenizer.end]
        end, remedy = np.array(known, np.int64), "choose another --tokenizer"
        for group in _grouped(_parts(self.path, self.field)):
            with reading(self.path, "not encodable with this tokenizer", remedy):
                encoded = self.tokenizer.encode_batch([part.text for part in group])
            rows = []
            for ids, part in zip(encoded, group, strict=True):
                rows += [ids, end] if part.last else [ids]
            yield np.concatenate(rows), sum(part.size for part in group)
            self.text_bytes += sum(len(part.text) for part in group)

    def _given_ids(self) -> Iterator[tuple[np.ndarray, int]]:
        ids, ends = opened_ids(self.path)
        known = self.tokenizer.vocabulary
        if not len(ends):
            self._refuse_wider(ids[:PIECE])
        for start in range(0, len(ids), PIECE):
            part = np.asarray(ids[start : start + PIECE])
            if wrong := [each for each in (part.min(), part.max()) if not 0 <= each < known]:
                raise ValueError(
                    f"data.path: {self.path}: id {wrong[0]} is not among the {known} ids of the "
                    "tokenizer; set --tokenizer to the matching one, or write ids as uint16"
                )
            first, last = np.searchsorted(ends, [start, start + len(part)], "right")
            yield self._ended(part, np.unique(ends[first:last] - start)), part.nbytes

    def _refuse_wider(self, ids: np.ndarray) -> None:
        """Raise ValueError if a file read as uint16 appears to contain 32-bit or 64-bit ids.

        Every second uint16 value of such a file is close to zero.
        """
        upper = ids[1::2]
        if len(upper) > 3 and ids.any() and upper.max() <= (self.tokenizer.vocabulary - 1) >> 16:
            raise ValueError(
                f"data.path: {self.path}: every second id is at most {upper.max()}, so the ids "
                "seem to be 32-bit; convert them to uint16: ids.astype(np.uint16).tofile(...)"
            )

    def _ended(self, part: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Append an end token to each document without one.

        `ends` contains, for each document, the index after its last token.
        """
        if self.tokenizer.end is None or not len(ends):
            return part
        lacking = ends[part[ends - 1] != self.tokenizer.end]
        return np.insert(part.astype(np.int64), lacking, self.tokenizer.end)


def training_pieces(texts: Sequence[Path], field: str) -> Iterator[bytes]:
    """Yield the text of all files in pieces, for training a tokenizer."""
    for path in texts:
        yield from (part.text for part in _parts(path, field))


def _parts(path: Path, field: str) -> Iterator[_DocumentPart]:
    if path.suffix in JSONL:
        return _json_lines(path, field)
    if path.suffix in PARQUET:
        return _parquet(path, field)
    return _text_file(path)


def _grouped(parts: Iterable[_DocumentPart]) -> Iterator[list[_DocumentPart]]:
    """Group segments into lists of about PIECE characters, to reduce the number of calls."""
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part.text) + _OF_A_DOCUMENT
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _text_file(path: Path) -> Iterator[_DocumentPart]:
    for piece in pieces(path):
        yield _DocumentPart(piece, False, len(piece))
    yield _DocumentPart(b"", True, 0)


def _json_lines(path: Path, field: str) -> Iterator[_DocumentPart]:
    found = 0
    with reading(path, "not a readable JSON lines file", "fix the file"), path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 1):
            if line.isspace():
                continue
            yield from _cut(_field(path, line, number, field), f"line {number}", len(line))
            found += 1
        if not found:
            raise ValueError("the file has no documents")


def _field(path: Path, line: bytes, number: int, field: str) -> str:
    """Parse a line as a JSON object, and return the text in field `field`."""
    if len(line) == _LINE:
        raise ValueError(f"line {number} exceeds the limit of {_LINE} bytes")
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"line {number}: not a JSON object")
    if not isinstance(found.get(field), str):
        keys = ", ".join(key for key, value in found.items() if isinstance(value, str))
        remedy = "use a file with text fields"
        if isinstance(found.get(field), list):
            remedy = "this field is a list; if it contains chat messages, apply the chat template "
            remedy += "of the model first, and write the result to a text field"
        elif keys:
            remedy = f"set --field to one of its text fields: {keys:.200}"
        raise BadData(
            f'data.path: {path}: line {number} has no text field "{field:.60}"; {remedy}'
        )
    return found[field]


def _parquet(path: Path, column: str) -> Iterator[_DocumentPart]:
    need(f"{path}: parquet", "pyarrow")
    from pyarrow import parquet

    with (
        reading(path, "not a readable Parquet file", "use another file"),
        parquet.ParquetFile(path, pre_buffer=False, buffer_size=PIECE) as table,
    ):
        rows, row = table.metadata.num_rows, 0
        if column not in (names := table.schema_arrow.names):
            known = ", ".join(names)
            raise BadData(
                f"data.path: {path} has no column {column:.60}; set --column to one of its "
                f"columns: {known:.200}"
            )
        if not rows:
            raise ValueError("the file has no documents")
        share = path.stat().st_size // rows
        for batch in table.iter_batches(_ROWS, columns=[column]):
            for value in batch.column(0):
                row += 1
                text = value.as_py()
                if not isinstance(text, str):
                    raise BadData(
                        f"data.path: {path}: row {row} of column {column:.60} has type "
                        f"{value.type}, not text; set --column to a text column"
                    )
                yield from _cut(text, f"row {row}", share)


def _cut(text: str, where: str, size: int) -> Iterator[_DocumentPart]:
    """Split a document into segments; `size` is the size of the document in the file, in bytes."""
    if "\0" in text:
        raise ValueError(f"{where}: the text contains NUL characters")
    for start in range(0, max(len(text), 1), PIECE):
        try:
            piece = text[start : start + PIECE].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {error.reason}") from None
        last = start + PIECE >= len(text)
        yield _DocumentPart(piece, last, size if last else 0)


# Tokens from other programs


def opened_ids(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the token ids of a .bin file; return them and the document ends.

    A document end is the index after the document's last id (int64). The array of ends is empty
    for a nanoGPT file, that is, a .bin file without an .idx file.
    """
    index = path.with_suffix(".idx")
    with reading(path, "not a readable token file", "use another file"):
        size = path.stat().st_size
        if index.exists():
            return _megatron(path, index)
        if not size or size % 2:
            raise ValueError(f"{size} bytes cannot hold uint16 ids, the format of nanoGPT")
        return np.memmap(path, "<u2", mode="r"), np.empty(0, np.int64)


def _megatron(path: Path, index: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids and the document ends of a Megatron-LM indexed dataset.

    The index file has a header, the sequence lengths (i4), their byte offsets (i8), and the index
    of the first sequence of each document (i8), followed by the number of sequences.
    """
    with index.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MEGATRON):
        raise ValueError(f"{index.name} is not a Megatron-LM index file")
    _, version, code, sequences, edges = _HEAD.unpack(head)
    if version != _VERSION or code not in _TYPES:
        raise ValueError(f"{index.name} has the unsupported version {version} or type {code}")
    if index.stat().st_size < _HEAD.size + 12 * sequences + 8 * edges:
        raise ValueError(f"{index.name} is truncated")
    if not sequences or edges < 2:
        raise ValueError(f"{index.name} lists no documents")
    offset = _HEAD.size
    sizes = np.memmap(index, "<i4", "r", offset, (sequences,))
    starts = np.memmap(index, "<i8", "r", offset + sizes.nbytes, (sequences,))
    firsts = np.memmap(index, "<i8", "r", offset + 12 * sequences, (edges,))
    if path.stat().st_size % np.dtype(_TYPES[code]).itemsize:
        raise ValueError("the file ends in the middle of a token id")
    ids = np.memmap(path, _TYPES[code], mode="r")
    total = _length(index, sizes, starts, ids.itemsize)
    if total != len(ids):
        raise ValueError(f"it has {len(ids)} ids, but {index.name} lists {total}")
    return ids, _ends(index, firsts, starts // ids.itemsize, total)


def _length(index: Path, sizes: np.ndarray, starts: np.ndarray, itemsize: int) -> int:
    """Return the total number of ids; raise ValueError if the sequences are not contiguous."""
    total = 0
    for first in range(0, len(sizes), PIECE):
        ends = total + np.cumsum(part := sizes[first : first + PIECE], dtype=np.int64)
        if (part < 0).any() or ((ends - part) * itemsize != starts[first : first + PIECE]).any():
            raise ValueError(f"{index.name} is damaged: sequences are not contiguous")
        total = int(ends[-1])
    return total


def _ends(index: Path, firsts: np.ndarray, starts: np.ndarray, total: int) -> np.ndarray:
    """Return the index after the last id of each document."""
    if firsts[0] or firsts[-1] != len(starts) or (np.diff(firsts) < 0).any():
        raise ValueError(f"{index.name} is damaged: documents are not contiguous")
    return np.append(starts, total)[firsts[1:]]
