"""Read text from standard input, even if an MPI launcher does not forward end-of-file."""

from __future__ import annotations

import os
import select

_PIECE = 1 << 16  # maximum bytes per read
_PAUSE = 2.0  # stop reading after this many seconds without input
_NOTHING = 10.0  # maximum seconds to wait for the first byte


def standard_input(launched: bool, descriptor: int = 0) -> bytes:
    """Read all of standard input.

    Some MPI launchers, such as that of Open MPI 5, never forward end-of-file. If `launched` is
    true, the input is therefore considered complete when nothing has arrived for 2 s. Raises
    ValueError if a launched process receives no input.
    """
    found = b""
    while not launched or select.select([descriptor], [], [], _PAUSE if found else _NOTHING)[0]:
        piece = os.read(descriptor, _PIECE)
        if not piece:
            return found
        found += piece
    if not found:
        raise ValueError("--prompt -: standard input is empty; give --prompt TEXT")
    return found
