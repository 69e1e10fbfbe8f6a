"""Memory of this host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def total() -> int:
    """Return the memory of this machine, or the limit of its container if lower, in bytes."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or its content is "max"
        found = min(found, int(LIMIT_OF_CONTAINER.read_text()))
    return found
