"""Memory size of this host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def total() -> int:
    """Return the memory size of this host in bytes, or its container's limit if that is lower."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the file does not exist, or contains "max"
        found = min(found, int(LIMIT_OF_CONTAINER.read_text()))
    return found
