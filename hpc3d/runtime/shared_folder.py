"""Check that all hosts of a job share the output folder.

Rank 0 creates an empty temporary file (the key) in the folder, and the lowest rank on each other
node checks whether it sees the file.  In a job on one node, no file is created.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.runtime.host_map import Homes, listed

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

SEEN_WITHIN = 3  # timeout in s: on network file systems, new files appear with a delay
REMEDY = "set --run.out to a folder that all hosts share, or start the job in one"


def refuse_unshared(job: Job, homes: Homes, locate: Callable[[], Path]) -> None:
    """End the job with an error message unless all of its hosts see the output folder.

    `locate()` returns the folder on rank 0.  If the folder does not exist yet, its nearest
    existing parent is checked.
    """
    if not homes.several():
        return
    asked = locate() if job.rank == 0 else None
    key = job.comm.bcast(_left_key(asked) if job.rank == 0 else None)
    if blind := _unseen(job, homes, key):
        name, first = listed([homes.hosts[rank] for rank in blind]), homes.hosts[0]
        do = "do" if len(blind) > 1 else "does"
        where = os.path.dirname(key)
        where = "there" if where == str(asked) else f"in {where}"
        job.refuse(f"{asked}: {name} {do} not see the files of {first} {where}; {REMEDY}")


def _unseen(job: Job, homes: Homes, key: str | None) -> list[int]:
    """Return the lowest rank of each node that does not see the file `key`; delete the file."""
    looks = key and job.rank and job.rank in homes.leaders()
    try:
        sees = job.gather(appears(key) if looks else True)
    finally:
        if job.rank == 0 and key:
            with suppress(OSError):
                os.unlink(key)
    return [rank for rank, good in enumerate(sees) if not good]


def _left_key(folder: Path) -> str | None:
    """Create an empty file in `folder` or its nearest existing parent, and return its path.

    Returns None if the file cannot be created.  The error is reported later, when the output
    folder is created.
    """
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    key = there / f".hpc3d-{secrets.token_hex(8)}"
    try:
        key.touch(exist_ok=False)
    except OSError:
        return None
    return str(key)


def appears(path: Path | str) -> bool:
    """Return True if a path exists or appears within SEEN_WITHIN seconds."""
    until = time.monotonic() + SEEN_WITHIN
    while not Path(path).exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            os.listdir(os.path.dirname(path))  # forces an NFS client to query the server again
        time.sleep(0.1)
    return True
