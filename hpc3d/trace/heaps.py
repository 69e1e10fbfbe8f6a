"""Integrity check of the global heaps of an HDF5 file, which store its variable-length strings.

The HDF5 library loops forever on a damaged heap.  A heap has the signature "GCOL", a version and a
size, followed by objects: 16-byte headers with data padded to a multiple of 8 bytes.  Object 0 is
the free space at the end of the heap (HDF5 File Format Specification 3.0, III.E).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_MARK = b"GCOL\x01\0\0\0"
_LARGE = 1 << 28  # maximum size in bytes; larger files are not checked
_OBJECT = struct.Struct("<HHIQ")  # object header: number, references, reserved, size


def check_heaps(path: Path) -> None:
    """Raise ValueError if a global heap is damaged; files above 256 MiB are not checked."""
    if not 0 < path.stat().st_size <= _LARGE:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(_MARK)
        while place >= 0:
            if not _sound(data, place):
                raise ValueError(f"the strings at byte {place} are damaged")
            place = data.find(_MARK, place + len(_MARK))


def _sound(data, offset):
    """Return True if the objects of the heap at `offset` are consistent with its size."""
    (size,) = struct.unpack_from("<Q", data, offset + 8) if offset + 16 <= len(data) else (0,)
    end, offset = offset + size, offset + 16
    if end > len(data):
        return False
    while offset + _OBJECT.size <= end:
        number, _, _, size = _OBJECT.unpack_from(data, offset)
        if number == 0:
            return offset + size == end
        offset += _OBJECT.size + (size + 7) // 8 * 8
    return offset <= end
