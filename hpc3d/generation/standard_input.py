"""Text on standard input, whose end a launcher may not forward."""

from __future__ import annotations

import os
import select

_PIECE = 1 << 16  # bytes
_PAUSE = 2.0  # seconds of silence that end a text
_NOTHING = 10.0  # seconds of silence before the first byte


def standard_input(launched: bool, descriptor: int = 0) -> bytes:
    """Read all of standard input.

    A process `launched` by mpirun may never receive end-of-file, as with Open MPI 5. Its text ends
    when no input has arrived for a while. Raises ValueError if nothing arrives.
    """
    found = b""
    while not launched or _comes(descriptor, _PAUSE if found else _NOTHING):
        piece = os.read(descriptor, _PIECE)
        if not piece:
            return found
        found += piece
    if not found:
        raise ValueError("--prompt -: standard input is empty; give --prompt TEXT")
    return found


def _comes(descriptor: int, seconds: float) -> bool:
    """Return True if input arrives within `seconds`."""
    return bool(select.select([descriptor], [], [], seconds)[0])
