"""Small files, and texts in TOML, of anyone's making: read within bounds.

A device or a pipe might never end, and what is large takes long to be parsed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpc3d.plain import told

_MOST_TEXT = 2**20  # bytes of an input file or of a machine
MOST_JSON = 2**25  # bytes of a config.json, or of an index of weights
MOST_SCHEDULE = 2**24  # bytes of a schedule as a CSV file
MOST_PARTS = 100  # of a key a.b.c: the time to parse one goes with their square


def read(path: Path | str, most: int = _MOST_TEXT, remedy: str = "name a file") -> bytes:
    """The bytes of a regular file.

    ValueError, in one line, for what is not a file, cannot be read or is larger than `most` bytes.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise ValueError(f"{path} is {kind}, and only regular files are read; {remedy}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{told(error)}; {remedy}") from None
    if len(content) > most:
        raise ValueError(f"{path}: larger than {most} bytes, the most that is read; {remedy}")
    return content


def toml(text: str) -> dict[str, Any]:
    """The tree of tables of a text in TOML; ValueError if it is not TOML, or too large."""
    import tomllib  # which ranks need not load

    if len(text) > _MOST_TEXT:
        raise ValueError(f"{len(text)} characters; at most {_MOST_TEXT} are read")
    if any(part.count(".") > MOST_PARTS for part in re.split("[=,\n]", text)):
        raise ValueError(f"a key of more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or arrays too deep") from None
