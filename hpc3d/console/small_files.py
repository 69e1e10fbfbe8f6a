"""Bounded reading of small files and TOML from untrusted sources.

A device or a pipe might never end, and a large file takes long to parse.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpc3d.console.sanitize import file_and_reason

_MOST_TEXT = 2**20  # bytes of an input or machine file
MOST_JSON = 2**25  # bytes of a config.json or a weight index
MOST_SCHEDULE = 2**24  # bytes of a schedule as a CSV file
MOST_PARTS = 100  # parts of a key a.b.c: parsing time is quadratic in them


def read(path: Path | str, most: int = _MOST_TEXT, remedy: str = "name a file") -> bytes:
    """Return the bytes of a regular file.

    Raises ValueError with one line if it is no regular file, is unreadable or exceeds `most`
    bytes.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise ValueError(f"{path} is {kind}, and only regular files are read; {remedy}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{file_and_reason(error)}; {remedy}") from None
    if len(content) > most:
        raise ValueError(f"{path}: larger than {most} bytes, the most that is read; {remedy}")
    return content


def toml(text: str) -> dict[str, Any]:
    """Parse TOML into nested tables; ValueError if it is invalid or too large."""
    import tomllib  # training ranks do not load it

    if len(text) > _MOST_TEXT:
        raise ValueError(f"{len(text)} characters; at most {_MOST_TEXT} are read")
    if any(part.count(".") > MOST_PARTS for part in re.split("[=,\n]", text)):
        raise ValueError(f"a key of more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or arrays too deep") from None
