"""A text on standard input, whose end a launcher may keep to itself."""

from __future__ import annotations

import os
import select

_PIECE = 1 << 16  # bytes
_PAUSE = 2.0  # seconds after which a text is over, of which something has come
_NOTHING = 10.0  # seconds after which none comes


def standard_input(launched: bool, descriptor: int = 0) -> bytes:
    """All of it.  `launched` by an mpirun a process may not learn where it ends, as by that of
    Open MPI 5: there it ends when nothing more has come for a while; ValueError without any."""
    found = b""
    while not launched or _comes(descriptor, _PAUSE if found else _NOTHING):
        piece = os.read(descriptor, _PIECE)
        if not piece:
            return found
        found += piece
    if not found:
        raise ValueError("--prompt -: nothing came on standard input; give --prompt TEXT")
    return found


def _comes(descriptor: int, seconds: float) -> bool:
    """Whether something can be read in that time."""
    return bool(select.select([descriptor], [], [], seconds)[0])
