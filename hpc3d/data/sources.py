"""What token files are made of: texts, JSON lines, parquet, tokens of nanoGPT and Megatron-LM.

    .txt      a document
    .jsonl    an object a line, of which a field is a document
    .parquet  a column, each value of which is a document
    .bin      of nanoGPT: uint16 ids, the ends of documents among them, beside a meta.pkl or none
    .bin .idx of Megatron-LM: ids, and where each sequence begins and ends

Files are read in pieces.  Whatever is wrong with one is a ValueError of one line.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc3d.data.tokenizer import (
    PIECE,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    characters,
    pieces,
    reading,
)
from hpc3d.extras import need

JSONL, PARQUET, BIN = (".jsonl", ".ndjson"), (".parquet",), (".bin",)
_LINE = 1 << 28  # bytes of a line of JSON at most
_META = 1 << 24  # bytes of a meta.pkl at most
_MEGATRON, _VERSION = b"MMIDIDX\x00\x00", 1
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # code -> type of the ids


class Source:
    """The tokens of a file by a tokenizer, a piece at a time; `documents` are those so far.

    The `end` of a document follows each that is text; in a .bin they are where they are.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, field: str = "text") -> None:
        self.path, self.tokenizer, self.field, self.documents = path, tokenizer, field, 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Ids, and how many bytes of the file they were."""
        if self.path.suffix in BIN:
            yield from self._ids()
            return
        end = np.array([self.tokenizer.end])
        for document in self.texts():
            for piece in document:
                yield self.tokenizer.encode(piece), len(piece)
            self.documents += 1
            yield end, 0

    def texts(self) -> Iterator[Iterator[bytes]]:
        """The documents, each as its pieces."""
        if self.path.suffix in JSONL:
            yield from (iter([text]) for text in _json_lines(self.path, self.field))
        elif self.path.suffix in PARQUET:
            yield from (iter([text]) for text in _parquet(self.path, self.field))
        else:
            yield pieces(self.path)

    def _ids(self) -> Iterator[tuple[np.ndarray, int]]:
        ids, self.documents = opened_ids(self.path)
        for start in range(0, len(ids), PIECE):
            part = np.asarray(ids[start : start + PIECE])
            if part.min(initial=0) < 0 or part.max(initial=0) >= self.tokenizer.vocabulary:
                raise ValueError(
                    f"data.path: {self.path}: id {part.max()} is not below the tokenizer's "
                    f"{self.tokenizer.vocabulary}; give --tokenizer the one that made them"
                )
            yield part, part.nbytes


def training_pieces(texts: Sequence[Path], field: str) -> Iterator[bytes]:
    """The text of files, for a tokenizer to learn from."""
    for path in texts:
        for document in Source(path, ByteTokenizer(), field).texts():
            yield from document


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    """The field of each object."""
    with reading(path, "no readable JSON lines", "name another"), path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            if not isinstance(found, dict) or not isinstance(found.get(field), str):
                keys = ", ".join(map(str, found)) if isinstance(found, dict) else "no object"
                raise ValueError(
                    f'line {number}: no text "{field}" in it, but {keys:.200}; --field'
                )
            yield _text(found[field], f"line {number}")


def _parquet(path: Path, column: str) -> Iterator[bytes]:
    """The values of a column of texts."""
    need("parquet", "pyarrow")
    from pyarrow import parquet

    with reading(path, "no readable parquet", "name another"):
        table = parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            known = ", ".join(table.schema_arrow.names)
            raise ValueError(f"no column {column}, but {known:.200}; --field names it")
        for batch in table.iter_batches(256, columns=[column]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise ValueError(f"column {column} has a {type(value).__name__}, no text")
                yield _text(value, f"column {column}")


def _text(text: str, where: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"{where}: it holds NUL characters")
    return text.encode()


# Tokens of other programs


def opened_ids(path: Path) -> tuple[np.ndarray, int]:
    """The ids of a .bin, mapped into memory, and how many documents they are (0: not known)."""
    index = path.with_suffix(".idx")
    with reading(path, "no readable file of tokens", "name another"):
        if index.exists():
            return _megatron(path, index)
        if not path.stat().st_size or path.stat().st_size % 2:
            raise ValueError(f"{path.stat().st_size} bytes are no uint16 ids, as nanoGPT writes")
        return np.memmap(path, "<u2", mode="r"), 0


def _megatron(path: Path, index: Path) -> tuple[np.ndarray, int]:
    """Of an indexed dataset: magic, version u64, type u8, sequences u64, documents u64, the sizes
    of sequences i4, where they begin i8, and the first sequence of each document i8."""
    head = struct.Struct("<QBQQ")
    with index.open("rb") as file:
        magic = file.read(len(_MEGATRON))
        fields = file.read(head.size)
        if magic != _MEGATRON or len(fields) < head.size:
            raise ValueError(f"{index.name} is no index of Megatron-LM")
        version, code, sequences, documents = head.unpack(fields)
        if version != _VERSION or code not in _TYPES:
            raise ValueError(f"{index.name} has version {version} and type {code}, not known here")
        sizes = np.fromfile(file, "<i4", sequences)
        starts = np.fromfile(file, "<i8", sequences)
    ids = np.memmap(path, _TYPES[code], mode="r")
    end = np.cumsum(sizes, dtype=np.int64)
    if len(sizes) < sequences or len(starts) < sequences or (sizes < 0).any():
        raise ValueError(f"{index.name} is cut short")
    if not np.array_equal(starts, (end - sizes) * ids.itemsize) or end[-1:].sum() != len(ids):
        raise ValueError(f"{index.name} is of another file: {len(ids)} ids, {end[-1:]} expected")
    return ids, max(0, documents - 1)


class _Plain(pickle.Unpickler):
    """Dicts, texts and numbers alone: whatever would import or call something is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and is not read")


def meta_tokenizer(path: Path) -> BpeTokenizer | None:
    """The characters that nanoGPT's meta.pkl beside a .bin numbers; None where there is none."""
    meta = path.with_name("meta.pkl")
    if not meta.is_file():
        return None
    with reading(meta, "no readable meta.pkl of nanoGPT", "give --tokenizer"):
        if meta.stat().st_size > _META:
            raise ValueError("it is too large")
        try:
            with meta.open("rb") as file:
                numbers = dict(_Plain(file).load()["stoi"])
        except (pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise ValueError(f"{error}") from None
        if sorted(numbers.values()) != [*range(len(numbers))]:
            raise ValueError("its characters are not numbered from 0")
        return characters({str(key): int(number) for key, number in numbers.items()})
